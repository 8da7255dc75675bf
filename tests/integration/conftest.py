"""Real clusters for the tests of these rooms, which files share, and their logs when a test fails.

tests/cluster/README.md, "Clusters that tests share", says how a file uses them.
"""

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.api.policies import FALLBACK_POLICY
from tests.cluster import Cluster, ClusterSpec, binaries
from tests.cluster.controlplane import APISERVER, ETCD, ControlPlane
from tests.integration import untouched
from tests.integration.progress import pytest_configure  # noqa: F401 - a hook
from tests.integration.scheduling import NONE, ByCluster, group
from tests.integration.sharing import Space

SOAK = bool(os.environ.get("CARDWISE_SOAK"))
_LOG_LINES, _LOG_WIDTH = 8, 300
_spaces = itertools.count(1)


def started(spec_of: "SpecOf") -> Iterator[Cluster]:
    """A cluster in a short folder of its own (socket paths are limited), taken down and checked for leftovers."""
    state = Path(tempfile.mkdtemp(prefix="cw-", dir="/tmp"))
    cluster = Cluster.start(spec_of(state), print)
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(state, ignore_errors=True)
        assert Cluster.leftovers(state) == []


class SpecOf:
    """A ClusterSpec but for its folder. `policy`: of the extender. By `binpack` a test knows where a pod is to go; by
    the default it would have to know all pods that came before.
    """

    def __init__(
        self, *, policy: str = FALLBACK_POLICY, part_args: Mapping[str, Sequence[str]] | None = None, **settings: object
    ) -> None:
        flags = dict(part_args or {})
        flags["extender"] = [*flags.get("extender", ()), f"--policy={policy}"]
        self._settings = settings | {"part_args": flags}

    def __call__(self, state: Path) -> ClusterSpec:
        return ClusterSpec(state_dir=state, **self._settings)  # type: ignore[arg-type]


def api_alone() -> Iterator[ControlPlane]:
    """etcd and kube-apiserver, without controllers."""
    with tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder:
        plane = ControlPlane(Path(folder), binaries.kube(print))
        plane.write_credentials([])
        try:
            # Of Secrets what etcd has forgotten is forgotten, as nothing is kept of them in memory.
            plane.start_api(["--watch-cache-sizes=secrets#0"])
            yield plane
        finally:
            for name in (APISERVER, ETCD):
                plane.process(name).kill()


# The clusters that files share, by the name that they give to `pytest.mark.cluster`; the order is that of the run.
KINDS: Mapping[str, Callable[[], Iterator[Cluster | ControlPlane]]] = {
    "api": api_alone,
    "bare": partial(started, SpecOf(nodes=2 if os.geteuid() == 0 else 0, parts=False)),
    "nodes": partial(started, SpecOf(nodes=2, rdma_devices=2)),
    "sim": partial(started, SpecOf()),
}


class Clusters:
    """The shared cluster of this process: one at a time, of the kind that was asked for last."""

    def __init__(self) -> None:
        self._kind = ""
        self._running: Iterator[Cluster | ControlPlane] | None = None
        self._cluster: Cluster | ControlPlane | None = None

    def cluster_of(self, kind: str) -> Any:
        if kind != self._kind or self._cluster is None:
            self.stop()
            self._running = KINDS[kind]()
            self._cluster = next(self._running)
            self._kind = kind
        return self._cluster

    def stop_unless(self, kind: str) -> None:
        """Whoever needs this kind, or none, comes next: what runs beside him takes a tenth of a core."""
        if kind != self._kind:
            self.stop()

    def stop(self) -> None:
        """Asserts that nothing is left."""
        running, self._running, self._cluster = self._running, None, None
        if running is not None:
            assert next(running, None) is None


@pytest.fixture(scope="module")
def cluster(clusters: Clusters, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The shared one that the file names: `pytestmark = pytest.mark.cluster("sim")`. The file leaves it as it was."""
    cluster = clusters.cluster_of(kind_of(request.node))
    state = untouched.state(cluster)
    yield cluster
    untouched.leaves_as_found(cluster, state)


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace of the test's own; `space.nodes()` are simulated nodes of its own."""
    yield from spaces(cluster, request)


def spaces(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """For fixtures that add something of their own to it."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    with Space(cluster, f"{words[:30].strip('-')}-{next(_spaces)}") as space:
        yield space


def kind_of(node: pytest.Item | pytest.Collector) -> str:
    """Of the shared cluster; empty for files with one of their own."""
    mark = node.get_closest_marker("cluster")
    return str(mark.args[0]) if mark and mark.args else ""


def _place(test: pytest.Item) -> tuple[int, ...]:
    """Where it stands in its file; of a test with parameters, also which one it is of."""
    of = getattr(test, "callspec", None)
    return (test.reportinfo()[1] or 0, *(of.indices.values() if of is not None else ()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a kubelet are skipped without root; soak tests run by `make soak` only. Files with the same
    cluster follow each other, those that are hardest on it at the end. Files without one fill what time is left.
    A file that tells one story keeps its order where the others are shuffled.
    """
    for _, tests in itertools.groupby(items[:], lambda test: test.path):
        if story := [test for test in tests if test.get_closest_marker("in_order")]:
            first = items.index(story[0])
            items[first : first + len(story)] = sorted(story, key=_place)
    ranks = ["", *KINDS]

    def rank(test: pytest.Item) -> tuple[bool, int, bool]:
        mark = test.get_closest_marker("cluster")
        return mark is None, ranks.index(kind_of(test)), bool(mark and mark.kwargs.get("last"))

    items.sort(key=rank)
    for test in items:
        if test.get_closest_marker("node") and os.geteuid() != 0:
            test.add_marker(pytest.mark.skip(reason="real nodes need root: kubelet, mounts, bridges"))
        if test.get_closest_marker("soak") and not SOAK:
            test.add_marker(pytest.mark.skip(reason="big counts: make soak"))
        kind = kind_of(test) or test.path.stem if test.get_closest_marker("cluster") else NONE
        test.add_marker(pytest.mark.xdist_group(group(kind, test.nodeid.partition("::")[0])))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByCluster | None:
    return ByCluster(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Who reads only the end of a long output finds there why it failed, and before it what the parts said last."""
    report = yield
    if report.failed and call.when == "call":
        fixtures = getattr(item, "funcargs", {}).values()
        for cluster in {
            id(cluster): cluster for cluster in (getattr(fixture, "cluster", fixture) for fixture in fixtures)
        }.values():
            if isinstance(cluster, Cluster):
                pods = cluster.state_dir.glob(f"nodes/*/pod-logs/{names.NAMESPACE}_*/*/*.log")
                for log in [*sorted((cluster.state_dir / "logs").glob("*.log")), *sorted(pods)]:
                    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                    report.sections.append(
                        (f"end of {log.relative_to(cluster.state_dir)}", "\n".join(line[:_LOG_WIDTH] for line in lines))
                    )
        report.sections.append(("why it failed", str(call.excinfo.value) if call.excinfo else ""))
    return report
