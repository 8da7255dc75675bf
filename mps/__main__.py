"""The command `cardwise-mps`."""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import click
import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import selection
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import Gpus, GpusUnavailable
from cardwise.gpus.selection import CardSelection, SelectedGpus
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube.client import KubeClient
from cardwise.kube.errors import KubeConfigError
from cardwise.runtime import interpreter, logs
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthServer
from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    DURATION,
    CommonSettings,
    common_options,
    option,
    simulated_gpus_option,
)
from mps import metrics
from mps.audit.audit import AuditSettings
from mps.daemon import directories, units
from mps.daemon.machine import DaemonPace
from mps.host import cgroups
from mps.host.processes import CONTROL
from mps.manager import Manager, ManagerLock, ManagerSettings, RootLocked
from mps.options import audit_options, pace_options

_log = structlog.get_logger(__name__)

COMPONENT = "cardwise-mps"
_LOCK_POLL_SECONDS = 0.1
_CHECK_SECONDS = 1.0
_WARN_AFTER_SECONDS = 5.0  # in a rolling update the former manager may need this time to release the root


def _parse_cards(_: click.Context, __: click.Parameter, text: str | None) -> CardSelection | None:
    if text is None:
        return None
    try:
        return selection.parse_selection(text)
    except InvalidRequest as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _find_program(_: click.Context, __: click.Parameter, program: str) -> Path:
    path = shutil.which(program)
    if path is None:
        raise click.BadParameter(
            f"{program} is not installed or cannot be run; it belongs to NVIDIA's driver (package nvidia-compute-utils "
            "or nvidia-cuda-mps), and is mounted into a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility. A "
            "node without it cannot use MPS: do not run the manager there"
        )
    return Path(path)


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@option(
    "--node-name",
    "--node",
    envvar=["NODE_NAME", "CARDWISE_NODE_NAME"],
    required=True,
    help="Name of the Node object of this machine.",
)
@simulated_gpus_option
@option(
    "--gpus",
    metavar="GPU,...",
    callback=_parse_cards,
    help="Indices or UUIDs of the GPUs to serve; set the same for the device plugin. Default: all.",
)
@option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(mps.DEFAULT_ROOT),
    envvar="CARDWISE_MPS_ROOT_DIR",
    help="Folder of the node for pipes and state files, shared with the device plugin. Keep it short: MPS opens no "
    f"path of more than {mps.MAX_PIPE_LENGTH} bytes.",
)
@option(
    "--scope",
    type=click.Choice([str(scope) for scope in DaemonScope]),
    default=str(DaemonScope.CARD),
    envvar="CARDWISE_MPS_SCOPE",
    help="card: one daemon per GPU, so that faults and users of one GPU never affect another. node: one daemon for the "
    "node, which containers with shares of several GPUs need. Drain the node before you change it.",
)
@option(
    "--control",
    default=CONTROL,
    callback=_find_program,
    envvar="CARDWISE_MPS_CONTROL",
    help="The program nvidia-cuda-mps-control.",
)
@option(
    "--driver",
    default="",
    envvar="CARDWISE_MPS_DRIVER",
    help="Version of the driver, such as 550.163.01, if the GPUs do not report it (simulated ones).",
    show_default="as the GPUs report",
)
@option(
    "--exclusive/--no-exclusive",
    default=True,
    envvar="CARDWISE_MPS_EXCLUSIVE",
    help="Whether GPUs are in compute mode EXCLUSIVE_PROCESS while they are shared. Without it, a process that unsets "
    "CUDA_MPS_PIPE_DIRECTORY gets the whole GPU.",
)
@option(
    "--stop-daemons",
    type=click.Choice(["idle", "always", "never"]),
    default="idle",
    envvar="CARDWISE_MPS_STOP_DAEMONS",
    help="Which daemons end with the manager. idle: those whose GPUs no pod holds; the next manager takes over the "
    "others, and running pods are not affected. always: all, with their clients (uninstall). never: none.",
)
@option(
    "--daemon-cgroup",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="CARDWISE_MPS_DAEMON_CGROUP",
    help="The node's cgroup file system, such as /host/sys/fs/cgroup: daemons then run in their own cgroup, so that "
    "the container runtime does not end them with the manager's container. Default: the manager's cgroup.",
)
@pace_options
@option(
    "--detach-before",
    type=DURATION,
    default=3.0,
    envvar="CARDWISE_MPS_DETACH_BEFORE",
    help="How long before the end of a pod's grace period its processes are detached from the server, since killing a "
    "busy client may affect others. At most half of the grace period.",
)
@audit_options
def main(
    *,
    common: CommonSettings,
    node_name: str,
    simulated_gpus: Path | None,
    gpus: CardSelection | None,
    root: Path,
    scope: str,
    control: Path,
    driver: str,
    exclusive: bool,
    stop_daemons: str,
    daemon_cgroup: Path | None,
    pace: DaemonPace,
    detach_before: float,
    audit: AuditSettings | None,
) -> None:
    """Cardwise's MPS node manager, one on each node whose GPUs are shared by MPS.

    Runs one NVIDIA MPS daemon per GPU, keeps the daemon's memory limits at the largest share on the GPU, replaces a
    daemon that dies, hangs or has a fault, and publishes to node and cluster whether containers may start on a GPU.
    Needs root and the machine's PIDs (hostPID).
    """
    logs.configure(COMPONENT, common.log_level, common.log_format)
    settings = ManagerSettings(
        node=node_name,
        root=root,
        scope=DaemonScope(scope),
        control=control,
        pace=pace,
        exclusive=exclusive,
        stop_daemons=stop_daemons,
        detach_before=detach_before,
        cgroup=daemon_cgroup,
        driver=driver,
        audit=audit,
    )
    stop_event = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop_event.set())
    try:
        all_gpus = SimulatedGpus(simulated_gpus) if simulated_gpus is not None else NvmlGpus(on_failure=_count_failure)
        selected_gpus: Gpus = all_gpus if gpus is None else SelectedGpus(all_gpus, gpus)
        mps.check_root(str(root), [card.uuid for card in selected_gpus.cards()], settings.scope)
        directories.check_folder_access(root)
        if daemon_cgroup is not None:
            cgroups.check_root(daemon_cgroup)
        if ignored_names := units.list_ignored_settings(os.environ):
            _log.warning("ignored MPS settings in the manager's environment", names=ignored_names)
        client = KubeClient.load(common.kubeconfig, user_agent=COMPONENT)
        health_server = HealthServer(
            common.metrics_bind,
            ready=lambda: _list_ready_problems(managers),
            alive=lambda: _list_stuck_problems(managers),
            config=configz.describe_options(click.get_current_context()),
        )
        lock = ManagerLock(root)
    except (InvalidRequest, GpusUnavailable, KubeConfigError, OSError) as error:
        _log.error("cannot start", error=str(error))
        sys.exit(1)
    managers: list[Manager] = []
    interpreter.tune_interpreter()
    health_server.start()
    if _acquire_lock(lock, stop_event):
        manager = Manager(settings, client, selected_gpus, all_gpus)
        manager.start()
        managers.append(manager)
        _log.info("started", node=node_name, cards=len(selected_gpus.cards()), scope=scope, root=str(root))
        _serve(lock, stop_event)
        _log.info("stopping")
        manager.stop()
    lock.release()
    health_server.stop()
    all_gpus.close()
    client.close()
    _log.info("stopped")


def _acquire_lock(lock: ManagerLock, stop_event: threading.Event, clock: Clock = BOOT) -> bool:
    """Wait until a former manager has released the root. Returns False if this process is stopped meanwhile."""
    started = clock.now()
    has_warned = False
    while not stop_event.is_set():
        try:
            lock.acquire()
        except RootLocked:
            if not has_warned and clock.now() - started > _WARN_AFTER_SECONDS:
                has_warned = True
                _log.warning("waiting for another manager to release the root")
            clock.wait(stop_event, _LOCK_POLL_SECONDS)
        else:
            return True
    return False


def _serve(lock: ManagerLock, stop_event: threading.Event, clock: Clock = BOOT) -> None:
    """Wait until this process is stopped.

    If the lock is lost, exit as after a crash, so that the next manager takes over.
    """
    while not clock.wait(stop_event, _CHECK_SECONDS):
        if lock.is_lost():
            _log.error("exiting: the lock file was removed from the root, so readers ignore this manager")
            sys.exit(1)


def _list_ready_problems(managers: list[Manager]) -> list[str]:
    return (
        [problem for manager in managers for problem in manager.problems()]
        if managers
        else ["waiting for another manager to release the root"]
    )


def _list_stuck_problems(managers: list[Manager]) -> list[str]:
    return [problem for manager in managers for problem in manager.stuck_reasons()]


def _count_failure(thread: str) -> None:
    metrics.THREADS.labels(thread).inc()


if __name__ == "__main__":
    main()
