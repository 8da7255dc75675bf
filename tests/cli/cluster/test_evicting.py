"""`cardwise defrag --evict`: a plan is carried out as it was told, and no further after a surprise."""

import math
import signal
from datetime import timedelta

import click
import pytest

from cardwise.cli.cluster.evicting import MoveRun
from cardwise.core.api import assignment
from cardwise.core.defrag.moving import Move
from cardwise.core.placement.holding import Holding
from tests.build import Assignment
from tests.cli import clusters
from tests.cli.clusters import Cluster
from tests.cli.defragcluster import NOW, SPREADING, cluster, objects, run, running, three, with_controller
from tests.cli.evictioncluster import Cards
from tests.fakes.apiserver import Fault, Request
from tests.fakes.clock import FakeClock


def old() -> dict:
    return with_controller(running("web", "n1", 0, 3000))


def new(node: str, index: int, phase: str = "Running", *, ready: bool = True) -> dict:
    pod = with_controller(running("web-2", node, index, 3000))
    pod["metadata"]["ownerReferences"] = old()["metadata"]["ownerReferences"]
    pod["status"] |= {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return pod


def pending() -> dict:
    pod = new("n1", 1)
    del pod["spec"]["nodeName"]
    pod["metadata"]["annotations"] = {}
    return pod


def planned() -> Move:
    def holding_of(pod: dict) -> Holding:
        assigned = assignment_of(pod)
        return Holding(old()["metadata"]["uid"], "team", "web", pod["spec"]["nodeName"], assigned)

    return Move(holding_of(old()), holding_of(new("n2", 1)))


def assignment_of(pod: dict) -> Assignment:
    assigned = assignment.decode(pod["metadata"]["annotations"])
    assert assigned is not None
    return assigned


class Clock(FakeClock):
    """With each look that follows the pods are the next ones."""

    def __init__(self, api: Cluster, *then: list[dict]) -> None:
        super().__init__()
        self.api = api
        self.then = list(then)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.then:
            self.api.replace("pods", *self.then.pop(0))


def carry(api: Cluster, clock: Clock) -> None:
    MoveRun(api.kube, 20.0, clock).move_pod(planned(), old(), "1/1")


def test_a_pod_is_evicted_and_its_replacement_waited_for(capsys):
    api = Cluster({"pods": [old()]})
    clock = Clock(api, [old(), pending()], [old(), new("n2", 1, "Pending")], [old(), new("n2", 1)], [new("n2", 1)])
    carry(api, clock)
    (evicted,) = api.sent("create", "*/eviction")
    assert evicted.body["deleteOptions"]["preconditions"] == {"uid": old()["metadata"]["uid"]}
    assert clock.then == []  # to the last look: while the old one is there it holds its card
    assert capsys.readouterr().err == "1/1 evicted team/web\n1/1 web-2 runs on n2 1\n"


@pytest.mark.parametrize(
    ("pods", "then", "says"),
    [
        ([old()], [[new("n1", 1)]], "web-2, the replacement for team/web, is on n1 1 instead of n2 1"),
        ([old()], [[new("n2", 1, "Failed")]], "web-2, the replacement for team/web, has ended already (Failed)"),
        ([old()], [[pending()]], "no replacement for pod team/web is ready after 20 s"),
        ([old()], [[new("n2", 1, ready=False)]], "no replacement for pod team/web is ready after 20 s"),
        ([], [], "team/web ended by itself"),
        ([old() | {"metadata": old()["metadata"] | {"uid": "another"}}], [], "team/web ended by itself"),
    ],
)
def test_a_surprise_ends_it(pods, then, says):
    api = Cluster({"pods": pods})
    assert stopped(api, Clock(api, *then)) == says


@pytest.mark.parametrize("jobs", [[{"spec": {"backoffLimit": 1}, "status": {"failed": 1}}], []])
def test_a_job_that_has_lost_a_pod_meanwhile_loses_none_by_it(jobs):
    """Its last failure was left when the plan was made."""
    metadata = {"namespace": "team", "name": "web-rs", "uid": "rs-web"}
    pod = with_controller(running("web", "n1", 0, 3000), kind="Job")
    api = Cluster({"pods": [pod], "jobs": [job | {"metadata": metadata} for job in jobs]})
    with pytest.raises(click.ClickException, match="team/web belongs to a Job that would fail because"):
        MoveRun(api.kube, 20.0, Clock(api)).move_pod(planned(), pod, "1/1")
    assert api.sent("create", "*/eviction") == []


def test_a_replacement_that_is_not_ready_yet_is_waited_for():
    """Until then a PodDisruptionBudget counts it as missing, and lets no other pod go."""
    api = Cluster({"pods": [old()]})
    clock = Clock(api, [new("n2", 1, ready=False)], [new("n2", 1, ready=False)], [new("n2", 1)])
    carry(api, clock)
    assert clock.then == []


def test_a_budget_that_allows_none_yet_is_asked_again(capsys):
    api = Cluster({"pods": [old()]})
    api.fault(Fault(status=429, message="the budget allows none"), "create", "*/eviction", times=2)
    clock = Clock(api)
    began = clock.now()
    api.after_request(
        lambda _: api.replace("pods", new("n2", 1)) if clock.now() >= began + 10 else None, "create", "*/eviction"
    )
    carry(api, clock)
    assert (len(api.sent("create", "*/eviction")), clock.now() - began) == (3, 10.0)
    assert capsys.readouterr().err == (
        "1/1 team/web cannot be evicted yet: the budget allows none; trying again every 5 s\n"
        "1/1 evicted team/web\n1/1 web-2 runs on n2 1\n"
    )


def test_a_budget_that_allows_none_ends_it_after_the_timeout():
    api = Cluster({"pods": [old()]})
    api.fault(Fault(status=429, message="the budget allows none"), "create", "*/eviction", times=math.inf)
    clock = Clock(api)
    began = clock.now()
    assert stopped(api, clock) == "team/web could not be evicted within 20 s: the budget allows none"
    assert clock.now() - began == 20.0


def test_a_pod_that_goes_while_the_budget_is_asked_is_not_waited_for():
    api = Cluster({"pods": [old()]})
    api.fault(Fault(status=429, message="the budget allows none"), "create", "*/eviction", times=math.inf)
    assert stopped(api, Clock(api, [pending()])) == "team/web ended by itself"


def stopped(api: Cluster, clock: Clock) -> str:
    with pytest.raises(click.ClickException) as caught:
        carry(api, clock)
    reason = caught.value.message.removeprefix("stopped: ")
    assert reason.endswith("; check the cluster, then run cardwise defrag again")
    return reason.removesuffix("; check the cluster, then run cardwise defrag again")


def test_evict_moves_them_and_says_what_fits_then(monkeypatch):
    """The replacement comes at the eviction."""
    pods = three()
    api = cluster(*pods)
    api.after_request(lambda _: api.replace("pods", came("n1", 1), *pods[1:]), "create", "*/eviction")
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert shown.exit_code == 0, shown.output
    assert [call.body["metadata"]["name"] for call in api.sent("create")] == ["small"]
    assert shown.stderr == "1/1 evicted team/small\n1/1 small-2 runs on n1 1\ndone: there is 1 free whole GPU\n"


class Cordoned(Cards):
    """Of four cards, on which the three pods are; the replacement of an evicted pod comes at once."""

    def __init__(self, *then: dict) -> None:
        pods = three()
        there = objects()
        kinds = {kind: there[kind] for kind in ("nodes", "resourceclasses")}
        super().__init__(there["extendedresources"], pods, configmaps=[SPREADING], **kinds)
        self.then = [*then, *pods[1:]]
        self.closed_at_eviction: list[str] = []
        self.after_request(self._replaced, "create", "*/eviction")

    def _replaced(self, _: Request) -> None:
        cards = self.objects("extendedresources")
        self.closed_at_eviction = [
            resource["metadata"]["name"] for resource in cards if resource["spec"].get("unschedulable")
        ]
        self.replace("pods", *self.then)

    def unschedulable_reason(self) -> list[str]:
        return [
            resource["metadata"]["name"]
            for resource in self.objects("extendedresources")
            if "cordon" in resource["spec"]
        ]


def came(node: str, index: int) -> dict:
    pod = with_controller(running("small-2", node, index, 3000))
    pod["metadata"]["ownerReferences"] = three()[0]["metadata"]["ownerReferences"]
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return pod


def test_a_card_is_cordoned_while_its_pod_moves_and_given_back(monkeypatch):
    api = Cordoned(came("n1", 1))
    before = [(resource["spec"], resource["status"]) for resource in api.objects("extendedresources")]
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert shown.exit_code == 0, shown.output
    assert api.closed_at_eviction == ["gpu-n1-0"]
    assert [(resource["spec"], resource["status"]) for resource in api.objects("extendedresources")] == before
    assert shown.stderr == (
        "GPU 0 of node n1 (GPU-n1-0) cordoned\n"
        "1/1 evicted team/small\n"
        "1/1 small-2 runs on n1 1\n"
        "GPU 0 of node n1 (GPU-n1-0) uncordoned\n"
        "done: there is 1 free whole GPU\n"
    )


def test_the_card_that_is_cordoned_is_the_one_that_the_pod_holds(monkeypatch):
    """Indices change when a card fails and the node boots: the pod's is another card's now."""
    api = Cordoned(came("n1", 1))
    api.change("extendedresources", "gpu-n1-0", spec={"index": 1})
    api.change("extendedresources", "gpu-n1-1", spec={"index": 0})
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert api.closed_at_eviction == ["gpu-n1-0"], shown.output


def test_a_card_is_given_back_after_a_surprise(monkeypatch):
    api = Cordoned(came("n2", 1))
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert (shown.exit_code, api.closed_at_eviction, api.unschedulable_reason()) == (1, ["gpu-n1-0"], [])
    assert "stopped: small-2, the replacement for team/small, is on n2 1 instead of n1 1" in shown.stderr


@pytest.fixture
def in_the_foreground():
    """The signals as in a program that a person has started; what a shell starts in the background ignores some."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {sign: signal.signal(sign, handler) for sign, handler in handlers.items()}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_card_is_given_back_when_somebody_ends_it(monkeypatch, sign):
    before = signal.getsignal(sign)
    api = Cordoned()
    monkeypatch.setattr(MoveRun, "move_pod", lambda *_: signal.raise_signal(sign))
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert (shown.exit_code, api.unschedulable_reason()) == (128 + sign, [])
    assert "GPU 0 of node n1 (GPU-n1-0) uncordoned\n" in shown.stderr
    assert signal.getsignal(sign) is before


def test_a_card_that_a_person_cordons_meanwhile_is_left_to_them(monkeypatch):
    api = Cordoned()

    def smokes(*_args: object) -> None:
        api.change("extendedresources", "gpu-n1-0", spec={"cordon": {"reason": "it smokes"}})

    monkeypatch.setattr(MoveRun, "move_pod", smokes)
    run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert api.card("gpu-n1-0")["spec"]["unschedulable"] is True


@pytest.mark.parametrize("status_only", [False, True], ids=["cordon", "status"])
def test_a_card_that_is_written_just_before_it_is_given_back_loses_nothing(monkeypatch, status_only):
    """Between the read that shows our cordon and the write that removes it."""
    api = Cordoned()
    by_hand = {"unschedulable": True, "cordon": {"reason": "it smokes", "user": "joe", "time": "2026-11-21T11:50:00Z"}}

    def write_meanwhile(_: Request) -> None:
        if status_only:
            api.change("extendedresources", "gpu-n1-0", status={"phase": "Bound"})
        else:
            api.change("extendedresources", "gpu-n1-0", spec=by_hand)

    monkeypatch.setattr(MoveRun, "move_pod", lambda *_: api.after_request(write_meanwhile, "get", "*/gpu-n1-0"))
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    card = api.card("gpu-n1-0")
    if status_only:
        assert (api.unschedulable_reason(), card["status"]["phase"]) == ([], "Bound"), shown.stderr
    else:
        assert card["spec"] | by_hand == card["spec"], shown.stderr


@pytest.mark.parametrize("words", [("cordon", "n1/0"), ("defrag", "--free-gpus", "1", "--evict")])
def test_a_card_that_a_person_cordons_just_before_it_is_cordoned_keeps_the_reason(monkeypatch, words):
    """Between the read that shows no cordon and the write."""
    api = Cordoned()
    by_hand = {"unschedulable": True, "cordon": {"reason": "it smokes", "user": "joe", "time": "2026-11-21T11:50:00Z"}}
    api.after_request(
        lambda _: api.change("extendedresources", "gpu-n1-0", spec=by_hand), "create", "*/selfsubjectreviews"
    )
    monkeypatch.setattr(MoveRun, "move_pod", lambda *_: None)
    shown = clusters.run(monkeypatch, api, *words, clock=FakeClock(wall=NOW))
    card = api.card("gpu-n1-0")
    assert card["spec"] | by_hand == card["spec"], shown.output


def test_who_may_not_cordon_is_told_what_it_takes_before_anything_happens(monkeypatch):
    api = Cordoned()
    text = 'User "jane" cannot patch resource "extendedresources"'
    api.fault(Fault(status=403, message=text), "patch")
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert (shown.exit_code, api.evicted) == (1, [])
    assert "GPU 0 of node n1 (GPU-n1-0) cannot be cordoned with your rights" in shown.stderr
    assert "ClusterRole cardwise-drain" in shown.stderr
    assert "--no-cordon" in shown.stderr


def test_a_card_is_given_back_also_when_nobody_was_told_that_it_was_cordoned(monkeypatch):
    api = Cordoned()
    api.fault(Fault(lost=True), "patch")
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert (shown.exit_code, api.evicted, api.unschedulable_reason()) == (1, [], [])


def test_a_card_that_cannot_be_given_back_is_named_with_the_command(monkeypatch):
    api = Cordoned()

    down = Fault(refused=True)
    monkeypatch.setattr(MoveRun, "move_pod", lambda *_: api.fault(down, "patch", times=math.inf))
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert "uncordon it with: cardwise uncordon n1/0" in shown.stderr


KILLED = {"reason": "cardwise defrag is moving its pods", "user": "jane", "time": "2026-11-21T11:00:00Z"}


def left_by_a_killed_one(*names: str) -> Cordoned:
    api = Cordoned(came("n1", 1))
    for name in names:
        api.change("extendedresources", name, spec={"unschedulable": True, "cordon": KILLED})
    return api


def test_what_a_killed_defrag_has_cordoned_is_taken_over_and_given_back(monkeypatch):
    api = left_by_a_killed_one("gpu-n1-0")
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert shown.exit_code == 0, shown.output
    assert (api.closed_at_eviction, api.unschedulable_reason()) == (["gpu-n1-0"], [])
    assert shown.stderr.startswith(
        "note: GPU 0 of node n1 (GPU-n1-0) was cordoned by jane at 2026-11-21T11:00:00Z by another defrag and counts "
        "as free: it will be uncordoned or taken over\n"
        "GPU 0 of node n1 (GPU-n1-0) cordoned\n"
    )


def test_a_card_that_the_new_plan_does_not_cordon_is_given_back_before_pods_move_to_it(monkeypatch):
    api = left_by_a_killed_one("gpu-n1-1", "gpu-n2-0")
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert shown.exit_code == 0, shown.output
    assert (api.closed_at_eviction, api.unschedulable_reason()) == (["gpu-n1-0"], [])


def test_without_a_plan_the_cards_of_a_killed_defrag_are_given_back_too(monkeypatch):
    api = left_by_a_killed_one("gpu-n1-1")
    shown = run(monkeypatch, api, "--free-gpus", "4", "--evict")
    assert (shown.exit_code, api.evicted, api.unschedulable_reason()) == (1, [], [])


@pytest.mark.parametrize("words", [("cordon", "n1/1"), ("drain", "n1/1", "--force", "--timeout", "5s")])
def test_a_card_of_a_killed_defrag_that_a_person_cordons_without_a_reason_is_the_persons(monkeypatch, words):
    api = left_by_a_killed_one("gpu-n1-1")
    shown = clusters.run(monkeypatch, api, *words, clock=FakeClock(wall=NOW))
    assert "GPU 1 of node n1 (GPU-n1-1) cordoned\n" in shown.output
    cordon = api.card("gpu-n1-1")["spec"]["cordon"]
    assert (cordon["reason"], cordon["time"]) == ("", api.clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ"))
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert "by another defrag" not in shown.stderr
    assert (api.unschedulable_reason(), api.card("gpu-n1-1")["spec"]["cordon"]) == (["gpu-n1-1"], cordon)


@pytest.mark.parametrize("words", [("cordon", "n1/0"), ("drain", "n1/0", "--force", "--timeout", "5s")])
def test_a_card_that_a_person_cordons_while_defrag_moves_its_pods_stays_cordoned(monkeypatch, words):
    api = Cordoned()
    monkeypatch.setattr(
        MoveRun, "move_pod", lambda *_: clusters.run(monkeypatch, api, *words, clock=FakeClock(wall=NOW))
    )
    run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert api.card("gpu-n1-0")["spec"]["cordon"]["reason"] == ""
    assert api.unschedulable_reason() == ["gpu-n1-0"]


def test_a_dry_run_says_whose_cards_it_counts_as_free_and_changes_nothing(monkeypatch):
    api = left_by_a_killed_one("gpu-n1-0")
    shown = run(monkeypatch, api, "--free-gpus", "1")
    assert "and counts as free: --evict uncordons it or takes it over\n" in shown.stderr
    assert api.unschedulable_reason() == ["gpu-n1-0"]
    assert api.sent("patch") == []


def test_a_defrag_whose_card_another_has_taken_over_leaves_it_cordoned(monkeypatch):
    api = Cordoned()
    other = KILLED | {"user": "joe"}
    monkeypatch.setattr(
        MoveRun, "move_pod", lambda *_: api.change("extendedresources", "gpu-n1-0", spec={"cordon": other})
    )
    run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert api.card("gpu-n1-0")["spec"]["cordon"] == other


@pytest.mark.usefixtures("in_the_foreground")
def test_a_second_ctrl_c_names_the_card_that_stays_cordoned(monkeypatch):
    api = Cordoned()
    again = api.after_request(lambda _: signal.raise_signal(signal.SIGINT), "get", "*/gpu-n1-0", times=math.inf)
    monkeypatch.setattr(MoveRun, "move_pod", lambda *_: signal.raise_signal(signal.SIGINT))
    shown = run(monkeypatch, api, "--free-gpus", "1", "--evict")
    assert again is not None
    assert "is still cordoned (interrupted); uncordon it with: cardwise uncordon n1/0\n" in shown.stderr


def test_nodes_says_what_a_killed_defrag_has_left(monkeypatch):
    """By the API server's clock: that of the caller's machine may be wrong."""
    api = left_by_a_killed_one("gpu-n1-0")
    api.clock.set_wall(NOW)
    wrong = FakeClock(wall=NOW + timedelta(days=-1))
    note = "by a defrag; if that is no longer running, uncordon it: cardwise uncordon n1/0\n"
    assert note in clusters.run(monkeypatch, api, "nodes", clock=wrong).stderr
    begun = KILLED | {"time": "2026-11-21T11:50:00Z"}
    api.change("extendedresources", "gpu-n1-0", spec={"cordon": begun})
    assert note not in clusters.run(monkeypatch, api, "nodes", clock=wrong).stderr
