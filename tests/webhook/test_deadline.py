"""Each review has a deadline: slow lookups and long loops end in time, with an answer that says so."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cardwise.core.api.classes import ResourceClass
from cardwise.kube import errors, paths
from cardwise.runtime.http import httpcalls
from tests import build
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock
from tests.webhook.reviews import Known, body, resource_classes
from webhook import deadline, rules
from webhook.cluster.ondemand import FreshList, GangNumbers, PodGroups
from webhook.pods.context import WebhookSettings
from webhook.server import app as shell

CLASSES = 60
TEXT = "the webhook did not finish this review within {} s"


class Slow(Known):
    """A view whose every lookup of a class takes `seconds`."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__(known_classes=resource_classes(*(build.resource_class(f"c{i}") for i in range(CLASSES))))
        self.clock, self.seconds, self.lookups = clock, seconds, 0

    def resource_class(self, name: str) -> ResourceClass | None:
        deadline.check()  # as `ClusterView` does
        self.lookups += 1
        self.clock.advance(self.seconds)
        return super().resource_class(name)


def pod_of_many_classes() -> Any:
    limits = [{f"cardwise.dev/c{i}": "1"} for i in range(CLASSES)]
    return build.pod(containers=[{"name": f"c{i}", "resources": {"limits": limit}} for i, limit in enumerate(limits)])


def post(view: Known, clock: FakeClock, path: str, pod: Any, query: str = "", **environ: Any) -> Any:
    client = shell.create_app(view, WebhookSettings(), clock).test_client()
    data = body(pod)
    return client.post(f"{path}?{query}", data=data, content_type="application/json", environ_overrides=environ)


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("timeout=5s", 4.0), ("timeout=1s", 0.8), ("a=b&timeout=10s", 8.0), ("timeout=30s", 8.0), ("", 4.0)]
    + [(f"timeout={text}", 4.0) for text in ("0s", "31s", "5", "-1s", "5s5", "1h", "1" * 5000 + "s")],
)
def test_deadline_follows_the_timeout_of_the_api_server(query: str, seconds: float) -> None:
    assert deadline.seconds_of(query) == pytest.approx(seconds)


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@pytest.mark.parametrize(("query", "seconds"), [("timeout=5s", 4), ("timeout=1s", 0.8)])
def test_review_of_slow_lookups_ends_in_time(clock: FakeClock, path: str, query: str, seconds: float) -> None:
    view = Slow(clock, 0.5)
    began = clock.now()
    answer = post(view, clock, path, pod_of_many_classes(), query)
    assert answer.status_code == 503
    assert answer.text.startswith(TEXT.format(seconds))
    assert clock.now() - began <= seconds + view.seconds


@pytest.mark.parametrize(("waited", "status"), [(3.9, 200), (4.0, 503)])
def test_seconds_before_a_thread_is_free_count(clock: FakeClock, waited: float, status: int) -> None:
    arrived = {httpcalls.ARRIVED_KEY: clock.now() - waited}
    assert post(Known(), clock, "/mutate", build.pod(gpu_mem="1Gi"), **arrived).status_code == status


def test_deadline_is_checked_before_each_rule(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def rule(pod: object, context: object) -> None:
        ran.append(rule)
        clock.advance(1.5)

    monkeypatch.setattr(rules, "MUTATE", (rule,) * 50)
    assert post(Known(), clock, "/mutate", build.pod(gpu_mem="1Gi")).status_code == 503
    assert len(ran) == 3


def test_deadline_of_a_review_does_not_count_for_the_next(clock: FakeClock) -> None:
    view = Slow(clock, 0.5)
    assert post(view, clock, "/mutate", pod_of_many_classes()).status_code == 503
    assert deadline.remaining_seconds() is None
    assert post(view, clock, "/mutate", build.pod(gpu_mem="1Gi")).status_code == 200


@pytest.fixture
def four_seconds(clock: FakeClock) -> Iterator[None]:
    with deadline.review_deadline(clock, clock.now() + 4):
        yield


@pytest.mark.usefixtures("four_seconds")
def test_a_lookup_lasts_no_longer_than_the_review(api: ApiServer, clock: FakeClock) -> None:
    silence = api.fault(Fault(seconds=60), times=100)
    new, began = FreshList(api.client(clock=clock), paths.resourceclasses(), clock), clock.now()
    clock.advance(2.8)
    with pytest.raises(errors.TimedOut):
        new.get("none")
    assert clock.now() - began == pytest.approx(4)
    for lookup in (lambda: new.get("none"), PodGroups(api.client(clock=clock), clock).is_served):
        with pytest.raises(deadline.ReviewTimeout):
            lookup()
    with pytest.raises(deadline.ReviewTimeout):
        GangNumbers(api.client(clock=clock), clock).conflicting_member("x", "x", 2)
    silence.end()


@pytest.mark.parametrize(("seconds", "failed"), [(3.5, 0.0), (2.5, 1.1), (1.0, 5.1)])
def test_little_time_causes_no_failure_for_others(
    api: ApiServer, clock: FakeClock, seconds: float, failed: float
) -> None:
    """A client with short timeouts must not stop the lookups of all reviews: with less than half a second left none
    begins, and a timeout that the deadline has shortened is cached for one second, not for five.
    """
    silence = api.fault(Fault(seconds=60), times=100)
    new = FreshList(api.client(clock=clock), paths.resourceclasses(), clock)
    with deadline.review_deadline(clock, clock.now() + 4):
        clock.advance(seconds + 0.01)
        with pytest.raises((errors.TimedOut, deadline.ReviewTimeout)):
            new.get("none")
    silence.end()
    if failed:
        with pytest.raises(errors.TimedOut):
            new.get("none")
    clock.advance(failed)
    assert new.get("none") is None


def test_reviews_wait_for_the_lookup_of_another_until_their_deadline(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    new = FreshList(api.client(clock=clock), paths.resourceclasses(), clock)
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def fetch(timeout: float) -> dict[str, Any]:
        begun.set()
        assert go_on.wait(60)
        return {"x": {}}

    monkeypatch.setattr(new._cached_list, "_fetch", fetch)

    def wait() -> None:
        with deadline.review_deadline(clock, clock.now() + 4):
            try:
                ended.append(new.get("x"))
            except deadline.ReviewTimeout:
                ended.append("too late")

    first = threading.Thread(target=new.get, args=["x"])
    first.start()
    assert begun.wait(60)
    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    clock.until_waiting(3)
    clock.advance(4)
    for thread in waiting:
        thread.join(60)
    assert ended == ["too late"] * 3
    go_on.set()
    first.join(60)
    assert new.get("x") == {}
