"""Two API servers. The one that the leader uses stands still, with the leader or without: no card is given twice.

What the leader had sent lies in a buffer until its API server goes on, which then reads it before it hears of a newer
Lease. Only the version of the pod, which etcd compares, ties a Binding to its epoch (docs/design/0011-fencing.md).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from extender.leadership.fence import Fence, PodState
from extender.records.podref import PodRef
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE, Process
from tests.integration.conftest import spaces
from tests.integration.failures.load import Load, Rules
from tests.integration.replicas import Pair, two_extenders
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("sim", last=True)]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(4)
        yield space


@pytest.fixture(scope="module")
def api_b(cluster: Cluster) -> Iterator[Process]:
    """The second API server, which `extender-b` uses alone; all others use the first."""
    with cluster.control_plane.second_api(cluster.state_dir / "kubeconfig" / "cardwise-extender") as process:
        yield process


@pytest.fixture(scope="module")
def pair(cluster: Cluster, api_b: Process) -> Iterator[Pair]:
    with two_extenders(cluster, cluster.state_dir / "kubeconfig" / "cardwise-extender-b") as pair:
        yield pair


def stands_still(space: Space, pair: Pair, choose: Callable[[Pair], Sequence[Process]], count: int) -> None:
    """Where `extender-b` leads by its own API server, they stand still until the other gives cards away."""
    with (
        Rules(space) as rules,
        Load(space, 15, sizes=(8138, 12_000), enough=lambda created: created > 2 * len(rules.granted) + 40) as load,
    ):
        for number in range(count):
            b_leads(space, pair)
            before = time.monotonic()
            space.wait(lambda since=before: rules.grants_since(since) > 2, "the leader gives cards away")
            paused = choose(pair)
            for process in paused:
                process.pause()
            try:
                space.wait(lambda: pair.leads("extender"), "the other leads")
                # By its epoch: of what the first has given the news may come only now.
                space.wait(lambda: rules.shares_by_epoch[pair.epoch()] > 4, "the other gives cards away")
            finally:
                for process in paused:
                    process.resume()
            space.wait(lambda: pair.stands_by(pair.second.name), "who stood still knows that it is over")
            assert rules.violations == [], f"at try {number}"
        load.stop()
        print(f"{count} times, {len(rules.granted)} grants, {len(rules.violations)} double")
        space.cluster.api.delete(paths.pods(space.name), {"gracePeriodSeconds": 1}, timeout=PATIENCE)
    assert not rules.failed
    assert rules.violations == []


def b_leads(space: Space, pair: Pair) -> None:
    while not pair.leads(pair.second.name):
        pair.leader().restart()  # which gives the Lease back
        space.wait(lambda: pair.leads(pair.second.name) or pair.leads("extender"), "an extender leads")


def api_alone(pair: Pair) -> list[Process]:
    return [pair.cluster.process("kube-apiserver-b")]


def both(pair: Pair) -> list[Process]:
    return [pair.second, *api_alone(pair)]


def test_what_an_api_server_reads_when_it_goes_on_does_not_land(space: Space, pair: Pair, api_b: Process):
    """Sixteen Bindings of the leader lie in its buffers; some are read before the news of the Lease."""
    b_leads(space, pair)
    epoch = pair.epoch()
    pods = [f"late-{i}" for i in range(16)]
    uids = {name: space.create(workload(name, gpu_mem=100, spec={"schedulerName": "nobody"})) for name in pods}
    versions = {name: space.get(name)["metadata"]["resourceVersion"] for name in pods}
    together = threading.Barrier(len(pods) + 1)

    def late_one(name: str) -> Json:
        return binding(
            space, name, uid=uids[name], resourceVersion=versions[name], annotations={names.LEADER_EPOCH: epoch}
        )

    def late(name: str) -> str:
        client = space.cluster.client("cardwise-extender-b")
        client.get(paths.pods(space.name, name))  # the connection is there
        together.wait(PATIENCE)
        together.wait(PATIENCE)
        try:
            client.create(paths.pods(space.name, name, "binding"), late_one(name), timeout=PATIENCE)
        except (errors.Conflict, errors.Invalid) as error:
            return error.reason
        finally:
            client.close()
        return "landed"

    with ThreadPoolExecutor(len(pods)) as pool:
        posts = [pool.submit(late, name) for name in pods]
        together.wait(PATIENCE)
        api_b.pause()
        try:
            together.wait(PATIENCE)
            # Its epoch has begun with the first card that it gives away.
            space.create_and_locate(workload("first", gpu_mem=100))
        finally:
            api_b.resume()
        outcomes = Counter(post.result() for post in posts)
    print(dict(outcomes))
    assert outcomes["landed"] == 0
    assert [name for name in pods if space.get(name)["spec"].get("nodeName")] == []


def test_the_leaders_api_server_stands_still(space: Space, pair: Pair):
    stands_still(space, pair, api_alone, 1)


def test_the_leader_and_its_api_server_stand_still(space: Space, pair: Pair):
    stands_still(space, pair, both, 1)


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("choose", [api_alone, both])
def test_a_hundred_times(space: Space, pair: Pair, choose: Callable[[Pair], Sequence[Process]]):
    stands_still(space, pair, choose, 100)


def test_a_binding_from_before_a_pod_was_changed_never_lands(space: Space, cluster: Cluster):
    """Whatever the policy knows of epochs: it says that of the next one, which no Lease has yet."""
    extender = cluster.client("cardwise-extender")
    try:
        uid = space.create(workload("late", gpu_mem=1000, spec={"schedulerName": "nobody"}))
        path, version = paths.pods(space.name, "late", "binding"), space.get("late")["metadata"]["resourceVersion"]
        assert Fence(extender).fence_pod(PodRef(uid, space.name, "late"), "ns/lease/1/holder") is PodState.UNBOUND
        with pytest.raises(errors.Conflict, match="ResourceVersion"):
            extender.create(path, binding(space, "late", uid=uid, resourceVersion=version))
        assert not space.get("late")["spec"].get("nodeName")
        version = space.get("late")["metadata"]["resourceVersion"]
        extender.create(path, binding(space, "late", uid=uid, resourceVersion=version))
        bound = space.get("late")
        assert bound["spec"]["nodeName"] == space.own_nodes[0]
        assert (
            Fence(extender).fence_pod(PodRef(uid, space.name, "late"), "ns/lease/2/holder") is PodState.BOUND_BY_OTHER
        )
        assert (
            space.get("late")["metadata"]["annotations"].get(names.LEADER_EPOCH)
            == bound["metadata"]["annotations"][names.LEADER_EPOCH]
        )
        assert Fence(extender).fence_pod(PodRef("another", space.name, "late"), "ns/lease/2/holder") is PodState.DELETED
    finally:
        extender.close()


def binding(space: Space, name: str, **metadata: object) -> Json:
    target = {"kind": "Node", "name": space.own_nodes[0]}
    return {"kind": "Binding", "apiVersion": "v1", "metadata": {"name": name} | metadata, "target": target}
