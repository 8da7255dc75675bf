"""Restarts of the agent, and of containers while the API server is away."""

import grpc

from deviceplugin.grants.access import Access
from tests.deviceplugin.conftest import refusal


def test_a_restart_of_a_container_needs_no_api_server(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    rig.stop()
    rig.api.down = True
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.start()
    assert rig.spec(slot), "the slot's spec is made anew at the start"
    (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()
    rig.kubelet.pre_start(slot)
    assert rig.edits(slot)["deviceNodes"][0]["path"] == "/dev/nvidia1"
    code, why = refusal(lambda: rig.run(rig.bind("b", [(0, 100)])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the API server does not answer" in why


def test_a_running_container_without_a_grant_is_adopted(rig):
    pod = rig.bind("a", [(1, 8138)])
    slot = rig.run(pod)
    uid = pod["metadata"]["uid"]
    rig.stop()
    (rig.folder / "state" / "grants" / uid / "main.json").write_text("{")
    rig.start()
    assert any(uid in problem for problem in rig.agent.grants.unreadable)
    assert rig.held_on_disk(1) == 8138
    assert rig.agent.grants.owner(slot).pod_uid == uid


def test_running_containers_are_compared_with_the_grants_once_the_runtime_answers(rig):
    pod = rig.bind("a", [(1, 8138)])
    rig.run(pod)
    rig.stop()
    (rig.folder / "state" / "grants" / pod["metadata"]["uid"] / "main.json").unlink()
    rig.runtime.silent = True
    rig.access = Access.CDI  # nobody is asked for it
    rig.start()
    assert not rig.agent.grants.all()
    rig.runtime.silent = False
    rig.settle()
    assert rig.held_on_disk(1) == 8138
