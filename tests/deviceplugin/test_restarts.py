"""Restarts of containers, of the kubelet and of the agent itself."""

import grpc

from tests.deviceplugin.conftest import (
    eventually,
    refusal,
)


def test_a_restart_of_a_container_needs_no_api_server(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    rig.stop()
    rig.api.stop_answering()
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.start()
    assert rig.spec(slot), "the slot's spec is made anew at the start"
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.kubelet.pre_start(slot)
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"
    code, why = refusal(lambda: rig.run(rig.bind("b", [(0, 100)])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the API server does not answer" in why


def test_the_kubelet_restarts(rig):
    slot = rig.run(rig.bind("a", [(1, 8138)]))
    rig.kubelet.restart()
    rig.kubelet.wait_registered(2)
    first, second = rig.kubelet.registered
    assert first.endpoint != second.endpoint
    rig.kubelet.pre_start(slot)
    assert [path.name for path in rig.kubelet.plugins.glob("cardwise-*.sock")] == [second.endpoint]


def test_a_lost_stream_is_registered_again(rig):
    rig.kubelet.disconnect()
    rig.kubelet.wait_registered(2, timeout=15)


def test_the_agent_leaves_no_socket_and_removes_those_of_a_killed_one(rig):
    stale = rig.kubelet.plugins / "cardwise-share-1-1-1.sock"
    stale.touch()
    rig.stop()
    assert [path.name for path in rig.kubelet.plugins.glob("cardwise-*.sock")] == [stale.name]
    rig.start()
    assert not stale.exists()


def test_a_running_container_without_a_grant_is_adopted(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    uid = pod["metadata"]["uid"]
    rig.stop()
    (rig.folder / "state" / "grants" / uid / "main.json").write_text("{")
    rig.start()
    assert any(uid in problem for problem in rig.agent.grants.unreadable)
    eventually(lambda: rig.held_on_disk(1) == 8138)
    assert rig.agent.grants.owner(slot).pod_uid == uid
