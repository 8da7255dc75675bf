"""Tenants in containers of one real card: MPS and the audit through namespaces, with what a container is given."""

import shutil
from dataclasses import replace

import pytest

from cardwise.core.api import mps
from cardwise.kube import paths
from mps.audit.audit import AuditSettings
from mps.host.cgroups import CgroupMembership
from mps.host.processes import LocalHost
from tests.realcard.machine import eventually
from tests.realcard.test_mps import NOBODY, OUT_OF_MEMORY, TERMINATED

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")


@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_container_computes_within_its_limit_with_a_dev_shm_of_its_own(machine, measured, user):
    machine.share("pod", 4000)
    working = machine.container("work", 8, 1.0, mib=2048, percent=50, user=user)
    assert working.heard() == {"ready": True}
    working.send_line()
    done = working.heard()
    assert done["error"] == 0
    assert done["rounds"] > 0
    answer = machine.container("fill", mib=2048, user=user).heard()
    assert answer["error"] == OUT_OF_MEMORY
    assert answer["allocated"] <= 2048
    measured(f"a container of user {user} with a limit of 2048 MiB", f"{answer['allocated']} MiB allocated")


def test_driver_and_daemon_know_a_containers_processes_by_the_machines_pids(machine, monkeypatch):
    """The audit and the ending of pods find a process' pod by its PID."""
    machine.share("ending", 2048)
    ending, staying = machine.container("busy", 1, mib=1024), machine.container("busy", 1, mib=1024)
    for tenant in (ending, staying):
        assert tenant.heard() == {"ready": True}
    listed = {process.pid for process in machine.gpus.processes(machine.card.uuid)}
    assert {ending.pid, staying.pid} <= listed
    (daemon,) = machine.manager.daemons()
    assert {client.pid for client in daemon.clients()} == {ending.pid, staying.pid}
    belongs(monkeypatch, {ending.pid: "uid-ending"})
    assert machine.manager.detach(machine.manager.pods.list_pods()) == 1
    assert ending.heard(30.0)["error"] == TERMINATED
    staying.finish()
    answer = staying.heard(30.0)
    assert answer["error"] == 0
    assert answer["rounds"] > 0
    assert (machine.home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET).exists()


def belongs(monkeypatch, pods: dict[int, str]) -> None:
    """As if these processes were in cgroups of pods."""
    theirs = LocalHost.memberships

    def memberships(self, pid):
        return (CgroupMembership(pods[pid], "c"),) if pid in pods else theirs(self, pid)

    monkeypatch.setattr(LocalHost, "memberships", memberships)


def test_the_audit_names_the_pod_over_its_share_and_no_other(machine, measured, monkeypatch):
    """Without MPS a process' context comes on top of its share, and is no offence."""
    for name in ("full", "greedy"):
        machine.bind(name, 2048)
    machine.start(audit=replace(AuditSettings(), interval=0.5))
    full, greedy = machine.tenant("hold", 2048, through=False), machine.tenant("hold", 4096, through=False)
    for tenant in (full, greedy):
        assert tenant.heard()["error"] == 0
    belongs(monkeypatch, {full.pid: "uid-full", greedy.pid: "uid-greedy"})
    listed = {process.pid: process.memory for process in machine.gpus.processes(machine.card.uuid)}
    measured("NVML on a process that holds its share of 2048 MiB without MPS", f"{listed[full.pid]} MiB")
    # One look tells of all pods, in the order of their UIDs: `full` would have come first.
    events = eventually(lambda: machine.api.all(paths.events("default")), "nobody is told of")
    assert [(event["reason"], event["involvedObject"]["name"]) for event in events] == [("MemoryOverrun", "greedy")]
