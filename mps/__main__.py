"""The command `cardwise-mps`."""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import click
import msgspec
import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import selection, usagereport
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import Gpus, GpusUnavailable
from cardwise.gpus.selection import CardSelection, SelectedGpus
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.gpus.usagereport import UsageReport
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
from mps.audit.audit import EVICT_AFTER_SECONDS, AuditSettings
from mps.audit.evicting import EVICTIONS_PER_HOUR
from mps.daemon import directories, units
from mps.daemon.machine import PROBE_TIMEOUT_SECONDS, DaemonPace
from mps.host import cgroups
from mps.host.processes import CONTROL_PROGRAM, LOCAL
from mps.manager import ManagerLock, ManagerSettings, MpsManager, RootLocked

_log = structlog.get_logger(__name__)

COMPONENT = "cardwise-mps"
_AUDIT_SETTINGS_BY_MODE = {
    "off": None,
    "report": AuditSettings(),
    "evict": AuditSettings(evict_after=EVICT_AFTER_SECONDS),
}
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


def _check_above_zero(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if seconds <= 0:
        raise click.BadParameter("0 would replace each daemon at once; write a time such as 3s")
    return seconds


def _require_control_program_for_former_daemons(root: Path) -> None:
    """Check that a former manager's daemons can be served: not without the control program. Raises InvalidRequest."""
    running_pids = [process.pid for pipe in root.glob(f"*/{mps.PIPE_FOLDER}") for process in LOCAL.daemons(pipe)]
    if running_pids and shutil.which(CONTROL_PROGRAM) is None:
        raise InvalidRequest(
            "PATH",
            f"{CONTROL_PROGRAM} is missing, and MPS daemons of a former manager run "
            f"({', '.join(map(str, running_pids))}), which could be neither checked nor ended",
            "install it again: it belongs to NVIDIA's driver, and NVIDIA_DRIVER_CAPABILITIES=compute,utility mounts it",
        )


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@option(
    "--node-name",
    envvar=["NODE_NAME", "CARDWISE_NODE_NAME"],
    required=True,
    help="Name of this node's Node object.",
)
@simulated_gpus_option
@option(
    "--gpus",
    metavar="GPU,...",
    callback=_parse_cards,
    help="Indices or UUIDs of the GPUs to serve; set the same for the device plugin. Default: all.",
)
@option(
    "--mps-root",
    "root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(mps.DEFAULT_ROOT),
    envvar="CARDWISE_MPS_ROOT_DIR",
    help="Folder of the node for pipes and state files, shared with the device plugin. Keep its path short: MPS cannot "
    f"open a path of more than {mps.MAX_PIPE_LENGTH} bytes.",
)
@option(
    "--scope",
    type=click.Choice([str(scope) for scope in DaemonScope]),
    default=str(DaemonScope.CARD),
    envvar="CARDWISE_MPS_SCOPE",
    help="card: one daemon per GPU, so that faults and users of one GPU never affect another. node: one daemon for the "
    "whole node; containers with shares of several GPUs need it. Drain the node before you change this.",
)
@option(
    "--exclusive/--no-exclusive",
    default=True,
    envvar="CARDWISE_MPS_EXCLUSIVE",
    help="Whether GPUs are in compute mode EXCLUSIVE_PROCESS while they are shared. In another mode, a process that "
    "unsets CUDA_MPS_PIPE_DIRECTORY gets the whole GPU.",
)
@option(
    "--stop-daemons",
    type=click.Choice(["idle", "always", "never"]),
    default="idle",
    envvar="CARDWISE_MPS_STOP_DAEMONS",
    help="Which daemons end with the manager. idle: daemons whose GPUs no pod holds; running pods are not affected, "
    "since the next manager takes over the other daemons. always: all daemons and their clients, for an uninstall. "
    "never: none.",
)
@option(
    "--probe-timeout",
    type=DURATION,
    default=PROBE_TIMEOUT_SECONDS,
    envvar="CARDWISE_MPS_PROBE_TIMEOUT",
    callback=_check_above_zero,
    help="Timeout of a command to a daemon. A daemon that times out twice is replaced. Raise the timeout on nodes with "
    "CPUs so busy that a healthy daemon answers late.",
)
@option(
    "--audit",
    type=click.Choice(list(_AUDIT_SETTINGS_BY_MODE)),
    default="report",
    envvar="CARDWISE_MPS_AUDIT",
    help="report: compare the memory that processes use on the GPUs with their pods' shares, and report differences in "
    f"events, metrics and the log. evict: report, and also evict pods that for {EVICT_AFTER_SECONDS:g} s use more than "
    "their share or a GPU that is not theirs. Disruption budgets are respected; at most "
    f"{EVICTIONS_PER_HOUR} pods are evicted per hour. off: neither.",
)
def main(
    *,
    common: CommonSettings,
    node_name: str,
    simulated_gpus: Path | None,
    gpus: CardSelection | None,
    root: Path,
    scope: str,
    exclusive: bool,
    stop_daemons: str,
    probe_timeout: float,
    audit: str,
) -> None:
    """Cardwise's MPS node manager, one on each node whose GPUs are shared by MPS.

    Runs one NVIDIA MPS daemon per GPU. Sets the daemon's memory limit to the largest share on the GPU, and replaces a
    daemon that dies, hangs or has a fault. Publishes to the node and to the cluster whether containers may start on a
    GPU. Needs root and the node's PID namespace (hostPID).
    """
    logs.configure(COMPONENT, common.log_level, common.log_format)
    settings = ManagerSettings(
        node=node_name,
        root=root,
        scope=DaemonScope(scope),
        control=Path(CONTROL_PROGRAM),
        pace=DaemonPace(probe_timeout=probe_timeout),
        exclusive=exclusive,
        stop_daemons=stop_daemons,
        cgroup=cgroups.HOST_ROOT if cgroups.HOST_ROOT.exists() else None,
        audit=_AUDIT_SETTINGS_BY_MODE[audit],
        is_split=gpus is not None,
    )
    stop_event = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop_event.set())
    try:
        all_gpus = SimulatedGpus(simulated_gpus) if simulated_gpus is not None else NvmlGpus(on_failure=_count_failure)
        selected_gpus: Gpus = all_gpus if gpus is None else SelectedGpus(all_gpus, gpus)
        mps.check_root(str(root), [card.uuid for card in selected_gpus.cards()], settings.scope)
        directories.check_folder_access(root)
        _require_control_program_for_former_daemons(root)
        if settings.cgroup is not None:
            cgroups.check_root(settings.cgroup)
        if ignored_names := units.list_ignored_settings(os.environ):
            _log.warning("ignored MPS settings in the manager's environment", names=ignored_names)
        client = KubeClient.load(common.kubeconfig, user_agent=COMPONENT)
        health_server = HealthServer(
            common.metrics_bind,
            ready=lambda: _list_ready_problems(managers),
            alive=lambda: _list_stuck_problems(managers),
            config=configz.describe_options(click.get_current_context()),
            documents={usagereport.PATH: lambda: _encode_usage(managers, node_name)},
        )
        lock = ManagerLock(root)
    except (InvalidRequest, GpusUnavailable, KubeConfigError, OSError) as error:
        _log.error("cannot start", error=str(error))
        sys.exit(1)
    managers: list[MpsManager] = []
    interpreter.tune_interpreter()
    health_server.start()
    if _acquire_lock(lock, stop_event):
        manager = MpsManager(settings, client, selected_gpus, all_gpus)
        manager.start()
        managers.append(manager)
        _log.info("started", node=node_name, cards=len(selected_gpus.cards()), scope=scope, root=str(root))
        _keep_lock_until_stopped(lock, stop_event)
        _log.info("stopping")
        manager.stop()
    lock.release()
    health_server.stop()
    all_gpus.close()
    client.close()
    _log.info("stopped")


def _acquire_lock(lock: ManagerLock, stop_event: threading.Event, clock: Clock = BOOT) -> bool:
    """Wait until the former manager has unlocked the root. Returns False if this process must stop before that."""
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


def _keep_lock_until_stopped(lock: ManagerLock, stop_event: threading.Event, clock: Clock = BOOT) -> None:
    """Wait until this process is stopped.

    If the lock is lost, exit as after a crash, so that the next manager takes over.
    """
    while not clock.wait(stop_event, _CHECK_SECONDS):
        if lock.is_lost():
            _log.error("exiting: the lock file was removed from the root, so the node's readers ignore this manager")
            sys.exit(1)


def _list_ready_problems(managers: list[MpsManager]) -> list[str]:
    return (
        [problem for manager in managers for problem in manager.problems()]
        if managers
        else ["waiting for another manager to release the root"]
    )


def _encode_usage(managers: list[MpsManager], node: str) -> bytes:
    for manager in managers:
        return manager.usage_report()
    return msgspec.json.encode(UsageReport(node=node, observed_seconds=0.0))


def _list_stuck_problems(managers: list[MpsManager]) -> list[str]:
    return [problem for manager in managers for problem in manager.stuck_reasons()]


def _count_failure(thread: str) -> None:
    metrics.THREAD_FAILURES.labels(thread).inc()


if __name__ == "__main__":
    main()
