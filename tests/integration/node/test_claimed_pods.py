"""Shares by ResourceClaim on a real kubelet and container runtime; claims and bindings are made by hand, as the
extender and kube-scheduler would, so no other part is needed.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube import paths
from tests.cluster import Cluster, versions
from tests.cluster.cards import DEFAULT, write_inventory
from tests.cluster.images import BUSYBOX
from tests.integration.node import claimed
from tests.integration.node import test_deviceplugin as by_slot
from tests.integration.node.claimed import Change
from tests.integration.node.test_deviceplugin import (
    NODE,
    P100,
    PLUGIN,
    STAY,
    TELL,
    Hand,
    moment,  # noqa: F401 - a fixture
)
from tests.integration.since import since

pytestmark = [pytest.mark.cluster("bare"), pytest.mark.node, since(34, "resource.k8s.io/v1")]

KUBELET, RUNTIME = f"kubelet-{NODE}", f"{versions.runtime()}-{NODE}"


class ClaimHand(Hand):
    """Makes pods with a claim, allocates it to a card, and binds the pod."""

    options = ("--claims",)

    def pod(self, name: str, index: int, mib: int, then: str = STAY, **spec: Any) -> str:
        """As in `Hand`, by claim. `spec`: further fields of the pod's spec."""
        return self.run(name, {"main": (index, mib)}, then=then, **spec)

    def create(self, name: str, shares: dict[str, tuple[int, int]], then: str = STAY, **spec: Any) -> Assignment:
        """A pod that is not bound; returns what its claim is to say."""
        containers, assigned = [], {}
        for position, (container, (index, mib)) in enumerate(shares.items()):
            other = self.number(1 - index)
            script = f"({TELL % {'major': other[0], 'minor': other[1]}}) >> /told/log 2>&1; {then}"
            assigned[str(position)] = (CardShare(index, self.cards[index]["uuid"], MiB(mib), Percent(0), MiB(P100)),)
            containers.append(
                {
                    "name": container,
                    "image": BUSYBOX,
                    "imagePullPolicy": "Never",
                    "command": ["/bin/sh", "-c", script],
                    "resources": {"limits": {names.GPU_MEM: str(mib), names.SHARE: "1"}},
                    "volumeMounts": [{"name": "told", "mountPath": "/told"}],
                }
            )
        own = {
            "schedulerName": "by-hand",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "told", "emptyDir": {}}],
            "containers": containers,
        }
        claimed.use_claim(own)
        self.space.create({"metadata": {"name": name}, "spec": own | spec})
        return Assignment(assigned)

    def bind(self, name: str, assignment: Assignment) -> str:
        """Bind the pod with the annotations of the assignment; returns its UID."""
        uid = str(self.space.get(name)["metadata"]["uid"])
        binding = {
            "metadata": {"name": name, "uid": uid, "annotations": codec.encode(assignment, assume_time_ns=1)},
            "target": {"kind": "Node", "name": NODE},
        }
        self.cluster.api.create(paths.pods(self.space.name, name, "binding"), binding)
        return uid

    def run(self, name: str, shares: dict[str, tuple[int, int]], change: Change = lambda *_: None, **spec: Any) -> str:
        """Create, allocate and bind; returns the UID. `change`: what is wrong with claim and status."""
        assignment = self.create(name, shares, **spec)
        claimed.allocate(self.space, name, assignment, NODE, change)
        return self.bind(name, assignment)

    def claim_of(self, pod: str) -> str:
        return str(self.space.get(pod)["spec"]["resourceClaims"][0]["resourceClaimName"])

    def delete_claim(self, name: str) -> None:
        """With its finalizer, which kube-scheduler or the resourceclaim controller may have set."""
        path = paths.resourceclaims(self.space.name, name)
        self.cluster.api.patch(path, {"metadata": {"finalizers": None}}, "merge")
        self.cluster.api.delete(path)

    def restarts(self, pod: str) -> int:
        statuses = self.space.get(pod)["status"].get("containerStatuses") or [{}]
        return int(statuses[0].get("restartCount", 0))

    def waiting_message(self, pod: str) -> str:
        statuses = self.space.get(pod)["status"].get("containerStatuses") or [{}]
        return str((statuses[0].get("state", {}).get("waiting") or {}).get("message", ""))

    def set_health(self, index: int, reason: str) -> None:
        self.cards[index] |= {"healthy": not reason, "reason": reason}
        self.write_cards()


@pytest.fixture(scope="module")
def hand(cluster: Cluster) -> Iterator[ClaimHand]:
    hand = ClaimHand(cluster)
    hand.start_plugin()
    yield hand
    cluster.process(PLUGIN).stop()
    write_inventory(hand.folder, NODE, DEFAULT)


@pytest.fixture(autouse=True)
def clean(hand: ClaimHand) -> Iterator[None]:
    yield
    hand.space.clear()
    hand.wait(lambda: not hand.grants(), "every share freed")
    assert not list(hand.cluster.node(NODE).cdi_dir.glob("cardwise.dev-share-*-*"))


def test_a_container_has_its_card_and_no_other(hand):
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    lines = hand.output_of(uid).splitlines()
    assert "has 1" in lines
    assert "has 0" not in lines
    assert "opened the other" not in lines
    assert "CARDWISE_MEM_LIMIT_MIB=8138" in lines
    assert "NVIDIA_VISIBLE_DEVICES=void" in lines
    hand.space.marked("a")


def test_each_container_of_a_pod_has_its_own_card(hand):
    uid = hand.run("a", {"first": (0, 900), "second": (1, 1700)})
    hand.wait(lambda: hand.starts(uid) == 2, "both told")
    output = hand.output_of(uid)
    assert (output.count("has 0"), output.count("has 1")) == (1, 1)
    assert "opened the other" not in output
    assert output.count("CARDWISE_MEM_LIMIT_MIB=900") == output.count("CARDWISE_MEM_LIMIT_MIB=1700") == 1


def test_a_container_keeps_its_card_through_restarts_of_everything(hand):
    """The claim is gone meanwhile: neither the node nor a restart of a container needs it."""
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    hand.delete_claim(hand.claim_of("a"))
    for turn, part in enumerate((PLUGIN, KUBELET, RUNTIME), 2):
        with hand.cluster.node(NODE).slots_listed() if part != RUNTIME else nullcontext():
            hand.cluster.process(part).kill()
            hand.cluster.process(part).restart()
        hand.let_it_exit(uid)
        hand.wait(lambda turn=turn: hand.starts(uid) == turn, f"the container starts again after {part}")
    assert hand.output_of(uid).count("has 1") == 4
    assert "has 0" not in hand.output_of(uid)
    after = hand.pod("b", 1, 8138)
    hand.wait(lambda: hand.starts(after), "a pod for the rest of the card")


def test_a_pod_waits_while_the_plugin_is_away(hand):
    hand.cluster.process(PLUGIN).kill()
    uid = hand.pod("a", 1, 8138)
    hand.wait(lambda: "FailedPrepareDynamicResources" in hand.events("a"), "the pod is told")
    hand.cluster.process(PLUGIN).restart()
    hand.wait(lambda: hand.starts(uid), "the container told")
    assert "has 1" in hand.output_of(uid)


def move_to_other_node(claim: dict[str, Any], status: dict[str, Any]) -> None:
    allocation = status["allocation"]
    allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]["values"] = ["n2"]
    allocation["devices"]["results"][0]["pool"] = "n2"


def change_class(claim: dict[str, Any], status: dict[str, Any]) -> None:
    claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "gpu.example.com"


def take_more(claim: dict[str, Any], status: dict[str, Any]) -> None:
    status["allocation"]["devices"]["config"][0]["opaque"]["parameters"]["containers"]["0"][0][2] = 12_000


def take_other_card(claim: dict[str, Any], status: dict[str, Any]) -> None:
    devices = status["allocation"]["devices"]
    devices["results"][0]["device"] = "gpu-1"
    devices["config"][0]["opaque"]["parameters"]["containers"]["0"][0][0] = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (move_to_other_node, "is allocated on node n2"),
        (change_class, "is not of the class cardwise.dev"),
        (take_more, "name different GPUs"),
        (take_other_card, "name different GPUs"),
    ],
)
def test_a_claim_that_is_wrong_starts_nothing_and_says_why(hand, change, reason):
    uid = hand.run("a", {"main": (0, 8138)}, change)
    hand.wait(lambda: reason in hand.events("a"), f"the pod is told: {reason}")
    assert not hand.starts(uid)
    assert hand.grants() == []


@pytest.mark.parametrize(
    ("users", "reason"),
    [(["thief"], "does not own the claim"), (["owner", "thief"], "does not name exactly one pod")],
    ids=["for the thief", "for both"],
)
def test_a_claim_that_is_reserved_for_another_pod_starts_neither(hand, users, reason):
    """Without the policies: somebody who writes statuses has reserved it."""
    assignment = hand.create("owner", {"main": (0, 8138)})
    hand.create("thief", {"main": (0, 8138)}, resourceClaims=hand.space.get("owner")["spec"]["resourceClaims"])
    uids = {name: hand.space.get(name)["metadata"]["uid"] for name in ("owner", "thief")}

    def reserve(claim: dict[str, Any], status: dict[str, Any]) -> None:
        status["reservedFor"] = [{"resource": "pods", "name": name, "uid": uids[name]} for name in users]

    claimed.allocate(hand.space, "owner", assignment, NODE, reserve)
    for name in users:
        hand.bind(name, assignment)
        hand.wait(lambda name=name: reason in hand.events(name), f"{name} is told: {reason}")
    assert not any(map(hand.starts, uids.values()))
    assert hand.grants() == []


def test_a_card_that_is_full_refuses_a_claim_until_its_holder_is_gone(hand):
    first = hand.pod("first", 0, 10_000)
    hand.wait(lambda: hand.starts(first), "the first told")
    second = hand.pod("second", 0, 10_000)
    hand.wait(lambda: "are still held by" in hand.events("second"), "the second is told")
    assert not hand.starts(second)
    hand.delete("first")
    hand.wait(lambda: hand.starts(second), "the second starts")


def test_a_claim_that_was_made_anew_is_another_one(hand):
    """The kubelet has prepared the first one; a second one of its name is not what it was told of."""
    uid = hand.pod("a", 0, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    api, name = hand.cluster.api, hand.claim_of("a")
    claim = api.get(paths.resourceclaims(hand.space.name, name))
    forged = copy.deepcopy({key: claim[key] for key in ("apiVersion", "kind", "spec")})
    metadata = claim["metadata"]
    forged["metadata"] = {"name": name, "ownerReferences": metadata["ownerReferences"]}
    hand.delete_claim(name)
    claimed.write(hand.space, forged, claim["status"])
    hand.let_it_exit(uid)
    hand.wait(lambda: hand.starts(uid) == 2, "the container starts again with what it was given")
    assert [grant["slots"] for grant in hand.grants()] == [[f"{metadata['uid']}-main"]]


def test_an_unhealthy_card_stops_a_restart_and_says_why_until_it_heals(hand):
    uid = hand.pod("a", 0, 8138, restartPolicy="OnFailure")
    hand.wait(lambda: hand.starts(uid), "the container told")
    hand.set_health(0, "Xid 79: GPU has fallen off the bus")
    try:
        hand.wait(lambda: claimed.blocked_starts(hand.cluster.node(NODE).cdi_dir), "the start is blocked")
        hand.let_it_exit(uid)
        reason = "is unhealthy: Xid 79: GPU has fallen off the bus; the container starts when it has recovered"
        hand.wait(lambda: reason in hand.waiting_message("a"), "the pod says why it waits")
        assert reason in hand.events("a")
        counted = hand.restarts("a")
        hand.wait(lambda: hand.events("a").count("Failed") or hand.starts(uid) > 1, "it was tried")
        assert (hand.starts(uid), hand.restarts("a")) == (1, counted)
    finally:
        hand.set_health(0, "")
    hand.wait(lambda: hand.starts(uid) == 2, "the container starts again")
    assert hand.output_of(uid).count("has 0") == 2
    assert hand.space.phase("a") == "Running"


def test_a_start_block_is_right_again_after_a_restart_of_the_plugin(hand):
    uid = hand.pod("a", 0, 8138)
    hand.wait(lambda: hand.starts(uid), "the container told")
    hand.cluster.process(PLUGIN).kill()
    hand.set_health(0, "Xid 79")
    try:
        hand.cluster.process(PLUGIN).restart()
        hand.wait(lambda: claimed.blocked_starts(hand.cluster.node(NODE).cdi_dir), "the start is blocked")
        hand.let_it_exit(uid)
        hand.wait(lambda: "is unhealthy: Xid 79" in hand.waiting_message("a"), "the pod says why it waits")
        assert hand.starts(uid) == 1
    finally:
        hand.set_health(0, "")
    hand.wait(lambda: hand.starts(uid) == 2, "the container starts again")


# The same stories as of pods by slot.


def test_twenty_equal_pods_bound_together_are_not_swapped(hand):
    by_slot.test_twenty_equal_pods_bound_together_are_not_swapped(hand)


@pytest.mark.parametrize("when", ["granted", "delivered"])
def test_a_plugin_that_is_killed_in_a_start_gives_the_pod_its_card_and_nothing_twice(hand, moment, when):  # noqa: F811
    by_slot.test_a_plugin_that_is_killed_in_a_start_gives_the_pod_its_card_and_nothing_twice(hand, moment, when)


def test_a_pod_that_goes_while_its_plugin_is_dead_leaves_no_grant(hand, moment):  # noqa: F811
    """It goes when the plugin is back: the kubelet releases a claim that it has prepared before it lets the pod go."""
    specs = hand.specs()
    by_slot.die_in_the_start(hand, moment, "delivered", "goes")
    hand.space.delete("goes")
    by_slot.come_back(hand)
    hand.space.wait_for_deletion("goes")
    hand.wait(lambda: not hand.grants() and hand.specs() == specs, "no grant and no spec stays behind")
    whole = hand.pod("whole", 1, P100)
    hand.wait(lambda: hand.starts(whole), "another pod has the whole card")
