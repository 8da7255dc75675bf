"""Lookups while a review waits: unknown class names, the size of a gang, whether PodGroups are served.

The number of requests to the API server is limited, however many pods arrive.
"""

import math
import threading
import traceback
from collections import Counter
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import resource_class
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock
from webhook.cluster.ondemand import PODGROUPS, FreshList, GangNumbers, LookupLimit, PodGroups


@pytest.fixture
def new(api: ApiServer, clock: FakeClock) -> FreshList:
    return FreshList(api.client(clock=clock), paths.resourceclasses(), clock)


def test_unknown_names_cause_one_list_per_second(api: ApiServer, clock: FakeClock, new: FreshList) -> None:
    assert [podgroup for i in range(5000) if (podgroup := new.get(f"none.{i}"))] == []
    assert [request.verb for request in api.sent()] == ["list"]
    api.write_object(paths.resourceclasses(), resource_class("late"))
    clock.advance(0.9)
    assert new.get("late") is None
    clock.advance(0.2)
    podgroup = new.get("late")
    assert podgroup is not None
    assert podgroup["metadata"]["name"] == "late"
    assert len(api.sent()) == 2


def test_timed_out_list_is_repeated_after_five_seconds(api: ApiServer, clock: FakeClock, new: FreshList) -> None:
    silence = api.fault(Fault(seconds=math.inf), "list", times=math.inf)
    for _ in range(100):
        with pytest.raises(errors.TimedOut):
            new.get("none")
        clock.advance(0.04)
    assert len(api.sent()) == 1
    silence.end()
    clock.advance(1.1)
    assert new.get("none") is None


def test_failed_list_is_repeated_after_a_second(api: ApiServer, clock: FakeClock, new: FreshList) -> None:
    api.fault(Fault(status=500), "list", times=2)
    for _ in range(100):
        with pytest.raises(errors.ServerError) as failure:
            new.get("none")
        clock.advance(0.0151)
    assert len(api.sent()) == 2
    assert len(list(traceback.walk_tb(failure.value.__traceback__))) < 10, "not the frames of all that asked"
    clock.advance(1)
    assert new.get("none") is None


def test_without_their_crd_there_are_no_objects(api: ApiServer, new: FreshList) -> None:
    api.missing.add(paths.resourceclasses())
    assert new.get("none") is None


def member(name: str, number: str | None, **metadata: Any) -> Json:
    annotations = {names.GROUP_NAME: "slurp"} | ({} if number is None else {names.GROUP_NUM: number})
    labelled = {"name": name, "labels": {names.GANG: "slurp"}, "annotations": annotations}
    return {"metadata": labelled | metadata, "spec": {"containers": []}}


@pytest.fixture
def gang_numbers(api: ApiServer, clock: FakeClock) -> GangNumbers:
    return GangNumbers(api.client(clock=clock), clock)


def test_conflicting_member_of_the_gang_is_returned(api: ApiServer, gang_numbers: GangNumbers) -> None:
    for pod in (member("a", "3"), member("b", "4"), member("c", "5", namespace="team"), member("d", "6", labels={})):
        api.write_object(paths.pods(), pod)
    api.write_object(paths.pods(), member("0", "7") | {"status": {"phase": "Failed"}})
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("b", 4)
    assert len(api.sent()) == 1


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [member("a", "3")],
        [member("a", None)],
        [member("a", "4", deletionTimestamp="2026-11-21T12:00:00Z")],
        [member("a", "many")],
        [{"metadata": {"name": "a", "labels": {names.GANG: "slurp"}}}],
    ],
    ids=["none", "agrees", "says none", "goes", "nonsense", "bare"],
)
def test_gang_without_a_conflicting_member(
    api: ApiServer, gang_numbers: GangNumbers, pods: list[dict[str, Any]]
) -> None:
    for pod in pods:
        api.write_object(paths.pods(), pod)
    assert gang_numbers.conflicting_member("default", "slurp", 3) is None


def test_failing_member_list_admits_the_pod(api: ApiServer, clock: FakeClock, gang_numbers: GangNumbers) -> None:
    api.write_object(paths.pods(), member("a", "4"))
    api.fault(Fault(seconds=60))
    assert gang_numbers.conflicting_member("default", "slurp", 3) is None
    assert clock.now() == 1001


def test_members_of_a_large_gang_are_listed_rarely(api: ApiServer, clock: FakeClock, gang_numbers: GangNumbers) -> None:
    api.write_object(paths.pods(), member("a", "3"))
    assert [gang_numbers.conflicting_member("default", "slurp", 3) for _ in range(100)] == [None] * 100
    assert len(api.sent()) == 1
    assert gang_numbers.conflicting_member("default", "slurp", 4) == ("a", 3), "another number is always compared"
    assert gang_numbers.conflicting_member("team", "slurp", 3) is None
    assert len(api.sent()) == 3
    clock.advance(11)
    api.write_object(paths.pods(), member("a", "5"))
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 5)


def test_first_member_is_not_cached_as_agreement(api: ApiServer, gang_numbers: GangNumbers) -> None:
    assert gang_numbers.conflicting_member("default", "slurp", 3) is None
    api.write_object(paths.pods(), member("a", "4"))
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 4)


def test_gang_lookups_are_limited_per_namespace_and_in_total(
    api: ApiServer, clock: FakeClock, gang_numbers: GangNumbers
) -> None:
    api.write_object(paths.pods(), member("a", "4"))
    for i in range(100):
        gang_numbers.conflicting_member("greedy", f"none-{i}", 3)
    assert len(api.sent()) == 10
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 4), "another namespace has its own ten"
    for i in range(1000):
        gang_numbers.conflicting_member(f"team-{i}", "none", 3)
    assert len(api.sent()) == 100, "as many again for namespaces that had none"
    assert gang_numbers.conflicting_member("default", "slurp", 3) is None
    clock.advance(1)
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 4)


def test_lookup_limit_holds_for_any_second(clock: FakeClock) -> None:
    limit = LookupLimit(clock, per_owner=10, total=15)
    assert limit.begin_lookup("early")
    clock.advance(0.9)
    assert [limit.begin_lookup("greedy") for _ in range(11)] == [True] * 10 + [False]
    clock.advance(0.2)
    assert not limit.begin_lookup("greedy"), "its ten began within this second"
    assert [limit.begin_lookup("other") for _ in range(6)] == [True] * 5 + [False], "with the ten they are fifteen"
    clock.advance(0.8)
    assert [limit.begin_lookup("greedy") for _ in range(11)] == [True] * 10 + [False]


def test_slow_namespace_does_not_stop_lookups_of_others(
    api: ApiServer, clock: FakeClock, gang_numbers: GangNumbers
) -> None:
    api.write_object(paths.pods(), member("a", "4"))
    api.fault(Fault(seconds=60))
    for i in range(5):
        assert gang_numbers.conflicting_member("slow", f"slurp-{i}", 3) is None
    assert len(api.sent()) == 1, "it has to wait itself, whatever gang it names"
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 4)
    clock.advance(5.1)
    gang_numbers.conflicting_member("slow", "slurp-0", 3)
    assert len(api.sent()) == 3


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=429)])
def test_api_server_failure_pauses_all_gang_lookups(
    api: ApiServer, clock: FakeClock, gang_numbers: GangNumbers, fault: Fault
) -> None:
    api.write_object(paths.pods(), member("a", "4"))
    api.fault(fault)
    for i in range(100):
        assert gang_numbers.conflicting_member("default", f"slurp-{i}", 3) is None
        assert gang_numbers.conflicting_member(f"team-{i}", "slurp", 3) is None
    assert len(api.sent()) == 1
    clock.advance(5.1)
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 4)


@pytest.mark.parametrize("status", [403, 500])
def test_failed_lookup_pauses_only_its_gang(
    api: ApiServer, clock: FakeClock, gang_numbers: GangNumbers, status: int
) -> None:
    api.write_object(paths.pods(), member("a", "4"))
    api.fault(Fault(status=status))
    for number in range(1, 20):
        assert gang_numbers.conflicting_member("team", "slurp", number) is None
    assert len(api.sent()) == 1
    assert gang_numbers.conflicting_member("default", "slurp", 3) == ("a", 4)
    clock.advance(5.1)
    gang_numbers.conflicting_member("team", "slurp", 3)
    assert len(api.sent()) == 3


@pytest.mark.parametrize(("namespaces", "answered"), [(["greedy"], ["team", "other"]), (["greedy", "default"], [])])
def test_concurrent_lookups_are_limited_and_shared_by_namespaces(
    gang_numbers: GangNumbers, monkeypatch: pytest.MonkeyPatch, namespaces: list[str], answered: list[str]
) -> None:
    """While the API server is slow, at most two lookups wait for it, never two of one namespace."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    slow = True

    def fetch(namespace: str, gang: str) -> dict[str, int]:
        if slow and namespace in namespaces:
            begun.release()
            assert go_on.wait(60)
        return {"a": 4}

    def compare(namespace: str) -> None:
        members.append((namespace, gang_numbers.conflicting_member(namespace, "slurp", 3)))

    monkeypatch.setattr(gang_numbers, "_fetch_numbers", fetch)
    members: list[tuple[str, object]] = []
    threads = [threading.Thread(target=compare, args=[namespace]) for namespace in namespaces * 4]
    for thread in threads:
        thread.start()
    for _ in namespaces:
        assert begun.acquire(timeout=60)
    assert [name for name in ("team", "other") if gang_numbers.conflicting_member(name, "slurp", 3)] == answered
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert [member for _, member in members if member is not None] == [("a", 4)] * len(namespaces)
    slow = False
    assert gang_numbers.conflicting_member("greedy", "slurp", 3) == ("a", 4)


def test_busy_namespaces_do_not_block_occasional_lookups(clock: FakeClock) -> None:
    limit = LookupLimit(clock, per_owner=10, total=50)
    let_in = Counter[str]()
    turns = threading.Barrier(5)

    def begin_many(owner: str) -> None:
        turns.wait(60)
        for _ in range(200):
            let_in[owner] += limit.begin_lookup(owner)

    threads = [threading.Thread(target=begin_many, args=[f"greedy-{number}"]) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(let_in.values()) == {10}
    assert [limit.begin_lookup("quiet") for _ in range(2)] == [True, False]
    assert sum(limit.begin_lookup(f"team-{number}") for number in range(1000)) == 49, "a hundred in all"


def test_too_large_member_list_admits_the_pod(api: ApiServer, gang_numbers: GangNumbers) -> None:
    """The API server's cache ignores the limit, so all of a tenant's large pods arrive in one list."""
    for i in range(30):
        api.write_object(paths.pods(), member(f"p{i}", "4") | {"spec": {"containers": [{"args": ["x" * 400_000]}]}})
    assert gang_numbers.conflicting_member("default", "slurp", 3) is None
    api.write_object(paths.pods(), member("a", "4", namespace="team"))
    assert gang_numbers.conflicting_member("team", "slurp", 3) == ("a", 4), "and stop no other's"


@pytest.fixture
def groups(api: ApiServer, clock: FakeClock) -> PodGroups:
    return PodGroups(api.client(clock=clock), clock)


@pytest.mark.parametrize(
    ("resources", "served"), [([{"name": "podgroups"}, {"name": "workloads"}], True), ([{"name": "workloads"}], False)]
)
def test_discovery_of_podgroups_is_cached(
    api: ApiServer, clock: FakeClock, groups: PodGroups, resources: list[dict[str, str]], served: bool
) -> None:
    api.answers[PODGROUPS] = {"resources": resources}
    assert [groups.is_served() for _ in range(5)] == [served] * 5
    assert len(api.sent()) == 1
    api.answers[PODGROUPS] = {"resources": []}
    clock.advance(31)
    assert not groups.is_served()


def test_without_the_api_there_are_no_podgroups(api: ApiServer, groups: PodGroups) -> None:
    assert not groups.is_served()
    assert not groups.is_served()
    assert len(api.sent()) == 1


def test_failed_discovery_raises_instead_of_returning_false(
    api: ApiServer, clock: FakeClock, groups: PodGroups
) -> None:
    silence = api.fault(Fault(status=500), times=math.inf)
    for _ in range(5):
        with pytest.raises(errors.KubeError):
            groups.is_served()
    assert len(api.sent()) == 1
    silence.end()
    clock.advance(1.1)
    assert not groups.is_served()
