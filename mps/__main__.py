"""cardwise-mps: the MPS node manager's command."""

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
from cardwise.core.api.mps import Scope
from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import selection
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import Gpus, GpusUnavailable
from cardwise.gpus.selection import CardSelection, SelectedGpus
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube.client import KubeClient
from cardwise.kube.errors import KubeConfigError
from cardwise.runtime import logs
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthServer
from cardwise.runtime.settings import CONTEXT_SETTINGS, DURATION, Common, common_options, option, simulated_cards_option
from mps import metrics
from mps.audit.audit import AuditSettings
from mps.daemon import directories, units
from mps.daemon.machine import DaemonPace
from mps.host import cgroups
from mps.host.processes import CONTROL
from mps.manager import Lock, Manager, ManagerSettings, RootTaken
from mps.options import audit_options, pace_options

_log = structlog.get_logger(__name__)

COMPONENT = "cardwise-mps"
_LOCK_PAUSE = 0.1
_LOOK_SECONDS = 1.0
_SOON = 5.0  # seconds for which nobody needs to hear that another manager still holds the root


def _choice(_: click.Context, __: click.Parameter, value: str | None) -> CardSelection | None:
    if value is None:
        return None
    try:
        return selection.parse(value)
    except InvalidRequest as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _program(_: click.Context, __: click.Parameter, value: str) -> Path:
    found = shutil.which(value)
    if found is None:
        raise click.BadParameter(
            f"{value} is not there or cannot be run; it belongs to NVIDIA's driver (package nvidia-compute-utils or "
            "nvidia-cuda-mps), and comes into a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility. A node "
            "without it cannot share by MPS: keep the manager off it"
        )
    return Path(found)


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@option(
    "--node-name",
    "--node",
    envvar=["NODE_NAME", "CARDWISE_NODE_NAME"],
    required=True,
    help="Name of the Node object of this machine.",
)
@simulated_cards_option
@option(
    "--cards",
    metavar="CARD,...",
    callback=_choice,
    help="Indices or UUIDs of the cards to serve; give the device plugin the same. Default: all.",
)
@option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(mps.DEFAULT_ROOT),
    envvar="CARDWISE_MPS_ROOT_DIR",
    help="Folder of the node for pipes and states, shared with the device plugin. Keep it short: MPS opens no path of "
    f"more than {mps.LONGEST_PIPE} bytes.",
)
@option(
    "--scope",
    type=click.Choice([str(scope) for scope in Scope]),
    default=str(Scope.CARD),
    envvar="CARDWISE_MPS_SCOPE",
    help="One daemon for each card, so that faults and users of one never touch another, or one for the node, which "
    "containers with shares of several cards need. Drain the node before you change it.",
)
@option(
    "--control",
    default=CONTROL,
    callback=_program,
    envvar="CARDWISE_MPS_CONTROL",
    help="The program nvidia-cuda-mps-control.",
)
@option(
    "--driver",
    default="",
    envvar="CARDWISE_MPS_DRIVER",
    help="Version of the driver, such as 550.163.01, where the cards do not say it (simulated ones).",
    show_default="as the cards say",
)
@option(
    "--exclusive/--no-exclusive",
    default=True,
    envvar="CARDWISE_MPS_EXCLUSIVE",
    help="Whether cards are EXCLUSIVE_PROCESS while they are shared. Without it, a process that unsets "
    "CUDA_MPS_PIPE_DIRECTORY has the whole card.",
)
@option(
    "--stop-daemons",
    type=click.Choice(["idle", "always", "never"]),
    default="idle",
    envvar="CARDWISE_MPS_STOP_DAEMONS",
    help="Which daemons end with the manager. idle: those whose cards no pod holds; the next manager takes the others "
    "over, and running pods notice nothing. always: all, with their clients (uninstall).",
)
@option(
    "--daemon-cgroup",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="CARDWISE_MPS_DAEMON_CGROUP",
    help="The node's cgroup file system, such as /host/sys/fs/cgroup: daemons then live in a cgroup of their own, so "
    "that the container runtime does not end them with the manager's container. Default: that of the manager.",
)
@pace_options
@option(
    "--detach-before",
    type=DURATION,
    default=3.0,
    envvar="CARDWISE_MPS_DETACH_BEFORE",
    help="How long before the end of a pod's grace period its processes are taken off the server, since a busy client "
    "that is killed may take others down. At most half of the grace period.",
)
@audit_options
def main(
    *,
    common: Common,
    node_name: str,
    simulated_cards: Path | None,
    cards: CardSelection | None,
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
    """Cardwise's MPS node manager: one for each node whose cards are shared by MPS.

    Runs one NVIDIA MPS daemon for each card, keeps the daemon's ceilings at the largest share on the card, replaces
    a daemon that dies, hangs or meets a fault, and tells node and cluster whether a card takes containers. Needs root
    and the machine's PIDs (hostPID).
    """
    logs.setup(COMPONENT, common.log_level, common.log_format)
    settings = ManagerSettings(
        node=node_name,
        root=root,
        scope=Scope(scope),
        control=control,
        pace=pace,
        exclusive=exclusive,
        stop_daemons=stop_daemons,
        detach_before=detach_before,
        cgroup=daemon_cgroup,
        driver=driver,
        audit=audit,
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        all_gpus = (
            SimulatedGpus(simulated_cards) if simulated_cards is not None else NvmlGpus(on_failure=_thread_failed)
        )
        gpus: Gpus = all_gpus if cards is None else SelectedGpus(all_gpus, cards)
        mps.check_root(str(root), [card.uuid for card in gpus.cards()], settings.scope)
        directories.check_open(root)
        if daemon_cgroup is not None:
            cgroups.check_root(daemon_cgroup)
        if ignored := units.passed_over(os.environ):
            _log.warning("settings of MPS in the manager's environment are not used", names=ignored)
        client = KubeClient.load(common.kubeconfig, user_agent=COMPONENT)
        health = HealthServer(
            common.metrics_bind,
            ready=lambda: _problems(running),
            alive=lambda: _stuck(running),
            config=configz.of(click.get_current_context()),
        )
        lock = Lock(root)
    except (InvalidRequest, GpusUnavailable, KubeConfigError, OSError) as error:
        _log.error("cannot start", error=str(error))
        sys.exit(1)
    running: list[Manager] = []
    health.start()
    if _taken(lock, stopped):
        manager = Manager(settings, client, gpus, all_gpus)
        manager.start()
        running.append(manager)
        _log.info("started", node=node_name, cards=len(gpus.cards()), scope=scope, root=str(root))
        _serve(lock, stopped)
        _log.info("stopping")
        manager.stop()
    lock.release()
    health.stop()
    all_gpus.close()
    client.close()
    _log.info("stopped")


def _taken(lock: Lock, stopped: threading.Event, clock: Clock = BOOT) -> bool:
    """Waits for a former manager's end, which a rolling update may take its time for. False: stopped before."""
    began = clock.now()
    told = False
    while not stopped.is_set():
        try:
            lock.take()
        except RootTaken:
            if not told and clock.now() - began > _SOON:
                told = True
                _log.warning("another manager holds the root; waiting for its end")
            clock.wait(stopped, _LOCK_PAUSE)
        else:
            return True
    return False


def _serve(lock: Lock, stopped: threading.Event, clock: Clock = BOOT) -> None:
    """Serves until it is told to stop. If it loses its lock, it ends as in a crash: the next manager takes over."""
    while not clock.wait(stopped, _LOOK_SECONDS):
        if lock.lost():
            _log.error("the lock was removed from the root, so nobody believes this manager; it ends for the next one")
            sys.exit(1)


def _problems(running: list[Manager]) -> list[str]:
    return [problem for manager in running for problem in manager.problems()] if running else ["waits for its turn"]


def _stuck(running: list[Manager]) -> list[str]:
    return [problem for manager in running for problem in manager.stuck()]


def _thread_failed(thread: str) -> None:
    metrics.THREADS.labels(thread).inc()


if __name__ == "__main__":
    main()
