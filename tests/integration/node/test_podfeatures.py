"""What a pod can have beside its containers, and what its share makes of that, on real nodes."""

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import container
from tests.cluster.node import has_pod_cgroups
from tests.integration.sharing import Space, inspect, workload
from tests.integration.since import since

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node]

MERGE = "strategic"


def card(space: Space, name: str) -> str:
    return space.inside(name, "ls /dev/nvidia*; echo $CARDWISE_MEM_LIMIT_MIB")


@since(35, "restart rules")
def test_a_container_that_is_restarted_by_a_rule_has_its_share_again(space: Space) -> None:
    """And one that is not keeps it until its pod is over."""
    again = {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}
    once = container("main", gpu_mem=1024) | {"restartPolicy": "Never", "restartPolicyRules": [again]}
    once["command"] = ["sh", "-c", "[ -e /d/x ] || { touch /d/x; exit 42; }; sleep 1000"]
    once["volumeMounts"] = [{"name": "d", "mountPath": "/d"}]
    ends = container("ends", gpu_mem=2048) | {"restartPolicy": "Never", "command": ["sh", "-c", "exit 3"]}
    space.create(workload("ruled", [once, ends], node="n1", spec={"volumes": [{"name": "d", "emptyDir": {}}]}))

    def statuses() -> dict[str, Json]:
        return {status["name"]: status for status in space.get("ruled")["status"].get("containerStatuses") or ()}

    space.wait(lambda: (main := statuses().get("main")) and main["restartCount"] == 1 and main["ready"], "restarted")
    space.wait(lambda: "terminated" in statuses()["ends"]["state"], "the other has ended for good")
    assert card(space, "ruled").split()[-1] == "1024"
    assert statuses()["ends"]["restartCount"] == 0
    shown = inspect(space.cluster)
    assert sum(pods.get(f"{space.name}/ruled", 0) for _, _, pods in shown.values()) == 1024 + 2048


@since(36, "a rule that restarts all containers")
def test_a_pod_that_is_restarted_in_place_has_its_shares_again(space: Space) -> None:
    rule = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}
    main = container("main", gpu_mem=1024)
    trouble = container("trouble", gpu_mem=2048) | {"restartPolicy": "Never", "restartPolicyRules": [rule]}
    trouble["command"] = ["sh", "-c", "[ -e /d/x ] || { touch /d/x; exit 42; }; sleep 1000"]
    trouble["volumeMounts"] = [{"name": "d", "mountPath": "/d"}]
    space.create(workload("whole", [main, trouble], node="n1", spec={"volumes": [{"name": "d", "emptyDir": {}}]}))

    def again() -> bool:
        entries = space.get("whole")["status"].get("containerStatuses") or []
        return len(entries) == 2 and all(status["restartCount"] == 1 and status["ready"] for status in entries)

    space.wait(again, "both run again")
    assert card(space, "whole").split()[-1] == "1024"
    assert space.inside("whole", "echo $CARDWISE_MEM_LIMIT_MIB", main="trouble").split() == ["2048"]


@since(34, "resources of the pod")
def test_a_pod_with_resources_of_its_own_has_its_share(space: Space) -> None:
    whole = {"resources": {"requests": {"cpu": "20m", "memory": "16Mi"}}}
    space.create(workload("whole", gpu_mem=4096, node="n1", spec=whole))
    space.running("whole")
    assert card(space, "whole").split()[-1] == "4096"
    with pytest.raises(errors.KubeError, match=names.GPU_MEM):
        space.create(workload("wrong", spec={"resources": {"limits": {names.GPU_MEM: "4096"}}}))


@pytest.mark.skipif(not has_pod_cgroups(), reason="our nodes have no cgroups of pods here")
@since(33, "resize in place")
def test_a_container_that_is_resized_in_place_keeps_its_share(space: Space) -> None:
    space.create(workload("resized", [asking("20m", "16Mi")], node="n1"))
    space.running("resized")
    path = paths.pods(space.name, "resized", "resize")
    space.cluster.api.patch(path, {"spec": {"containers": [asking("40m", "32Mi")]}}, MERGE)

    def has() -> Json:
        (main,) = space.get("resized")["status"]["containerStatuses"]
        return main | main.get("resources", {}).get("requests", {})

    space.wait(lambda: (has()["cpu"], has()["memory"]) == ("40m", "32Mi"), "the kubelet has resized it")
    assert has()["restartCount"] == 0
    assert card(space, "resized").split()[-1] == "4096"


def asking(cpu: str, memory: str) -> Json:
    main = container("main", gpu_mem=4096)
    main["resources"]["requests"] = {"cpu": cpu, "memory": memory}
    return main


def test_a_container_for_debugging_sees_no_card(space: Space) -> None:
    space.create(workload("debugged", gpu_mem=4096, node="n1"))
    space.running("debugged")
    added = {"name": "look", "image": space.get("debugged")["spec"]["containers"][0]["image"]}
    added |= {"command": ["sh", "-c", "sleep 1000"], "targetContainerName": "main"}
    path = paths.pods(space.name, "debugged", "ephemeralcontainers")
    space.cluster.api.patch(path, {"spec": {"ephemeralContainers": [added]}}, MERGE)

    def runs() -> bool:
        entries = space.get("debugged")["status"].get("ephemeralContainerStatuses") or [{}]
        return "running" in entries[0].get("state", {})

    space.wait(runs, "it runs")
    assert "nvidia" not in space.inside("debugged", "ls /dev; env", main="look")
    assert card(space, "debugged").split()[-1] == "4096"
