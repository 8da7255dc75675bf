"""A node that gpushare's device plugin has served: its cards are not shared while the kubelet still counts on that."""

import json
from pathlib import Path

from cardwise.core.api import names
from deviceplugin.publish.handover import GpushareHandover, parse_checkpoint, sharing_problem
from tests.deviceplugin.conftest import NODE, PODS, PODS_HERE, Rig


def checkpoint(devices: list[str] | None, *holders: str, extended_resource: str = names.GPU_MEM) -> bytes:
    """As the kubelet writes it. `devices`: what the plugin offers, None where the kubelet knows no such plugin."""
    entries = [
        {"PodUID": uid, "ContainerName": "main", "ResourceName": extended_resource, "DeviceIDs": {"-1": ["GPU-x-_-1"]}}
        for uid in holders
    ]
    registered = {names.SHARE: ["0"]} | ({} if devices is None else {extended_resource: devices})
    return json.dumps({"Data": {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}}).encode()


def test_each_stage_of_its_leaving_is_told_until_nothing_is_left():
    stages = [
        (checkpoint(["GPU-x-_-0", "GPU-x-_-1"], "uid-a"), "another device plugin offers aliyun.com/gpu-mem"),
        (checkpoint([], "uid-a", "uid-b"), "pods with a share from gpushare's device plugin run on this node (1)"),
        (checkpoint(None, "uid-a"), "wait until they have ended"),
        (checkpoint([], "uid-b"), "five minutes after that plugin's end"),
        (checkpoint(None, "uid-b"), None),
        (checkpoint(None), None),
        (checkpoint(["GPU-x"], "uid-a", extended_resource="nvidia.com/gpu"), None),
        (b"no checkpoint", None),
    ]
    for content, expected in stages:
        problem = sharing_problem(parse_checkpoint(content), frozenset({"uid-a", "uid-c"}))
        assert expected in problem if expected else problem is None, content


def test_a_kubelet_that_was_made_to_forget_must_know_our_plugin_first(tmp_path: Path):
    path = tmp_path / "device-plugins" / "kubelet_internal_checkpoint"
    handover = GpushareHandover(tmp_path)
    assert handover.sharing_problem([]) is None, "a node that was never gpushare's"
    path.parent.mkdir()
    path.write_bytes(checkpoint([], "uid-a"))
    assert "wait until they have ended" in handover.sharing_problem(["uid-a"])
    path.unlink()
    assert "has restarted" in handover.sharing_problem(["uid-a"])
    path.write_bytes(checkpoint(None).replace(names.SHARE.encode(), b"example.com/other"))
    assert "has restarted" in handover.sharing_problem(["uid-a"])
    path.write_bytes(checkpoint(None))
    assert handover.sharing_problem(["uid-a"]) is None
    path.unlink()
    assert handover.sharing_problem(["uid-a"]) is None


def test_the_cards_are_sick_until_the_last_of_its_pods_has_ended(idle_rig: Rig):
    rig = idle_rig
    limits = {"limits": {names.GPU_MEM: "8000"}}
    rig.api.write_object(
        PODS,
        {
            "metadata": {"name": "former", "namespace": "default", "uid": "uid-former"},
            "spec": {"nodeName": NODE, "containers": [{"name": "main", "resources": limits}]},
            "status": {"phase": "Running"},
        },
    )
    rig.start()
    (rig.kubelet.plugins / "kubelet_internal_checkpoint").write_bytes(checkpoint(None, "uid-former"))
    rig.settle()
    assert rig.status(0)["health"] == "Unhealthy"
    assert "run on this node (1): wait until they have ended" in rig.status(0)["reason"]
    rig.api.remove(f"{PODS_HERE}/former")
    rig.settle()
    assert rig.status(0)["health"] == "Healthy"
