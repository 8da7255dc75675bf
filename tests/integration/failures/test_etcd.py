"""What becomes of a cluster whose etcd or API server stands still, restarts, forgets its history or is full.

All the while pods come and go under the rules of test_failover. Afterwards every card is free again: nothing is lost.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cardwise.kube import errors, paths
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.controlplane import APISERVER, ETCD
from tests.cluster.processes import PATIENCE
from tests.integration.conftest import spaces
from tests.integration.failures.load import Load, Rules
from tests.integration.gangpods import bound, create_at_once, member, phase
from tests.integration.sharing import Space, inspect, workload

pytestmark = [pytest.mark.cluster("sim", last=True)]

NODES, CARDS = 4, 8

Fault = Callable[[Cluster, float], None]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(NODES)
        yield space


def etcd_stands_still(cluster: Cluster, seconds: float) -> None:
    _stands_still(cluster, ETCD, seconds)


def api_server_stands_still(cluster: Cluster, seconds: float) -> None:
    _stands_still(cluster, APISERVER, seconds)


def _stands_still(cluster: Cluster, name: str, seconds: float) -> None:
    process = cluster.process(name)
    process.pause()
    try:
        time.sleep(seconds)
    finally:
        process.resume()


def etcd_is_killed(cluster: Cluster, seconds: float) -> None:
    process = cluster.process(ETCD)
    process.kill()
    time.sleep(seconds)
    process.restart()


def etcd_is_full(cluster: Cluster, seconds: float) -> None:
    """Reads work, and no write: also the Lease is not renewed. Then somebody makes room, as etcd's manual has it."""
    alarm = {
        "memberID": cluster.control_plane.call_etcd("cluster/member/list", {})["header"]["member_id"],
        "alarm": "NOSPACE",
    }
    cluster.control_plane.call_etcd("maintenance/alarm", {"action": "ACTIVATE", **alarm})
    try:
        with pytest.raises(errors.ServerError, match="space exceeded"):
            cluster.api.create(paths.namespaces(), {"metadata": {"generateName": "full-"}})
        time.sleep(seconds)
        forget_history(cluster)
        cluster.control_plane.call_etcd("maintenance/defragment", {})
    finally:
        cluster.control_plane.call_etcd("maintenance/alarm", {"action": "DEACTIVATE", **alarm})


def forget_history(cluster: Cluster) -> None:
    """A compaction up to now."""
    revision = cluster.control_plane.call_etcd("kv/range", {"key": "Lw=="})["header"]["revision"]
    cluster.control_plane.call_etcd("kv/compaction", {"revision": revision, "physical": True})


def goes_on(space: Space, fault: Fault, seconds: float, count: int = 1) -> None:
    """Pods come and go while it happens. Each that the API server took is placed, and at the end all cards are free."""
    with (
        Rules(space) as rules,
        Load(space, 12, enough=lambda created: created > len(rules.granted) + 20) as load,
    ):
        waits = []
        for _ in range(count):
            before = time.monotonic()
            space.wait(lambda since=before: rules.grants_since(since) > 2, "cards are given away")
            fault(space.cluster, seconds)
            over = time.monotonic()
            space.wait(lambda since=over: rules.grants_since(since) > 2, "cards are given away again")
            waits.append(time.monotonic() - over)
            assert rules.violations == []
        load.stop()
        print(
            f"{count} times {seconds:.0f} s, {len(rules.granted)} grants; the first three came at most "
            f"{max(waits):.1f} s after the end; {len(load.failed)} creations failed, such as {load.failed[:1]}"
        )
        space.wait(lambda: all_placed(space, load), "all pods are placed")
        space.cluster.api.delete(paths.pods(space.name), {"gracePeriodSeconds": 1}, timeout=PATIENCE)
    assert not rules.failed
    assert rules.violations == []
    nothing_is_lost(space)


def all_placed(space: Space, load: Load) -> bool:
    """Also those whose creation got no answer, where they are there."""
    placed = set(bound(space))
    return placed >= set(load.created) and placed >= {pod["metadata"]["name"] for pod in space.pods()}


def nothing_is_lost(space: Space) -> None:
    """Each card is free, and can be given away whole."""
    space.wait(lambda: not space.pods(), "the pods are gone")
    space.wait(lambda: not any(used for _, used, _ in inspect(space.cluster).values()), "every card is free")
    for i in range(CARDS):
        space.create(workload(f"whole-{i}", gpu_mem=P100))
    space.running(*(f"whole-{i}" for i in range(CARDS)))


def test_etcd_that_stood_still_for_twenty_seconds(space: Space):
    goes_on(space, etcd_stands_still, 20)


def test_etcd_stands_still_for_twenty_seconds_while_a_gang_is_bound(space: Space):
    """The answers of some Bindings are lost, and the extender's Lease. The next epoch binds the rest on what is left:
    the gang and two pods that compete with it need all cards.
    """
    size = 4 * CARDS - 2
    create_at_once(space, [member(f"gang-{i}", "gang", size, gpu_mem=P100 // 4) for i in range(size)])
    space.wait(lambda: bound(space, "gang-"), "the first member is bound")
    with Rules(space) as rules:
        etcd_stands_still(space.cluster, 20)
        create_at_once(space, [workload(f"other-{i}", gpu_mem=P100 // 4) for i in range(2)])
        space.wait(lambda: len(bound(space)) == size + 2, "the gang and the other pods are bound")
        assert not rules.failed
        assert rules.violations == []
    space.wait(lambda: phase(space, "gang") == "Running", "the gang runs")
    space.cluster.api.delete(paths.pods(space.name), {"gracePeriodSeconds": 1}, timeout=PATIENCE)
    nothing_is_lost(space)


def test_a_full_database_stops_all_writes_until_there_is_room(space: Space):
    goes_on(space, etcd_is_full, 8)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "fault",
    [etcd_stands_still, api_server_stands_still, etcd_is_killed, etcd_is_full],
    ids=lambda fault: fault.__name__,
)
def test_twice_for_half_a_minute(space: Space, fault: Fault):
    goes_on(space, fault, 30, 2)


@contextmanager
def standing_still(cluster: Cluster, *names: str) -> Iterator[None]:
    processes = [cluster.process(name) for name in names]
    for process in processes:
        process.pause()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def test_who_missed_what_a_compaction_took_away_lists_again(space: Space, cluster: Cluster):
    """An API server that starts anew after a compaction does not know what came before: it answers 410."""
    extender = cluster.process("extender")
    space.create_and_locate(workload("before", gpu_mem=P100))
    log_start = len(extender.log.read_text())
    with standing_still(cluster, "extender", "webhook"):
        space.delete("before", grace=0)
        space.wait_for_deletion("before")
        for i in range(20):  # a history that nobody has seen
            cluster.api.create(f"{paths.namespaces(space.name)}/configmaps", {"metadata": {"name": f"filler-{i}"}})
        forget_history(cluster)
        cluster.process(APISERVER).kill()  # it would wait a minute for those who watch
        cluster.process(APISERVER).restart()
        cluster.wait(lambda: cluster.api.get(paths.namespaces(space.name)), "the API server is back")
    space.wait(lambda: "resourceVersion expired" in extender.log.read_text()[log_start:], "the extender is told 410")
    nothing_is_lost(space)
