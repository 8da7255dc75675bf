"""The command `cardwise-deviceplugin`."""

import os
import signal
import sys
import threading
from pathlib import Path

import click
import structlog

from cardwise.core.api import mps, names
from cardwise.core.values.invalid import InvalidRequest
from cardwise.devices.offered import OfferedDevices
from cardwise.devices.protocol import Devices, NoDevices
from cardwise.gpus import selection
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import Gpus, GpusUnavailable, NoCards
from cardwise.gpus.selection import CardSelection
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube.client import KubeClient
from cardwise.kube.errors import KubeConfigError
from cardwise.kube.events import EventRecorder
from cardwise.runtime import interpreter, logs
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthServer
from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    CommonSettings,
    common_options,
    core_overcommit_option,
    option,
    simulated_gpus_option,
)
from deviceplugin.grants.access import Access
from deviceplugin.grants.mpswait import HasManager
from deviceplugin.process import COMPONENT, NodeAgent, NodeAgentSettings
from deviceplugin.publish import metrics
from deviceplugin.sources.containers import RuntimeContainers
from deviceplugin.sources.kubelet import Kubelet

_log = structlog.get_logger(__name__)

_FOLDER = click.Path(file_okay=False, path_type=Path)
_KUBELET_FOLDERS = ("device-plugins", "pod-resources")
_CLAIM_FOLDERS = (f"plugins/{names.DRIVER}", "plugins_registry")  # mounted with --claims
# The kernel's paths, and CDI's folder for specs that do not change. The container runtime finds device nodes under the
# same path.
SYSFS, DEV, _STATIC_CDI_DIR = Path("/sys"), Path("/dev"), Path("/etc/cdi")
_CHECK_SECONDS = 1.0  # pause between two checks of the mounted folders


def _parse_cards(_: click.Context, __: click.Parameter, text: str | None) -> CardSelection | None:
    if text is None:
        return None
    if text == "none":
        return CardSelection(())
    try:
        return selection.parse_selection(text)
    except InvalidRequest as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _open_gpus(simulated_file: Path | None, selected_cards: CardSelection | None, faults_file: Path) -> Gpus:
    """Open the node's cards: the driver's cards, simulated cards, or none. Raises GpusUnavailable."""
    if simulated_file is not None:
        return SimulatedGpus(simulated_file)
    if selected_cards == CardSelection(()):
        return NoCards()
    return NvmlGpus(faults=faults_file, on_failure=_count_failure)


def _is_removed(folder: Path) -> bool:
    """Whether a mounted folder was removed on the node.

    No file can be created in a removed folder, and only a new container can mount the folder that replaces it.
    """
    try:
        return not folder.stat().st_nlink
    except OSError:
        return False


def _count_failure(thread: str) -> None:
    metrics.THREAD_FAILURES.labels(thread).inc()


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@option(
    "--node-name",
    envvar=["NODE_NAME", "CARDWISE_NODE_NAME"],
    required=True,
    help="Name of this node's Node object.",
)
@simulated_gpus_option
@core_overcommit_option
@option(
    "--gpus",
    metavar="GPU,...",
    callback=_parse_cards,
    help="Indices or UUIDs of the GPUs that Cardwise shares; the others are free for other programs, such as "
    "NVIDIA's device plugin. UUIDs are safer: indices change when a GPU is taken out. none: no GPU, for a node that "
    "has other devices only. Default: all GPUs, but none while NVIDIA's device plugin serves the node.",
)
@option(
    "--devices",
    "devices_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file of the devices other than GPUs that this node offers: RDMA devices, and network cards, FPGAs and "
    "the like by their PCI vendor, device and class. Read again when it changes; docs/reference/deviceplugin.md has "
    "the format. Default: none.",
)
@option(
    "--kubelet-dir",
    type=_FOLDER,
    default=Path("/var/lib/kubelet"),
    help="The kubelet's folder, with device-plugins/ and pod-resources/ below it.",
)
@option(
    "--cdi-dir",
    type=_FOLDER,
    default=Path("/var/run/cdi"),
    help="Folder from which the container runtime reads CDI specs. NVIDIA's spec of the GPUs is there, or in /etc/cdi.",
)
@option(
    "--state-dir",
    type=_FOLDER,
    default=Path("/var/lib/cardwise"),
    help="Folder of this node's grants. Must survive reboots.",
)
@option(
    "--cri-socket",
    type=click.Path(path_type=Path),
    default=Path("/run/containerd/containerd.sock"),
    help="The container runtime's CRI socket, which lists the live containers.",
)
@option(
    "--gpu-access",
    type=click.Choice(["auto", "cdi", "env"]),
    default="auto",
    help="How containers get their GPU. cdi: only the device node of that GPU. env: by an environment variable, for "
    "runtimes without CDI; a user can then see the other GPUs. auto: cdi if the runtime supports CDI, else env.",
)
@option(
    "--mps",
    "mps_setting",
    type=click.Choice([str(setting) for setting in HasManager]),
    default=str(HasManager.SEEN),
    envvar="CARDWISE_MPS",
    help="Whether the node has an MPS manager. never: it has none, so containers never wait for MPS. seen: once a "
    "manager has run, containers wait for MPS on their GPU. always: containers wait even before its first start.",
)
@option(
    "--mps-root",
    type=_FOLDER,
    default=Path(mps.DEFAULT_ROOT),
    envvar="CARDWISE_MPS_ROOT_DIR",
    help="The MPS manager's --mps-root.",
)
@option(
    "--claims",
    is_flag=True,
    help="Also serve pods whose shares are allocated by ResourceClaim (scheduler.mode=claims). Needs Kubernetes 1.34 "
    "and a container runtime with CDI.",
)
def main(
    *,
    common: CommonSettings,
    node_name: str,
    simulated_gpus: Path | None,
    gpus: CardSelection | None,
    devices_file: Path | None,
    kubelet_dir: Path,
    cdi_dir: Path,
    state_dir: Path,
    cri_socket: Path,
    gpu_access: str,
    mps_setting: str,
    mps_root: Path,
    core_overcommit: int,
    claims: bool,
) -> None:
    """Cardwise's device plugin, one on each node with GPUs or other offered devices.

    Publishes the node's GPUs and devices (node capacities, ExtendedResources, health). Gives each container that starts
    exactly the assigned GPUs and devices. Saves these grants on the node's disk, and releases a grant when the pod's
    containers have ended.
    """
    logs.configure(COMPONENT, common.log_level, common.log_format)
    nvidia_specs = (_STATIC_CDI_DIR, cdi_dir)  # a later folder wins, as in CDI
    settings = NodeAgentSettings(
        node=node_name,
        kubelet_dir=kubelet_dir,
        cdi_dir=cdi_dir,
        state_dir=state_dir,
        cri_socket=cri_socket,
        access=None if gpu_access == "auto" else Access(gpu_access),
        nvidia_specs=None if simulated_gpus is not None else nvidia_specs,
        cards=gpus,
        mps=HasManager(mps_setting),
        mps_root=mps_root,
        core_overcommit=core_overcommit,
        claims=claims,
    )
    stop_event = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop_event.set())
    try:
        gpu_source = _open_gpus(simulated_gpus, gpus, state_dir / "faults.json")
        devices: Devices = (
            NoDevices() if devices_file is None else OfferedDevices(devices_file, sysfs=SYSFS, dev=DEV, node=node_name)
        )
        client = KubeClient.load(common.kubeconfig, user_agent=COMPONENT)
        agent = NodeAgent(
            settings,
            client=client,
            gpus=gpu_source,
            devices=devices,
            kubelet=Kubelet(kubelet_dir),
            containers=RuntimeContainers(cri_socket),
            events=EventRecorder(client, COMPONENT, instance=node_name),
        )
        config = configz.describe_options(click.get_current_context())
        health_server = HealthServer(common.metrics_bind, ready=agent.problems, config=config)
    except (GpusUnavailable, InvalidRequest, KubeConfigError, OSError) as error:
        _log.error("cannot start", error=str(error))
        sys.exit(1)
    interpreter.tune_interpreter()
    health_server.start()
    agent.start()
    _log.info("started", node=node_name, cards=len(agent.cards()), devices=len(devices.devices()))
    mounted_folders = [
        state_dir,
        mps_root,
        *nvidia_specs,
        cri_socket.parent,
        *map(kubelet_dir.joinpath, _KUBELET_FOLDERS + (_CLAIM_FOLDERS if claims else ())),
    ]
    mounted_folders = [
        folder for folder in mounted_folders if not _is_removed(folder)
    ]  # leaves out folders of file systems that do not count links: they always seem to be removed
    while not stop_event.wait(_CHECK_SECONDS):
        if removed_folders := [str(folder) for folder in mounted_folders if _is_removed(folder)]:
            _log.error(
                "exiting: mounted folders were removed from the node, and only a new container can mount them again",
                folders=removed_folders,
            )
            break
    _log.info("stopping")
    agent.await_admissions()
    agent.stop()
    health_server.stop()
    client.close()
    _log.info("stopped")
    sys.stderr.flush()
    # gRPC's own threads can delay the interpreter's exit; the threads of Cardwise have ended.
    os._exit(0)


if __name__ == "__main__":
    main()
