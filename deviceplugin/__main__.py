"""cardwise-deviceplugin: the node agent's command."""

import os
import signal
import sys
import threading
from pathlib import Path

import click
import structlog

from cardwise.core.api import mps
from cardwise.core.api.mps import Mode
from cardwise.core.values.invalid import InvalidRequest
from cardwise.devices.offered import OfferedDevices
from cardwise.devices.protocol import Devices, NoDevices
from cardwise.gpus import chosen
from cardwise.gpus.chosen import CardChoice
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import Gpus, GpusUnavailable, NoCards
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube.client import KubeClient
from cardwise.kube.errors import KubeConfigError
from cardwise.kube.events import EventRecorder
from cardwise.runtime import logs
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthServer
from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    Common,
    common_options,
    core_overcommit_option,
    option,
    simulated_cards_option,
)
from deviceplugin.grants.access import Access
from deviceplugin.plugin import slots
from deviceplugin.process import COMPONENT, NodeAgent, NodeAgentSettings
from deviceplugin.publish import metrics
from deviceplugin.sources.containers import Containers
from deviceplugin.sources.kubelet import Kubelet

_log = structlog.get_logger(__name__)

_FOLDER = click.Path(file_okay=False, path_type=Path)
_OF_KUBELET = ("device-plugins", "pod-resources")
_LOOK_SECONDS = 1.0  # between two looks at the folders


def _slot_ids(_: click.Context, __: click.Parameter, value: int) -> tuple[str, ...]:
    try:
        return slots.slot_ids(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _choice(_: click.Context, __: click.Parameter, value: str | None) -> CardChoice | None:
    if value is None:
        return None
    if value == "none":
        return CardChoice(())
    try:
        return chosen.parse(value)
    except InvalidRequest as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _gpus(simulated: Path | None, cards: CardChoice | None, faults: Path) -> Gpus:
    """Raises GpusUnavailable."""
    if simulated is not None:
        return SimulatedGpus(simulated)
    if cards == CardChoice(()):
        return NoCards()
    return NvmlGpus(faults=faults, on_failure=_thread_failed)


def _removed(folder: Path) -> bool:
    """Whether it was removed on the node while our container has it mounted. Nothing can be made in it then, and we see
    nothing of what comes in its place: only a new container does.
    """
    try:
        return not folder.stat().st_nlink
    except OSError:
        return False


def _thread_failed(thread: str) -> None:
    metrics.FAILURES.labels(thread).inc()


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@option(
    "--node-name",
    envvar=["NODE_NAME", "CARDWISE_NODE_NAME"],
    required=True,
    help="Name of the Node object of this machine.",
)
@simulated_cards_option
@core_overcommit_option
@option(
    "--cards",
    metavar="CARD,...",
    callback=_choice,
    help="Indices or UUIDs of the cards that Cardwise shares; the others are free for other programs, such as "
    "NVIDIA's device plugin. UUIDs are safer: indices move when a card is taken out. none: no card, for a node that "
    "has other devices only. Default: all cards, but none while NVIDIA's device plugin serves the node.",
)
@option(
    "--devices",
    "devices_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file of what this node offers beside GPUs: RDMA devices, and network cards, FPGAs and the like by their "
    "PCI vendor, device and class. Read again when it changes; docs/reference/deviceplugin.md has the format. "
    "Default: nothing.",
)
@option(
    "--sysfs",
    type=_FOLDER,
    default=Path("/sys"),
    help="Folder of this machine's sysfs, which lists its devices.",
)
@option(
    "--dev",
    type=_FOLDER,
    default=Path("/dev"),
    help="Folder of this machine's device nodes; the container runtime must find them under the same path.",
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
    help="Where the container runtime reads CDI specs.",
)
@option(
    "--state-dir",
    type=_FOLDER,
    default=Path("/var/lib/cardwise"),
    help="Where this node's grants are kept. Must survive reboots.",
)
@option(
    "--cri-socket",
    type=click.Path(path_type=Path),
    default=Path("/run/containerd/containerd.sock"),
    help="The container runtime's CRI socket: it says which containers are alive.",
)
@option(
    "--card-access",
    type=click.Choice(["auto", "cdi", "env"]),
    default="auto",
    help="How containers get their card. cdi: its device node and no other. env: by environment only, for runtimes "
    "without CDI; a user can then see the other cards. auto: cdi where the runtime has it, else env.",
)
@option(
    "--slots",
    "slot_ids",
    type=int,
    default=slots.DEFAULT_COUNT,
    callback=_slot_ids,
    envvar="CARDWISE_SLOTS",
    help="Share slots: the most containers with a share that this node can run at a time.",
)
@option(
    "--nvidia-cdi-spec",
    "nvidia_cdi_specs",
    type=click.Path(path_type=Path),
    multiple=True,
    envvar="CARDWISE_NVIDIA_CDI_SPEC",
    default=[Path("/etc/cdi"), Path("/var/run/cdi")],
    help="Where the node's nvidia.com/gpu CDI spec is: a file, or a folder to look through. May be repeated.",
)
@option(
    "--start-on-sick-cards/--no-start-on-sick-cards",
    default=False,
    help="Whether containers whose card is unhealthy start all the same, or wait until it has recovered.",
)
@option(
    "--mps",
    "mps_mode",
    type=click.Choice([str(mode) for mode in Mode]),
    default=str(Mode.PREFERRED),
    envvar="CARDWISE_MPS",
    help="off: the node has no MPS manager, and no container waits for one. preferred: it may have one; once one has "
    "run here, containers wait for their card's MPS. required: it has one, so containers wait also before it first "
    f"runs. A pod's annotation {mps.MODE} overrides this.",
)
@option(
    "--mps-root",
    type=_FOLDER,
    default=Path(mps.DEFAULT_ROOT),
    envvar="CARDWISE_MPS_ROOT_DIR",
    help="The MPS manager's --root.",
)
def main(
    *,
    common: Common,
    node_name: str,
    simulated_cards: Path | None,
    cards: CardChoice | None,
    devices_file: Path | None,
    sysfs: Path,
    dev: Path,
    kubelet_dir: Path,
    cdi_dir: Path,
    state_dir: Path,
    cri_socket: Path,
    card_access: str,
    slot_ids: tuple[str, ...],
    nvidia_cdi_specs: tuple[Path, ...],
    start_on_sick_cards: bool,
    mps_mode: str,
    mps_root: Path,
    core_overcommit: int,
) -> None:
    """Cardwise's device plugin: one for each node with cards, or with other devices to give away.

    Tells the cluster of the node's cards and devices (node capacities, ExtendedResources, health), and gives each
    container, when it starts, exactly those that its pod was placed on. Grants are kept on the node's disk, and
    are freed when the pod's containers are gone.
    """
    logs.setup(COMPONENT, common.log_level, common.log_format)
    settings = NodeAgentSettings(
        node=node_name,
        kubelet_dir=kubelet_dir,
        cdi_dir=cdi_dir,
        state_dir=state_dir,
        cri_socket=cri_socket,
        access=None if card_access == "auto" else Access(card_access),
        slots=slot_ids,
        nvidia_specs=None if simulated_cards is not None else nvidia_cdi_specs,
        start_on_sick_cards=start_on_sick_cards,
        cards=cards,
        mps=Mode(mps_mode),
        mps_root=mps_root,
        core_overcommit=core_overcommit,
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        gpus = _gpus(simulated_cards, cards, state_dir / "faults.json")
        devices: Devices = (
            NoDevices() if devices_file is None else OfferedDevices(devices_file, sysfs=sysfs, dev=dev, node=node_name)
        )
        client = KubeClient.load(common.kubeconfig, user_agent=COMPONENT)
        agent = NodeAgent(
            settings,
            client=client,
            gpus=gpus,
            devices=devices,
            kubelet=Kubelet(kubelet_dir),
            containers=Containers(cri_socket),
            events=EventRecorder(client, COMPONENT, instance=node_name),
        )
        config = configz.of(click.get_current_context(), {"slot_ids": len(slot_ids)})
        health = HealthServer(common.metrics_bind, ready=agent.problems, config=config)
    except (GpusUnavailable, InvalidRequest, KubeConfigError, OSError) as error:
        _log.error("cannot start", error=str(error))
        sys.exit(1)
    health.start()
    agent.start()
    _log.info("started", node=node_name, cards=len(agent.cards()), devices=len(devices.devices()), slots=len(slot_ids))
    mounted = [
        cdi_dir,
        state_dir,
        mps_root,
        *nvidia_cdi_specs,
        cri_socket.parent,
        *map(kubelet_dir.joinpath, _OF_KUBELET),
    ]
    mounted = [folder for folder in mounted if not _removed(folder)]  # some file systems count no links
    while not stopped.wait(_LOOK_SECONDS):
        if removed := [str(folder) for folder in mounted if _removed(folder)]:
            _log.error("removed from the node; ends, so that a new container mounts them anew", folders=removed)
            break
    _log.info("stopping")
    agent.leave()
    agent.stop()
    health.stop()
    client.close()
    _log.info("stopped")
    sys.stderr.flush()
    # gRPC's own threads can hold the interpreter's end back; everything of ours has ended.
    os._exit(0)


if __name__ == "__main__":
    main()
