"""The writes that publish a decision as a claim, each with every kind of failure."""

from contextlib import nullcontext

import pytest

from cardwise.core.api import assignment, claims, names
from cardwise.kube import errors, paths
from cardwise.kube.pods.nodeconstraints import REQUIRED_AFFINITY_FIELD
from extender.binding.claimwriter import ClaimFailed, ClaimVersion, ClaimWriter, PodChanged, is_whole
from extender.leadership.leadership import Leadership
from tests.extender.claimpods import claiming, grant_for
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock
from tests.theory import theory_of

CLAIMS = paths.resourceclaims("default")
CLAIM = paths.resourceclaims("default", "cardwise-0000000000000001")
POD = paths.pods("default", "p")
POD_STATUS = f"{POD}/status"
LOST, SLOW, ERROR, BUSY = Fault(lost=True), Fault(seconds=99), Fault(status=500), Fault(status=429, retry_after=1)
WRITES = [("create", CLAIMS), ("patch", f"{CLAIM}/status"), ("patch", POD)]


class World:
    def __init__(self, *, gated: bool = True, lowest_priority: int = 0) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.writer = ClaimWriter(self.api.client(), Leadership(), lambda: lowest_priority, self.clock)
        self.api.write_object(paths.pods(), claiming(gated=gated))
        self.grant = grant_for(self.pod)

    @property
    def pod(self):
        return self.api.get(POD)

    @property
    def claim(self):
        return self.api.get(CLAIM)

    def publish(self, grant=None, seconds=30.0):
        deadline = self.clock.now() + seconds
        self.writer.commit(self.writer.prepare(grant or self.grant, deadline), deadline)

    def writes(self):
        return [(call.verb, call.path) for call in self.api.requests if call.verb not in ("get", "list", "watch")]

    def check_whole(self):
        assert is_whole(self.pod, self.claim, "n1", self.grant.assignment)
        assert self.pod["status"]["nominatedNodeName"] == "n1"


def test_a_gated_pod_gets_node_claim_allocation_and_gate_in_this_order():
    assert "nominate the node ─► create the claim ─► allocate it (status) ─► open the gate" in theory_of(
        "extender.binding.claimwriter"
    )
    world = World()
    world.publish()
    world.check_whole()
    assert world.writes() == [
        ("patch", POD_STATUS), ("create", CLAIMS), ("patch", f"{CLAIM}/status"), ("patch", POD),
    ]  # fmt: skip
    assert world.pod["spec"]["schedulingGates"] == []
    assert world.pod["metadata"]["annotations"][names.IDX] == "0"


def test_without_a_gate_the_annotations_come_first_and_the_allocation_last():
    assert "write the pod's annotations ─► create the claim ─► allocate it" in theory_of("extender.binding.claimwriter")
    world = World(gated=False)
    world.publish()
    world.check_whole()
    assert world.writes() == [
        ("patch", POD_STATUS), ("patch", POD), ("create", CLAIMS), ("patch", f"{CLAIM}/status"),
    ]  # fmt: skip


@pytest.mark.parametrize("fault", [LOST, SLOW, ERROR, BUSY], ids=["lost", "slow", "error", "busy"])
@pytest.mark.parametrize("write", WRITES, ids=["claim", "allocation", "gate"])
@pytest.mark.parametrize("gated", [True, False])
def test_after_a_lost_answer_the_writer_goes_on_with_what_is_missing(gated, write, fault):
    world = World(gated=gated)
    world.api.fault(fault, *write)
    world.publish()
    world.check_whole()
    first = world.claim["metadata"]["uid"]
    assert [claim["metadata"]["uid"] for claim in world.api.all(CLAIMS)] == [first]


def test_a_lost_allocation_is_read_and_not_written_again():
    """The example of the theory of operation."""
    assert "it is allocated to the pod on the node that was to be written" in theory_of("extender.binding.claimwriter")
    world = World()
    world.api.fault(LOST, "patch", f"{CLAIM}/status")
    world.publish()
    assert world.writes().count(("patch", f"{CLAIM}/status")) == 1


def test_no_claim_is_written_without_the_nomination_that_fences_the_pod():
    world = World()
    world.api.fault(ERROR, "patch", POD_STATUS, 9)
    with pytest.raises(ClaimFailed, match="the node was not nominated in time"):
        world.publish(seconds=2.0)
    assert {path for _, path in world.writes()} == {POD_STATUS}


def test_each_nomination_gives_the_pod_a_new_version():
    """Also that of the same node in the same epoch: else a late gate of the first attempt would still open."""
    world = World()
    versions = []
    for _ in range(2):
        prepared = world.writer.prepare(world.grant, 30.0 + world.clock.now())
        versions.append(prepared.pod["metadata"]["resourceVersion"])
        world.clock.sleep(0.001)
    assert versions[0] != versions[1]


def test_a_claim_of_an_earlier_attempt_is_replaced():
    world = World()
    world.writer.prepare(grant_for(world.pod, "n2", index=1), 30.0 + world.clock.now())
    before = world.claim["metadata"]["uid"]
    world.publish()
    world.check_whole()
    assert world.claim["metadata"]["uid"] != before


IN_N1 = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
OF_OTHERS = {"key": "metadata.name", "operator": "In", "values": ["n1", "n2"]}


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (None, [{"matchFields": [IN_N1]}]),
        ([{"matchExpressions": [ZONE]}], [{"matchExpressions": [ZONE], "matchFields": [IN_N1]}]),
        ([{"matchFields": [OF_OTHERS]}, {}], [{"matchFields": [OF_OTHERS, IN_N1]}, {}]),
    ],
    ids=["without affinity", "labels", "names, and a term that matches no node"],
)
def test_a_pod_that_may_preempt_is_pinned_to_its_node_as_its_gate_opens(terms, expected):
    world = World(lowest_priority=0)
    pod = claiming()
    pod["spec"]["priority"] = 1
    if terms is not None:
        affinity = {"nodeAffinity": {REQUIRED_AFFINITY_FIELD: {"nodeSelectorTerms": terms}}, "podAffinity": {}}
        pod["spec"]["affinity"] = affinity
    world.api.write_object(paths.pods(), pod)
    world.api.fault(LOST, "patch", POD)
    world.publish()
    world.check_whole()
    node_affinity = world.pod["spec"]["affinity"]["nodeAffinity"]
    assert node_affinity[REQUIRED_AFFINITY_FIELD]["nodeSelectorTerms"] == expected
    assert ("podAffinity" in world.pod["spec"]["affinity"]) == (terms is not None)


@pytest.mark.parametrize(
    ("gated", "lowest_priority", "policy"),
    [(True, 1, "PreemptLowerPriority"), (True, 0, "Never"), (False, 0, "PreemptLowerPriority")],
    ids=["nobody has a lower priority", "it never preempts", "its gate is open: Kubernetes allows no change"],
)
def test_other_pods_are_not_pinned(gated, lowest_priority, policy):
    world = World(gated=gated, lowest_priority=lowest_priority)
    pod = claiming(gated=gated)
    pod["spec"] |= {"priority": 1, "preemptionPolicy": policy}
    world.api.write_object(paths.pods(), pod)
    world.publish()
    world.check_whole()
    assert "affinity" not in world.pod["spec"]


def test_the_claim_of_another_pod_is_not_touched():
    world = World()
    other = claiming("other")
    world.api.write_object(paths.resourceclaims(), claims.new_claim(claims.read_pod(other), world.grant.assignment))
    with pytest.raises(ClaimFailed, match="another ResourceClaim has the name cardwise-0000000000000001") as caught:
        world.publish()
    assert caught.value.is_refusal
    assert world.pod["spec"]["schedulingGates"]


@pytest.mark.parametrize("write", WRITES, ids=["claim", "allocation", "gate"])
def test_a_forbidden_write_is_a_refusal_with_the_reason(write):
    world = World()
    world.api.fault(Fault(status=403, message="exceeded quota: team"), *write)
    with pytest.raises(ClaimFailed, match="exceeded quota: team") as caught:
        world.publish()
    assert caught.value.is_refusal
    assert world.pod["spec"]["schedulingGates"]


def test_another_pod_with_the_name_is_not_touched():
    world = World()
    world.api.remove(POD)
    world.api.write_object(paths.pods(), claiming() | {"metadata": claiming()["metadata"] | {"uid": "uid-later"}})
    with pytest.raises(ClaimFailed):
        world.publish()
    assert world.pod["spec"]["schedulingGates"]
    assert assignment.decode(world.pod["metadata"]["annotations"]) is None


def test_a_pod_that_is_gone_ends_the_publication():
    world = World()
    world.api.after_request(lambda _: world.api.remove(POD), "patch", f"{CLAIM}/status")
    with pytest.raises(PodChanged):
        world.publish()


def test_a_gate_is_not_opened_by_an_outdated_write():
    """The pod changes between the nomination and the PATCH, which names the version."""
    world = World()
    world.api.after_request(lambda _: world.api.edit(POD, metadata={"labels": {"changed": "1"}}), "patch", POD_STATUS)
    world.publish()
    world.check_whole()
    assert world.writes().count(("patch", POD)) == 2


def test_nothing_is_written_in_an_epoch_that_is_over():
    class Over(Leadership):
        def allow_post(self, epoch):
            return nullcontext(0.0)

    world = World()
    world.writer = ClaimWriter(world.api.client(), Over(), lambda: 0, world.clock)
    with pytest.raises(ClaimFailed, match="no longer holds the lease"):
        world.publish()
    assert world.writes() == []


def test_a_deadline_ends_the_publication():
    world = World()
    world.api.fault(ERROR, "create", CLAIMS, 99)
    began = world.clock.now()
    with pytest.raises(ClaimFailed, match="cannot create the ResourceClaim in time"):
        world.publish(seconds=5.0)
    assert world.clock.now() - began < 6


@pytest.mark.parametrize("change", ["uid", "version"])
def test_only_the_version_of_a_claim_that_was_read_is_deleted(change):
    world = World()
    world.publish()
    read = ClaimVersion.from_manifest(world.claim)
    with pytest.raises(errors.Conflict):
        world.writer.delete_claim(read._replace(**{change: "another"}), 0)
    assert world.claim is not None
    world.writer.delete_claim(read, 0)
    assert world.claim is None
    world.writer.delete_claim(read, 0)
