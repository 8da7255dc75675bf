"""How a nomination is written into the pod's status, and what follows from a failed write."""

import pytest

from cardwise.kube import paths
from extender.controllers.nominationwriter import NominationWriter
from extender.nomination.nominator import NominationOutcome, Nominee
from extender.records.podref import PodRef
from tests.build import P100
from tests.extender.nominationcluster import World
from tests.extender.states import free
from tests.fakes.apiserver import ApiServer, Fault

POD, STATUS = paths.pods("default", "p"), paths.pods("default", "p", "status")
OURS = "cardwise-extender"


class Writing:
    """A writer of a world; `leads` may be changed."""

    def __init__(self, *, leads: bool = True) -> None:
        self.world = World("n1", "n2")
        self.api = ApiServer(self.world.clock)
        self.client = self.api.client()
        self.leads = leads
        self.writer = NominationWriter(
            self.client, self.world.state.nominator, active=lambda: self.leads, clock=self.world.clock
        )

    def create(self, name: str = "p") -> None:
        """Create the pod in the API server and the state."""
        self.world.show_pod(self.api.write_object(paths.pods(), self.world.create(name, 100)))

    def version(self) -> str:
        return self.api.get(POD)["metadata"]["resourceVersion"]

    def nominee(self) -> Nominee:
        """p for n1, as it is now."""
        return Nominee(PodRef("uid-p", "default", "p"), self.version(), "n1")

    def nominate_pod(self) -> Nominee:
        """Create p, and reserve n1 for it."""
        self.create()
        assert self.world.nominate_all() == {"p": "n1"}
        return self.nominee()

    def changes(self) -> None:
        """Change p."""
        self.api.edit(POD, metadata={"labels": {"version": self.version()}})

    def names(self, node: str, manager: str) -> None:
        """The status of p names the node because of this manager."""
        self.client.patch(STATUS, {"status": {"nominatedNodeName": node}}, "merge", manager)
        self.api.requests.clear()

    def stale(self) -> None:
        """Release the reservation of p for longer than the scheduler needs to call."""
        self.create()
        self.names("n1", OURS)
        self.world.show_pod(self.api.get(POD))
        self.round(writes=0)
        self.world.clock.advance(2.0)

    def round(self, *, writes: int) -> None:
        """Run one pass, which writes this number of nominations."""
        before = len(self.api.sent("patch"))
        self.world.clock.advance(1.0)
        self.writer.step()
        self.api.until(lambda: len(self.api.sent("patch")) - before >= writes, "what was decided is not written")
        self.writer.stop()
        assert len(self.api.sent("patch")) - before == writes


@pytest.fixture
def writing() -> Writing:
    return Writing()


def test_what_is_written(writing):
    writing.create()
    version = writing.version()
    writing.round(writes=1)
    (call,) = writing.api.requests
    change = {"metadata": {"uid": "uid-p", "resourceVersion": version}, "status": {"nominatedNodeName": "n1"}}
    assert (call.path, call.body, call.query, call.timeout) == (STATUS, change, {"fieldManager": OURS}, 5.0)
    assert call.headers["Content-Type"] == "application/merge-patch+json"
    assert writing.api.get(POD)["status"]["nominatedNodeName"] == "n1"


def test_many_are_written_in_one_round(writing):
    writing.round(writes=0)  # from then on their number is counted
    for i in range(20):
        writing.create(f"p{i}")
    writing.round(writes=20)


def test_a_standby_writes_nothing(writing):
    writing.leads = False
    writing.create()
    writing.round(writes=0)
    assert free(writing.world.state) == [P100]


@pytest.mark.parametrize("gone", [False, True])
def test_a_pod_that_has_changed_holds_nothing(writing, gone):
    nominee = writing.nominate_pod()
    if gone:
        writing.api.remove(POD)
    else:
        writing.changes()
    writing.writer.write_nomination(nominee)
    assert free(writing.world.state) == [P100]
    assert writing.world.outcomes == [NominationOutcome.STALE]
    writing.create("q")
    writing.round(writes=1)


def test_a_bound_pod_delays_no_other(writing):
    """Since 1.35 the API server refuses the name as Invalid."""
    nominee = writing.nominate_pod()
    writing.api.fault(Fault(status=422))
    writing.writer.write_nomination(nominee)
    writing.create("q")
    writing.round(writes=1)


@pytest.mark.parametrize("fault", [Fault(status=403), Fault(refused=True)], ids=["forbidden", "unreachable"])
def test_where_writing_fails_it_rests(writing, fault):
    nominee = writing.nominate_pod()
    writing.api.fault(fault)
    writing.writer.write_nomination(nominee)
    assert free(writing.world.state) == [P100]
    writing.create("q")
    writing.round(writes=0)
    writing.world.clock.advance(5.0)
    writing.round(writes=1)


def test_a_pod_that_cannot_be_written_keeps_no_other_namespace_from_being_nominated(writing):
    """A tenant made a pod so large that its write times out: no pod was nominated for five seconds."""
    nominee = writing.nominate_pod()
    writing.api.fault(Fault(refused=True))
    writing.writer.write_nomination(nominee)
    for namespace in ("default", "other"):
        pod = writing.world.create(f"q-{namespace}", 100, namespace=namespace)
        writing.world.show_pod(writing.api.write_object(paths.pods(), pod))
    writing.round(writes=1)
    assert writing.api.get(paths.pods("other", "q-other"))["status"]["nominatedNodeName"]
    writing.world.clock.advance(5.0)
    writing.round(writes=1)
    assert writing.api.get(paths.pods("default", "q-default"))["status"]["nominatedNodeName"]


def test_pods_that_take_long_to_write_keep_no_other_namespace_from_being_nominated(writing):
    """There were more of them than threads, and after eight failures in a row no pod was nominated."""
    writing.round(writes=0)
    writing.api.fault(Fault(seconds=60.0), path=f"{paths.pods('fat')}/*", times=1_000_000)
    fat = []
    for i in range(40):
        pod = writing.world.create(f"f{i}", 100, namespace="fat")
        writing.world.show_pod(writing.api.write_object(paths.pods(), pod))
        fat.append(writing.world.state.nominator.nominate_next_pod().nominee)
    began = writing.world.clock.now()
    for nominee in fat:
        writing.writer.write_nomination(nominee)
    assert writing.world.clock.now() - began <= 5.0, "the others are not tried"
    writing.create("q")
    writing.round(writes=1)
    assert writing.api.get(paths.pods("default", "q"))["status"]["nominatedNodeName"]


def test_where_nothing_can_be_written_all_rest(writing):
    nominee = writing.nominate_pod()
    writing.api.fault(Fault(refused=True), times=8)
    for i in range(8):
        writing.create(f"p{i}")
        writing.world.state.nominator.nominate_next_pod()
        writing.writer.write_nomination(nominee._replace(pod=PodRef(f"uid-p{i}", "default", f"p{i}")))
    pod = writing.world.create("q", 100, namespace="other")
    writing.world.show_pod(writing.api.write_object(paths.pods(), pod))
    writing.round(writes=0)
    writing.world.clock.advance(5.0)
    writing.writer.step()
    writing.api.until(
        lambda: (writing.api.get(paths.pods("other", "q")).get("status") or {}).get("nominatedNodeName"), "no write"
    )
    writing.writer.stop()


def test_nothing_is_written_for_a_pod_that_the_scheduler_has_come_to(writing):
    nominee = writing.nominate_pod()
    writing.world.filter("p", "n1", "n2")
    writing.writer.write_nomination(nominee)
    assert writing.api.requests == []


def test_a_failed_write_of_a_pod_that_the_scheduler_is_at_takes_nothing_from_it(writing):
    nominee = writing.nominate_pod()
    writing.changes()
    writing.api.before_request(lambda _: writing.world.filter("p", "n1"), "patch")
    writing.writer.write_nomination(nominee)
    assert len(writing.api.requests) == 1
    assert free(writing.world.state) == [P100 - 100]


def test_a_nomination_that_helps_no_pod_is_removed(writing):
    writing.stale()
    version = writing.version()
    writing.round(writes=1)
    read, write = writing.api.requests
    assert (read.path, read.timeout) == (POD, 5.0)
    change = {"metadata": {"uid": "uid-p", "resourceVersion": version}, "status": {"nominatedNodeName": None}}
    assert (write.path, write.body, write.query) == (STATUS, change, {"fieldManager": OURS})
    assert "nominatedNodeName" not in writing.api.get(POD)["status"]


@pytest.mark.parametrize("change", ["of others", "by now another", "made anew", "bound", "gone"])
def test_what_is_not_ours_is_left(writing, change):
    writing.create()
    nominee = writing.nominee()
    writing.names("n2" if change == "by now another" else "n1", "kueue" if change == "of others" else OURS)
    if change == "made anew":
        writing.api.edit(POD, metadata={"uid": "another"})
    elif change == "bound":
        writing.api.edit(POD, spec={"nodeName": "n1"})
    elif change == "gone":
        writing.api.remove(POD)
    writing.writer.remove_nomination(nominee)
    assert [call.verb for call in writing.api.requests] == ["get"]


@pytest.mark.parametrize(("change", "rests"), [("late", 0.0), ("unreachable", 5.0)])
def test_what_could_not_be_taken_back_is_tried_again(writing, change, rests):
    writing.stale()
    if change == "late":
        writing.api.after_request(lambda _: writing.changes(), "get")
    else:
        writing.api.fault(Fault(refused=True), "patch")
    writing.round(writes=1)
    writing.world.clock.advance(rests)
    writing.round(writes=0)  # nothing is held for it since now
    writing.world.clock.advance(2.0)
    writing.round(writes=1)
    assert "nominatedNodeName" not in writing.api.get(POD)["status"]
