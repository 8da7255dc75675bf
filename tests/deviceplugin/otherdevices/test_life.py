"""How long devices that are not GPUs are held, over ends and restarts."""

from tests.deviceplugin.conftest import refusal
from tests.deviceplugin.otherdevices.machines import FIRST, FPGA, bind, grants_on_disk


class TestLife:
    def test_a_waiting_claimant_gets_it_when_the_holder_has_just_ended(self, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST)]})
        slot = rig.run(pod, "c0")
        rig.runtime.kill(pod["metadata"]["uid"])
        rig.force_delete(pod)
        rig.run(bind(rig, "b", {"0": [("rdma", FIRST)]}), "c0")
        assert rig.spec(slot) is None

    def test_a_force_deleted_pod_holds_it_until_its_container_ends(self, machine, rig):
        machine.healthy(FIRST)
        pod = bind(rig, "a", {"0": [("rdma", FIRST)]}, {"0": (0, 100)})
        rig.run(pod, "c0")
        rig.force_delete(pod)
        rig.settle()
        holder = {"podUID": pod["metadata"]["uid"], "namespace": "default", "name": "a", "container": "0"}
        assert machine.status(FIRST).get("reported") == [holder | {"memoryMiB": 0, "corePercent": 0, "whole": True}]
        assert rig.status(0).get("reported") == [holder | {"memoryMiB": 100, "corePercent": 0}]
        rig.runtime.kill(pod["metadata"]["uid"])
        rig.settle()
        assert machine.status(FIRST).get("reported") == []

    def test_it_is_sick_while_grants_cannot_be_written(self, machine, rig):
        (rig.folder / "state" / ".grants.probe").symlink_to("/dev/full")
        assert "No space left" in machine.healthy(FIRST, is_healthy=False)["reason"]

    def test_a_restart_makes_the_same_spec_from_the_disk(self, machine, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST), ("fpga", FPGA)]}, {"0": (1, 100)})
        slot = rig.run(pod, "c0")
        before = rig.spec(slot)
        rig.stop()
        (rig.folder / "cdi" / f"cardwise.dev-share-{slot}.json").unlink()  # as of a reboot
        rig.api.down = True
        machine.start()
        assert rig.spec(slot) == before
        rig.kubelet.pre_start(slot)  # a restart of the container while the API server is away
        assert rig.spec(slot) == before
        rig.api.down = False
        message = refusal(lambda: rig.run(bind(rig, "b", {"0": [("fpga", FPGA)]}), "c0"))[1]
        assert "still held by default/a" in message

    def test_a_lost_disk_is_made_anew_for_what_runs(self, machine, rig):
        pod = bind(rig, "a", {"0": [("rdma", FIRST)]})
        slot = rig.run(pod, "c0")
        before = rig.spec(slot)
        rig.stop()
        for path in (rig.folder / "state" / "grants").glob("*/*.json"):
            path.unlink()
        machine.start()
        assert [grant["podDevices"] for grant in grants_on_disk(rig)] == [[{"resourceClass": "rdma", "uuid": FIRST}]]
        assert rig.spec(slot) == before
