"""Real clusters for the tests of this folder, each started once per session, and their logs when a test fails."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from cardwise.core.policies import BY_CARDS
from tests.cluster import Cluster, ClusterSpec

SOAK = bool(os.environ.get("CARDWISE_SOAK"))
_LOG_LINES, _LOG_WIDTH = 8, 300


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a kubelet are skipped without root; soak tests run by `make soak` only."""
    for item in items:
        if item.get_closest_marker("node") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="real nodes need root: kubelet, mounts, bridges"))
        if item.get_closest_marker("soak") and not SOAK:
            item.add_marker(pytest.mark.skip(reason="big counts: make soak"))


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
        self, *, policy: str = BY_CARDS, part_args: Mapping[str, Sequence[str]] | None = None, **settings: object
    ) -> None:
        given = dict(part_args or {})
        given["extender"] = [*given.get("extender", ()), f"--policy={policy}"]
        self._settings = settings | {"part_args": given}

    def __call__(self, state: Path) -> ClusterSpec:
        return ClusterSpec(state_dir=state, **self._settings)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def sim_cluster() -> Iterator[Cluster]:
    """Control plane and parts with four simulated nodes of two P100 cards, sim-1 to sim-4."""
    yield from started(SpecOf(sim_nodes=4))


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """Two real nodes, n1 and n2, of two P100 cards each, and all parts."""
    yield from started(SpecOf(nodes=2))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Who reads only the end of a long output finds there why it failed, and before it what the parts said last."""
    report = yield
    if report.failed and call.when == "call":
        given = getattr(item, "funcargs", {}).values()
        for value in {id(each): each for each in (getattr(one, "cluster", one) for one in given)}.values():
            if isinstance(value, Cluster):
                for log in sorted((value.state_dir / "logs").glob("*.log")):
                    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                    report.sections.append((f"end of {log.name}", "\n".join(line[:_LOG_WIDTH] for line in lines)))
        report.sections.append(("why it failed", str(call.excinfo.value) if call.excinfo else ""))
    return report
