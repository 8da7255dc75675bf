"""GPUQuota under concurrency: many clients, three webhooks, two extenders that are killed; and its edges one by one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster, CommandFailed
from tests.cluster.cards import TestCard
from tests.cluster.processes import Process, wait_for
from tests.integration.conftest import spaces
from tests.integration.quotas.test_types import K80, K80_CLASS, P100, P100_CLASS
from tests.integration.replicas import ready, two_extenders, webhooks
from tests.integration.ruleone import Follower
from tests.integration.sharing import Space, kill9, wait_for_classes, workload

pytestmark = [pytest.mark.cluster("sim")]

CLIENTS, NODES = 20, 2


CARDS = [TestCard(model="Tesla K80", memory_mib=K80), TestCard(model="Tesla P100", memory_mib=P100)]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """With a K80 and a P100 on each of two nodes; the webhook knows their classes."""
    for space in spaces(cluster, request):
        space.nodes(NODES, CARDS)
        wait_for_classes(space, K80_CLASS, P100_CLASS)
        yield space


def used(space: Space, name: str = "team") -> list[Json]:
    lines = space.cluster.api.get(paths.gpuquotas(space.name, name)).get("status", {}).get("used", [])
    return [{key: line.get(key, 0) for key in ("shares", "memoryMiB", "gpus")} for line in lines]


class Ledger(Follower):
    """What the pods of a namespace hold by the API server's own event log: holds and MiB, now and at most."""

    def __init__(self, space: Space) -> None:
        super().__init__(space.cluster, paths.pods(space.name))
        self.max_shares = self.most_mib = 0
        self._holds: dict[str, tuple[int, int]] = {}

    @property
    def shares(self) -> int:
        assert not self.failed, self.failed
        return sum(shares for shares, _ in list(self._holds.values()))

    @property
    def mib(self) -> int:
        return sum(mib for _, mib in list(self._holds.values()))

    def on_event(self, kind: str, manifest: Json) -> None:
        """The pod is so now."""
        uid = manifest["metadata"]["uid"]
        held = assignment.decode(manifest["metadata"].get("annotations") or {})
        over = kind == "DELETED" or manifest.get("status", {}).get("phase") in names.FINISHED_PHASES
        if over or held is None or not manifest["spec"].get("nodeName"):
            self._holds.pop(uid, None)
        else:
            self._holds[uid] = (len(held.shares()), held.mem)
        self.max_shares = max(self.max_shares, self.shares)
        self.most_mib = max(self.most_mib, self.mib)


def create_all(space: Space, pods: list[Json]) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(space.create, pods))


@pytest.fixture(scope="class")
def replicas(cluster: Cluster) -> Iterator[Process]:
    """Three webhooks and two extenders, each behind a balancer; the second extender."""
    with two_extenders(cluster) as pair, webhooks(cluster, 2):
        yield pair.second


class TestReplicasThatAreKilled:
    def test_never_above_the_quota(self, space, replicas):
        never_above(space, replicas, "shares", pods=60, shares=24)

    @pytest.mark.soak
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("unit", ["shares", "memoryMiB"])
    def test_never_above_the_quota_with_five_hundred_pods(self, space, replicas, unit):
        never_above(space, replicas, unit, pods=500, shares=100)


def never_above(space: Space, second: Process, unit: str, *, pods: int, shares: int) -> None:
    """So many pods ask at once, of which so many may hold a share: as many do, and never one more."""
    limit = shares if unit == "shares" else shares * 500
    space.put_quota({unit: limit})
    mib = 100 if unit == "shares" else 500
    with Ledger(space) as ledger, ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_twice, ledger, [space.cluster.process("extender"), second])
        create_all(space, [workload(f"p{i}", gpu_mem=mib) for i in range(pods)])
        killed.result()
        space.wait(lambda: ledger.shares == shares, f"{shares} hold a share")
        waiting = [pod["metadata"]["name"] for pod in space.pods() if not pod["spec"].get("nodeName")]
        assert len(waiting) == pods - shares
        for name in waiting:
            space.refused(name, "GPUQuota")
        space.wait(lambda: used(space)[0][unit] == limit, "the quota says so")
        assert ledger.shares == shares
        # As pods end the waiting ones get in.
        ended = [pod["metadata"]["name"] for pod in space.pods() if pod["spec"].get("nodeName")][: shares // 2]
        space.delete(*ended)
        space.wait_for_deletion(*ended)
        space.wait(lambda: ledger.shares == shares, "the freed room is taken")
        assert (ledger.max_shares, ledger.most_mib) == (shares, shares * mib)


def kill_twice(ledger: "Ledger", processes: Sequence[Process]) -> None:
    """First one extender, then the other, while pods get their shares; each is started again."""
    for some, process in zip((5, 15), processes, strict=True):
        assert wait_for(lambda some=some: ledger.shares >= some), f"{some} shares are held"
        kill9(process)
        process.restart()
        ready(process)


def test_freed_raised_and_deleted_quota_wakes_who_waits(space):
    space.put_quota({"shares": 1})
    space.create_and_locate(workload("first", gpu_mem=1000))
    space.create(workload("second", gpu_mem=1000))
    space.wait(lambda: "GPUQuota" in space.reasons("second"), "second waits")
    space.delete("first")
    space.placed("second")
    space.create(workload("third", gpu_mem=1000))
    space.wait(lambda: "GPUQuota" in space.reasons("third"), "third waits")
    space.put_quota({"shares": 2})
    space.placed("third")
    space.create(workload("fourth", gpu_mem=1000))
    space.wait(lambda: "GPUQuota" in space.reasons("fourth"), "fourth waits")
    space.kubectl_json("delete", "gpuquota", "team")
    space.placed("fourth")


UNREADABLE = [
    ([{"class": "a", "model": "b", "shares": 1}], "class|model"),
    ([{"class": "a"}], "shares|limit"),
    ([{"class": "a", "shares": -1}], "shares"),
    ([{"class": "a", "memoryMiB": "much"}], "memoryMiB"),
    ([{"class": "a", "shares": 1}, {"class": "a", "gpus": 1}], "two entries select the same GPUs"),
    ([], "hard"),
]


def test_a_quota_that_cannot_be_read_is_refused(cluster, request):
    for space in spaces(cluster, request):
        for hard, says in UNREADABLE:
            with pytest.raises(CommandFailed, match=says):
                space.put_quota(*hard, name="bad")
