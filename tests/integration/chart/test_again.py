"""The chart installed once more: after an installation with MPS, and without Helm's releases.

What one installation leaves on the nodes and in the cluster, the next one must not believe for ever.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from cardwise.core.api import mps, names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster, partsimage, processes, versions
from tests.cluster.chart import CHART, WAITS
from tests.cluster.images import IDLE
from tests.integration import commands
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, workload

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.in_order]

SYSTEM = names.NAMESPACE
VALUES: Json = {
    "webhook": {"shareAgent": "never", "replicas": 1},
    "extender": {"replicas": 1},
    "mps": {"enabled": True, "extraArgs": ["--probe-timeout=20s"]},
}
WITHOUT_MPS: Json = {
    "mps": {"enabled": False, "extraArgs": []},
    "scheduler": {"mode": "own", "replicas": 1, "image": partsimage.SCHEDULER},
}
# On nodes, the parts and what the chart names them.
PARTS = ("deployment/cardwise-webhook", "deployment/cardwise-extender", "daemonset/cardwise-deviceplugin")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With MPS, by an installation of today's chart."""
    yield from started(SpecOf(nodes=1, chart=True, values=VALUES))


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Space:
    return Space(cluster, "team")


def mps_of_cards(cluster: Cluster) -> dict[str, dict[str, Any] | None]:
    """`status.mps` of each card, by UUID."""
    resources = cluster.api.get(paths.extendedresources())["items"]
    return {resource["spec"]["uuid"]: (resource.get("status") or {}).get("mps") for resource in resources}


def test_without_mps_the_cards_that_an_installation_with_it_left_open_take_pods(cluster: Cluster, space: Space) -> None:
    def ready() -> bool:
        statuses = mps_of_cards(cluster).values()
        return bool(statuses) and all(status is not None and status["state"] == "Ready" for status in statuses)

    space.wait(ready, "the cards are ready")
    space.create(workload("held", gpu_mem=8138, command=IDLE))
    space.running("held")
    ((share,),) = assigned(space.get("held")).containers.values()
    cluster.chart.helm("uninstall", "cardwise", *WAITS)
    assert mps_of_cards(cluster) == {}
    archive = cluster.state_dir / "images" / "scheduler.tar"
    partsimage.write_scheduler(archive, cluster.bin_dir)
    cluster.node("n1").load_image(archive)
    cluster.chart.upgrade(WITHOUT_MPS, "--install")

    def as_left() -> bool:
        """The card of the pod is closed still, and its daemon serves the pod; the other is open."""
        statuses = mps_of_cards(cluster)
        closed = statuses.pop(share.uuid, None) or {}
        return closed.get("reason") == mps.CLOSED_BY_FORMER_MANAGER and list(statuses.values()) == [None]

    space.wait(as_left, "the cards are as the earlier installation left them")
    space.create(workload("prefers", gpu_mem=8000, command=IDLE, annotations={names.ISOLATION: "advisory"}))
    space.running("prefers")
    ((other,),) = assigned(space.get("prefers")).containers.values()
    assert other.uuid != share.uuid
    output = commands.cardwise(cluster, "doctor", "--no-probe").stdout
    assert "without MPS, Down: the GPU is closed to programs without MPS" in output
    space.delete("held", "prefers", grace=1)
    space.wait_for_deletion("held", "prefers")


def test_what_is_rendered_without_hooks_is_applied_and_applied_again_with_another_image(
    cluster: Cluster, space: Space
) -> None:
    """As docs/install.md says; kubectl would run the hooks of an uninstallation at once."""
    cluster.chart.helm("uninstall", "cardwise", *WAITS)
    cluster.node("n1").tag_image(f"{partsimage.NAME}:{partsimage.TAG}", f"{partsimage.NAME}:second")
    flags = [
        f"--values={cluster.state_dir / 'values.yaml'}",
        f"--kube-version={versions.version()}",
        "--no-hooks",
        "--set=namespace.create=true",
    ]
    certificates = set()
    for tag in (partsimage.TAG, "second"):
        file = cluster.state_dir / "rendered.yaml"
        file.write_text(cluster.chart.helm("template", "cardwise", str(CHART), *flags, f"--set=image.tag={tag}"))
        cluster.kubectl("apply", "--server-side", "-f", str(file))
        for part in PARTS:
            cluster.kubectl("rollout", "status", part, "-n", SYSTEM, f"--timeout={processes.PATIENCE:.0f}s")
        query = {"labelSelector": "app.kubernetes.io/component=deviceplugin"}
        (plugin,) = cluster.api.get(paths.pods(SYSTEM), query)["items"]
        assert plugin["spec"]["containers"][0]["image"] == f"{partsimage.NAME}:{tag}"
        assert cluster.api.get(f"/apis/batch/v1/namespaces/{SYSTEM}/jobs")["items"] == [], "no hook has run"
        certificates.add(cluster.api.get(paths.secrets(SYSTEM, "cardwise-extender-tls"))["metadata"]["uid"])
        space.wait(lambda: mps_of_cards(cluster), "the cards are known")
        space.create(workload(f"applied-{tag}", gpu_mem=100, command=IDLE))
        space.running(f"applied-{tag}")
    assert len(certificates) == 1, "nothing of an uninstallation has run"
