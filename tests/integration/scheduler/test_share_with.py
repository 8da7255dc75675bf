"""Pods that share GPUs within their namespace only, with the real scheduler and the admission policies."""

from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.core.values.refusals import Refusal
from cardwise.kube import errors, paths
from tests.cluster import Cluster
from tests.integration.commands import cardwise
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("sim")]

SHARE_WITH = {names.SHARE_WITH: "namespace"}


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """With one node of two cards."""
    for space in spaces(cluster, request):
        space.nodes()
        yield space


@pytest.fixture
def other(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """Another namespace."""
    yield from spaces(cluster, request)


def test_the_gpu_of_a_pod_takes_pods_of_its_namespace_only(space: Space, other: Space) -> None:
    node = f"{space.name}-00"
    space.create(workload("first", gpu_mem=1000, annotations=SHARE_WITH, node=node))
    assert space.placed("first") == (node, "0")
    other.create(workload("plain", gpu_mem=1000, node=node))
    assert other.placed("plain") == (node, "1")
    space.create(workload("second", gpu_mem=1000, annotations=SHARE_WITH, node=node))
    space.create(workload("third", gpu_mem=1000, node=node))
    assert {space.placed(name) for name in ("second", "third")} == {(node, "0")}
    other.create(workload("apart", gpu_mem=1000, annotations=SHARE_WITH, node=node))
    assert other.placed("apart") == (node, "1")
    explained = cardwise(space.cluster, "explain", "pod", "first", "-n", space.name).stdout
    assert "only pods of its namespace share this GPU" in explained
    with pytest.raises(errors.KubeError, match="cannot be changed after creation"):
        space.cluster.api.patch(paths.pods(other.name, "plain"), {"metadata": {"annotations": SHARE_WITH}}, "merge")


def test_a_pod_waits_while_others_of_another_namespace_run_on_all_gpus(space: Space, other: Space) -> None:
    node = f"{space.name}-00"
    for name in ("a", "b"):
        space.create(workload(name, gpu_mem=9000, node=node))
        space.placed(name)
    other.create(workload("apart", gpu_mem=1000, annotations=SHARE_WITH, node=node))
    other.refused("apart", Refusal.OTHER_NAMESPACES.text)
    explained = cardwise(space.cluster, "explain", "pod", "apart", "-n", other.name).stdout
    assert "closed by share-with" in explained
    space.cluster.api.delete(paths.pods(space.name, "a"))
    assert other.placed("apart")[0] == node
