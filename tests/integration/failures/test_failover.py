"""Replicas that are killed, stand still, are stopped and get new certificates, while pods come and go.

All the while a watcher follows every event of every pod: no card above its size, no quota exceeded, no pod that changes
its place. How long it takes is in docs/measured.md (`python -m bench failover`).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.cluster import Cluster
from tests.cluster.processes import Process
from tests.integration.conftest import spaces
from tests.integration.failures.load import LIMIT, Load, Rules, freezes
from tests.integration.gangpods import bound, create_at_once, member
from tests.integration.replicas import ROTATING_WEBHOOK, Pair, ready, two_extenders, webhooks
from tests.integration.sharing import Space, kill9, workload

pytestmark = [pytest.mark.cluster("sim", last=True)]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(4)
        yield space


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[Pair]:
    with two_extenders(cluster) as pair:
        yield pair


def all_is_well(space: Space, rules: Rules, load: Load) -> None:
    """What has come is placed in the end, and no rule was broken."""
    space.wait(lambda: set(load.created) <= set(bound(space)), "all pods are placed")
    assert not rules.failed
    assert rules.violations == []
    assert load.failed == []


def ends(space: Space, pair: Pair, ways: Sequence[Callable[[Process], None]]) -> None:
    """One leader after the other is ended while 100 pods a second are asked for, where the machine can."""
    space.put_quota({"shares": LIMIT})
    seconds: list[float] = []
    with (
        Rules(space) as rules,
        Load(space, 100, enough=lambda created: created > 2 * len(rules.granted) + 200) as load,
    ):
        space.wait(lambda: len(rules.granted) > 10, "shares are given before")
        for number, end in enumerate(ways):
            leader = pair.leader()
            end(leader)
            ended = time.monotonic()
            gang = f"gang{number}"
            create_at_once(space, [member(f"{gang}-{i}", gang, 4, gpu_mem=3000) for i in range(4)])
            with pytest.raises(errors.KubeError, match=names.GPU_MEM):
                space.create(workload(f"bad{number}", gpu_mem="-1"))

            def resumed(ended: float = ended) -> list[float]:
                """When the first share of a leader that came later was given."""
                return [at for at in list(rules.began.values()) if at > ended]

            space.wait(lambda: bool(resumed()), "shares are given again, by the next leader")
            seconds.append(min(resumed()) - ended)
            leader.restart()
        load.stop()
        print(f"{len(load.created)} pods; shares are given again after {[round(second, 1) for second in seconds]} s")
        gangs = [f"gang{number}-" for number in range(len(ways))]
        space.wait(lambda: all(len(bound(space, gang)) == 4 for gang in gangs), "gangs are placed whole")
        all_is_well(space, rules, load)


def told_to_end(leader: Process) -> None:
    """As an update does it."""
    os.kill(leader.pid, signal.SIGTERM)


def rotates(space: Space, replicas: list[Process], seconds: float) -> None:
    """Certificates are renewed every 10 s, and the replicas restarted in turn, while pods are admitted."""
    api, secret = space.cluster.api, paths.secrets(names.NAMESPACE, "cardwise-webhook-tls")
    leafs, authorities = set(), set()
    began, restarts = time.monotonic(), 0
    with Load(space, 8, dry=True) as load:

        def is_rotated() -> bool:
            data = api.get(secret)["data"]
            leafs.add(data["tls.crt"])
            authorities.add(data["authority.crt"])
            return len(leafs) > restarts + 1

        while time.monotonic() < began + seconds or len(authorities) < 2 or restarts < len(replicas):
            space.wait(is_rotated, "a new certificate")
            process = replicas[restarts % len(replicas)]
            process.restart()
            ready(process)
            restarts += 1
    print(
        f"{len(load.created)} admissions, {len(load.failed)} failed, "
        f"{len(leafs)} certificates of {len(authorities)} CAs, "
        f"{restarts} restarts in {time.monotonic() - began:.0f} s"
    )
    assert load.failed == []
    assert len(load.created) > 20


@pytest.mark.soak  # its limits are seconds of a machine that has nothing else to do
def test_leaders_that_are_told_to_end_and_killed_under_load_break_no_rule(space: Space, pair: Pair):
    ends(space, pair, [told_to_end, kill9])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_leaders_that_end_under_load(space: Space, pair: Pair):
    ends(space, pair, [told_to_end, kill9] * 10)


def test_a_leader_that_stood_still_past_its_lease_gives_no_card_twice(space: Space, pair: Pair):
    freezes(space, pair, 1)


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_two_hundred_leaders_that_stood_still(space: Space, pair: Pair):
    freezes(space, pair, 200)


def test_certificates_change_and_webhooks_restart_and_no_admission_fails(space: Space, cluster: Cluster):
    with webhooks(cluster, 2, ROTATING_WEBHOOK, alone=True) as replicas:
        rotates(space, replicas, 10)


@pytest.mark.soak
def test_five_minutes_of_new_certificates(space: Space, cluster: Cluster):
    with webhooks(cluster, 2, ROTATING_WEBHOOK, alone=True) as replicas:
        rotates(space, replicas, 300)


def test_a_binding_of_an_epoch_that_is_over_is_refused(space: Space, cluster: Cluster):
    """What a leader sent before it stood still, by the word of its epoch; see extender/leadership/leadership.py."""
    lease, leader = paths.leases(names.NAMESPACE, names.LEASE), cluster.process("extender")
    leader.stop()
    cluster.api.patch(lease, {"spec": {"leaseTransitions": 123}})  # an old one, whose epochs have several digits
    leader.restart()
    cluster.wait(lambda: cluster.api.get(lease)["spec"]["leaseTransitions"] > 123, "an extender leads")
    held = cluster.api.get(lease)
    uid, transitions = held["metadata"]["uid"], held["spec"]["leaseTransitions"]
    extender = cluster.client("cardwise-extender")
    try:
        pod = space.create(workload("late", gpu_mem=1000, spec={"schedulerName": "nobody"}))
        late = f"{uid}/{transitions - 1}/somebody"
        # Its cache of the Lease may be behind.
        space.refusal(lambda: bind(extender, space, pod, late, dry=True), "the API server knows that the epoch is over")
        with pytest.raises(errors.Invalid, match=rf"{names.LEADER_EPOCH}.*of somebody is over"):
            bind(extender, space, pod, late)
        with pytest.raises(errors.Invalid, match=rf"{names.LEADER_EPOCH}.*of somebody is over"):
            bind(extender, space, pod, f"{uid}/{transitions}/somebody")  # the number was set back, or is at its limit
        assert not space.get("late")["spec"].get("nodeName")
        bind(extender, space, pod, f"{uid}/{transitions}/{held['spec']['holderIdentity']}")
        assert space.get("late")["spec"]["nodeName"] == space.own_nodes[0]
        # A cache may be that of a Lease which is no more; nobody is kept from binding by it.
        other = space.create(workload("other", gpu_mem=1000, spec={"schedulerName": "nobody"}))
        bind(extender, space, other, f"another-lease/{transitions - 1}/somebody", name="other")
    finally:
        extender.close()


def test_a_card_that_was_given_twice_loses_the_later_pod_before_it_starts(space: Space, cluster: Cluster):
    """By somebody with the extender's account: its own Bindings never land so."""
    cards = {card["spec"]["node"]: card["spec"]["uuid"] for card in cluster.api.get(paths.extendedresources())["items"]}
    node = space.own_nodes[0]
    share = CardShare(1, cards[node], MiB(12_000), Percent(0), MiB(16_276))
    annotations = assignment.encode(Assignment({"main": (share,)}), assume_time_ns=time.time_ns())
    extender = cluster.client("cardwise-extender")
    kubelets = cluster.process("simnodes")
    try:
        for name in ("early", "late"):
            uid = space.create(workload(name, gpu_mem=12_000, spec={"schedulerName": "nobody"}))
            metadata = {"name": name, "uid": uid, "annotations": annotations}
            body = {"kind": "Binding", "apiVersion": "v1", "metadata": metadata}
            target = {"kind": "Node", "name": node}
            extender.create(paths.pods(space.name, name, "binding"), body | {"target": target})
            if name == "early":
                space.running("early")
                kubelets.pause()
        space.wait(lambda: bool(space.get("late")["metadata"].get("deletionTimestamp")), "the later one is evicted")
        space.wait(lambda: "is overcommitted" in space.reasons("late"), "it is told")
    finally:
        kubelets.resume()
        extender.close()
    space.wait_for_deletion("late")
    assert not space.get("early")["metadata"].get("deletionTimestamp")


def bind(client: KubeClient, space: Space, uid: str, epoch: str, *, name: str = "late", dry: bool = False) -> None:
    annotations = {names.LEADER_EPOCH: f"{names.NAMESPACE}/{names.LEASE}/{epoch}"}
    metadata = {"name": name, "uid": uid, "annotations": annotations}
    target = {"kind": "Node", "name": space.own_nodes[0]}
    body = {"kind": "Binding", "apiVersion": "v1", "metadata": metadata, "target": target}
    client.create(paths.pods(space.name, name, "binding"), body, query={"dryRun": "All"} if dry else None)
