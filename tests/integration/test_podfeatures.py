"""What a pod can have beside its containers, and what its share makes of that, on real nodes."""

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from tests.cluster import versions
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node, pytest.mark.timeout(180)]

MERGE = "strategic"


def since(minor: int, what: str) -> pytest.MarkDecorator:
    here = int(versions.minor().split(".")[1])
    return pytest.mark.skipif(here < minor, reason=f"{what}: on without a feature gate since 1.{minor}")


def card(space: Space, name: str) -> str:
    return space.inside(name, "ls /dev/nvidia*; echo $CARDWISE_MEM_LIMIT_MIB")


@since(34, "resources of the pod")
def test_a_pod_with_resources_of_its_own_has_its_share(space: Space) -> None:
    whole = {"resources": {"requests": {"cpu": "20m", "memory": "16Mi"}}}
    space.create(workload("whole", gpu_mem=4096, node="n1", spec=whole))
    space.running("whole")
    assert card(space, "whole").split()[-1] == "4096"
    with pytest.raises(errors.KubeError, match=names.GPU_MEM):
        space.create(workload("wrong", spec={"resources": {"limits": {names.GPU_MEM: "4096"}}}))


def test_a_container_for_debugging_sees_no_card(space: Space) -> None:
    space.create(workload("debugged", gpu_mem=4096, node="n1"))
    space.running("debugged")
    added = {"name": "look", "image": space.get("debugged")["spec"]["containers"][0]["image"]}
    added |= {"command": ["sh", "-c", "sleep 1000"], "targetContainerName": "main"}
    path = paths.pods(space.name, "debugged", "ephemeralcontainers")
    space.cluster.api.patch(path, {"spec": {"ephemeralContainers": [added]}}, MERGE)

    def runs() -> bool:
        found = space.get("debugged")["status"].get("ephemeralContainerStatuses") or [{}]
        return "running" in found[0].get("state", {})

    space.wait(runs, "it runs")
    assert "nvidia" not in space.inside("debugged", "ls /dev; env", main="look")
    assert card(space, "debugged").split()[-1] == "4096"
