"""Where MPS cannot run: what is published, which containers start, and how a card gets its MPS back."""

import contextlib
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from cardwise.core.api import mps, names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus import mpsfiles
from deviceplugin.grants.grants import Grant
from deviceplugin.grants.mpswait import HasManager, MpsNotReady, MpsWait
from mps.daemon import machine
from mps.host.cgroups import CgroupMembership
from mps.host.processes import CONTROL_PROGRAM
from tests.mps.mpsnode import CID, DOUBLE, P100, uuid_of

LOOK = 61.0  # seconds after which the manager has looked again
LATE = 40  # steps by which the watch of the pods may be late: more than the manager waits before it checks
UNAVAILABLE = MpsState.UNAVAILABLE


@pytest.fixture
def program(folder) -> Path:
    """Where the control program is missing."""
    return folder / "bin" / CONTROL_PROGRAM


def install(program: Path) -> None:
    program.parent.mkdir()
    program.symlink_to(DOUBLE)


def until_state(node, state: MpsState, index: int = 0) -> None:
    node.until(lambda: node.status(index).state is state, f"card {index} is not {state}")


class Container:
    """One of a bound pod, whose start the kubelet tries again and again."""

    def __init__(self, node, demand: Isolation, index: int = 0) -> None:
        share = CardShare(index, uuid_of(index), MiB(4096), 0, MiB(P100))
        grant = Grant.for_pod("uid-pod", "default", "pod", "0", Assignment({"0": (share,)}))
        self._grant = structs.replace(grant, shares=(share,), isolation=str(demand))
        state_dir = node.root.parent / "state"
        state_dir.mkdir(exist_ok=True)
        self._kernel_obstacles = {share.uuid: "the driver is too old"}
        self._wait = MpsWait(HasManager.SEEN, node.root, state_dir, node.clock, node.clock)
        self._prepared: Grant | None = None
        self.with_mps: bool | None = None  # None: it has not started
        self.problem = ""

    def prepare(self) -> None:
        """As PreStartContainer begins; it has no time to wait."""
        try:
            self._prepared = self._wait.wait_ready(
                self._grant, self._kernel_obstacles, lambda: contextlib.nullcontext(lambda: False), lambda: True
            )
        except MpsNotReady as error:
            self._prepared, self.problem = None, str(error)

    def start(self) -> None:
        """As PreStartContainer ends."""
        if self._prepared is None:
            return
        try:
            self._wait.confirm_ready(self._prepared, self._kernel_obstacles)
        except MpsNotReady as error:
            self._prepared, self.problem = None, str(error)
        else:
            self.with_mps = bool(self._prepared.mps)


@pytest.mark.parametrize("pause", [0, 2])
@pytest.mark.parametrize("demand", [Isolation.ADVISORY, Isolation.NONE])
@pytest.mark.parametrize("steps", range(0, 34, 3))
def test_a_pod_that_is_bound_while_mps_comes_back_never_runs_past_it_and_always_runs(
    node, program, demand, steps, pause
):
    """Whenever it is bound and started, and however late the manager's watch is."""
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    install(program)
    node.clock.advance(LOOK)
    node.pods.late = True
    for _ in range(steps):
        node.step_all()
    node.bind("pod", 0, 4096, without_mps=demand is Isolation.NONE)
    container, step_count = Container(node, demand), 0
    while container.with_mps is None:
        container.prepare()
        for _ in range(pause):
            node.step_all()
            step_count += 1
        container.start()
        node.step_all()
        step_count += 1
        node.pods.late = step_count < LATE
        assert step_count < 400, container.problem
    for _ in range(60):
        node.step_all()
        step_count += 1
        node.pods.late = step_count < LATE
        if not container.with_mps:
            assert node.mode() == "Default", "it cannot use the card"
            assert node.status().state in (MpsState.UNAVAILABLE, MpsState.STARTING, MpsState.OFF)
    if not container.with_mps:
        node.until(lambda: node.status().state in (UNAVAILABLE, MpsState.OFF), "it has a state in which it may run")


def test_without_the_control_program_the_card_is_open_and_its_reason_is_published(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    published = node.published_status()
    assert (published["state"], published["mode"]) == ("Unavailable", "card")
    assert "nvidia-cuda-mps-control is not installed or cannot be run" in published["reason"]
    assert "install the package nvidia-compute-utils or nvidia-cuda-mps" in published["reason"]
    assert node.mode() == "Default"
    assert not node.manager.problems(), "the manager is ready: there is nothing more that it could do"
    (message,) = node.events.messages(names.MPS_UNAVAILABLE)
    assert message.startswith(f"pods share GPU {uuid_of(0)} without MPS, so their limits are advisory: ")
    node.pass_time(300.0)
    assert len(node.events.messages(names.MPS_UNAVAILABLE)) == 1, "once"
    assert not node.host.processes, "nothing was started"


def test_pods_that_demand_nothing_start_and_one_that_requires_mps_waits_with_the_reason(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    for demand in (Isolation.NONE, Isolation.ADVISORY):
        container = Container(node, demand)
        container.prepare()
        container.start()
        assert container.with_mps is False
    required = Container(node, Isolation.MPS)
    required.prepare()
    assert "is Unavailable, not Ready: nvidia-cuda-mps-control is not installed" in required.problem


def test_the_card_stays_open_without_the_manager_and_while_it_hangs(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    node.stop()
    assert not mpsfiles.is_manager_running(node.root)
    node.clock.advance(3600.0)
    container = Container(node, Isolation.ADVISORY)
    container.prepare()
    container.start()
    assert container.with_mps is False
    assert not mpsfiles.is_state_stale(node.root, uuid_of(0), clock=node.clock)


def test_a_program_that_is_installed_is_found_within_a_minute_and_the_cards_come_up(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    install(program)
    node.pass_time(LOOK)
    node.wait_ready()
    assert node.mode() == "ExclusiveProcess"
    assert not (node.home() / mps.UNAVAILABLE_FILE).exists()


def test_mps_waits_for_the_end_of_the_pods_that_run_without_it_also_after_a_restart(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    node.bind("pod", 0, 4096)
    install(program)
    node.pass_time(LOOK)
    assert node.status().state is UNAVAILABLE
    assert "starts when the pods that started there without MPS have ended" in node.published_status()["reason"]
    node.crash()
    node.start()
    node.pass_time(LOOK)
    assert (node.status().state, node.mode()) == (UNAVAILABLE, "Default")
    assert not node.manager.problems()
    node.end("pod")
    node.wait_ready()


def test_pods_that_overlap_keep_mps_away_and_the_reason_says_how_an_admin_ends_that(node, program):
    """Each of them starts without MPS, since one of before is still there."""
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    node.bind("pod0", 0, 4096)
    install(program)
    node.pass_time(LOOK)
    for i in range(3):
        node.bind(f"pod{i + 1}", 0, 4096)
        node.end(f"pod{i}")
        node.pass_time(LOOK)
        published = node.published_status()
        assert published["state"] == "Unavailable"
        assert f"if there is always one, run cardwise cordon {uuid_of(0)} until MPS is Ready" in published["reason"]
    node.end("pod3")  # no pod follows on a cordoned GPU
    node.wait_ready()


def test_a_manager_that_ends_between_the_check_and_the_start_leaves_the_check_to_the_next(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    install(program)
    node.clock.advance(LOOK)
    until_state(node, MpsState.STARTING)
    node.bind("pod", 0, 4096)
    node.crash()
    node.start()
    until_state(node, UNAVAILABLE)
    node.pass_time(LOOK)
    assert (node.status().state, node.mode()) == (UNAVAILABLE, "Default")


def test_while_the_api_server_does_not_answer_the_card_stays_as_it_is(node, program):
    node.start(control=program)
    until_state(node, UNAVAILABLE)
    install(program)
    node.api.down = True
    node.pass_time(LOOK + 3 * machine.SETTLE_SECONDS)
    assert node.mode() == "Default"
    assert "it is unknown which pods run without it" in node.until(
        lambda: node.status().state is UNAVAILABLE and node.status().reason
    )
    node.api.down = False
    node.wait_ready()


def test_an_old_driver_cannot(node):
    node.start(driver="470.256.02")
    until_state(node, UNAVAILABLE)
    assert (
        node.status().reason == "MPS needs driver 535 or newer, and this node has 470.256.02: upgrade NVIDIA's driver"
    )


def test_a_card_in_mig_mode_is_unavailable_and_the_others_are_served(pair):
    pair.cards[0]["mig"] = True
    pair.write_cards()
    pair.start()
    pair.wait_ready(1)
    until_state(pair, UNAVAILABLE)
    assert "disable MIG" in pair.published_status(0)["reason"]


def test_a_card_in_mig_mode_beside_the_daemon_of_the_node(make_node):
    node = make_node(scope=DaemonScope.NODE)
    node.cards[0]["mig"] = True
    node.write_cards()
    node.start()
    node.wait_ready(1)
    assert node.published_status(0)["state"] == "Unavailable"
    assert mpsfiles.read_state(node.home()).uuids == (uuid_of(1),)


@pytest.mark.parametrize(
    ("environment", "served"),
    [
        ({}, [0, 1]),
        ({"CUDA_VISIBLE_DEVICES": uuid_of(0)}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [0, 1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-another"}, []),
    ],
)
def test_a_hosts_daemon_keeps_its_cards(pair, environment, served):
    """Indices without PCI_BUS_ID may mean any card."""
    daemon = pair.host.add(CONTROL_PROGRAM, {mps.PIPE_ENV: "/tmp/nvidia-mps"} | environment)
    pair.start()
    for index in (0, 1):
        until_state(pair, UNAVAILABLE if index in served else MpsState.READY, index)
        assert pair.mode(index) == ("Default" if index in served else "ExclusiveProcess")
    for index in served:
        reason = pair.published_status(index)["reason"]
        assert f"(process {daemon.pid}, folder /tmp/nvidia-mps): end it" in reason
    daemon.kill()
    for index in served:
        pair.wait_ready(index)


@pytest.mark.parametrize("name", [mps.folder_name(uuid_of(0)), mps.NODE_FOLDER], ids=["card", "node"])
def test_a_daemon_of_another_root_is_cardwises(node, name):
    """As after an upgrade that changes nodes.mpsRoot while pods keep their daemons."""
    home = f"/run/former/{name}"
    environment = {mps.PIPE_ENV: f"{home}/pipe", mps.LOG_ENV: f"{home}/log", "CUDA_VISIBLE_DEVICES": uuid_of(0)}
    daemon = node.host.add(CONTROL_PROGRAM, environment)
    node.start()
    until_state(node, UNAVAILABLE)
    reason = node.published_status(0)["reason"]
    assert f"of another MPS manager of Cardwise, with --mps-root /run/former, serves the GPU (process {daemon.pid}" in (
        reason
    )
    assert f"which is {node.root}, to /run/former again, or end the daemon" in reason
    assert "not Cardwise's" not in reason
    daemon.kill()
    node.wait_ready()


def test_a_daemon_with_other_folders_is_not_cardwises(node):
    environment = {mps.PIPE_ENV: "/mps/nvidia.com/gpu/pipe", mps.LOG_ENV: "/mps/nvidia.com/gpu/log"}
    node.host.add(CONTROL_PROGRAM, environment)
    node.start()
    until_state(node, UNAVAILABLE)
    assert "an MPS daemon that is not Cardwise's serves the GPU" in node.published_status(0)["reason"]


def test_a_tenants_process_of_that_name_keeps_nobody_from_mps(node):
    node.host.add(CONTROL_PROGRAM, {mps.PIPE_ENV: "/tmp/nvidia-mps"}, CgroupMembership("uid-tenant", "c" * 64))
    node.start()
    node.wait_ready()


def test_nvidias_device_plugin_keeps_its_node_and_a_divided_node_is_served(node):
    node.own_node.offered = 1
    node.start()
    until_state(node, UNAVAILABLE)
    assert "NVIDIA's device plugin serves this node (nvidia.com/gpu: 1): stop it there" in node.status().reason
    assert node.mode() == "Default"
    node.stop()
    node.start(is_split=True)
    node.wait_ready()


def test_a_daemon_with_pods_keeps_its_card_until_they_have_ended(node):
    """As when NVIDIA's device plugin is installed on a node of ours."""
    node.bind("pod", 0, 4096)
    node.start()
    node.wait_ready(memory_limit=MiB(4096))
    daemon = node.daemon()
    node.own_node.offered = 1
    node.pass_time(120.0)
    assert daemon.is_alive()
    assert not node.problem(memory_limit=MiB(4096))
    node.end("pod")
    until_state(node, UNAVAILABLE)
    assert (daemon.is_alive(), node.mode()) == (False, "Default")


def test_a_daemon_that_dies_where_mps_has_become_impossible_leaves_an_open_card(node):
    node.bind("pod", 0, 4096)
    node.start()
    node.wait_ready(memory_limit=MiB(4096))
    node.own_node.offered = 1
    node.daemon().kill()
    until_state(node, UNAVAILABLE)
    assert node.mode() == "Default"


def test_before_the_node_is_known_nothing_is_closed_but_what_a_manager_served_before(node):
    node.own_node.synced = node.pods.synced = False
    node.start()
    for known in (node.own_node, node.pods):
        node.pass_time(60.0)
        assert node.mode() == "Default"
        assert "does not serve" in node.problem()
        assert any("not known yet" in problem for problem in node.manager.problems())
        known.synced = True
    node.wait_ready()
    node.crash()
    node.daemon().kill()
    node.own_node.synced = False
    node.start()
    node.wait_ready()


@pytest.mark.parametrize("state", ["runs", "all without MPS", "not started since the reboot"])
def test_a_manager_that_comes_to_a_node_with_pods_lets_them_end_without_mps(node, state):
    """They may open the card at any time later."""
    node.bind("pod", 0, 4096, without_mps=state == "all without MPS")
    if state != "not started since the reboot":
        node.host.add("python", {}, CgroupMembership("uid-pod", CID))
    node.start()
    if state == "runs":
        node.pass_time(120.0)
        assert (node.status().state, node.mode()) == (UNAVAILABLE, "Default")
        node.end("pod")
        node.wait_ready()
    elif state == "all without MPS":
        until_state(node, MpsState.OFF)
    else:
        node.wait_ready()


def test_a_folder_that_is_removed_does_not_make_pods_with_mps_count_as_pods_without(node):
    """The manager that loses its folder ends its daemon; the server goes on, for the pods that it serves."""
    node.bind("pod", 0, 4096)
    node.start()
    node.wait_ready()
    node.host.add("python", {}, CgroupMembership("uid-pod", CID))
    node.crash()
    node.daemon().kill()
    assert node.servers()
    shutil.rmtree(node.home())
    node.start()
    node.wait_ready()


def test_foreign_processes_keep_a_card_down_as_before(node):
    node.use(0, 100)
    node.start()
    until_state(node, MpsState.DOWN)
    node.pass_time(120.0)
    assert "bypasses MPS" in node.status().reason
    container = Container(node, Isolation.ADVISORY)
    container.prepare()
    assert "is Down, not Ready" in container.problem


def test_a_note_that_cannot_be_written_keeps_everything_from_starting(node, program):
    """Without it the next manager would close the card under its pods."""
    blocked = node.home() / mps.UNAVAILABLE_FILE
    blocked.parent.mkdir(parents=True)
    blocked.symlink_to(node.root / "no" / "such" / "folder")
    node.start(control=program)
    node.pass_time(30.0)
    assert node.status().state is MpsState.DRAINING
    blocked.unlink()
    until_state(node, UNAVAILABLE)
