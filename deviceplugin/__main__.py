"""cardwise-deviceplugin: the node agent's command."""

import os
import signal
import sys
import threading
from pathlib import Path

import click
import structlog

from cardwise.core.invalid import InvalidRequest
from cardwise.gpus import chosen
from cardwise.gpus.chosen import Choice
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import Gpus, GpusUnavailable
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube.client import KubeClient
from cardwise.kube.errors import KubeConfigError
from cardwise.runtime import logs
from cardwise.runtime.health import HealthServer
from cardwise.runtime.settings import CONTEXT_SETTINGS, Common, common_options
from deviceplugin import metrics, slots
from deviceplugin.access import Access
from deviceplugin.agent import COMPONENT, Agent, Settings

_log = structlog.get_logger(__name__)

_FOLDER = click.Path(file_okay=False, path_type=Path)


def _slot_ids(_: click.Context, __: click.Parameter, value: int) -> tuple[str, ...]:
    try:
        return slots.slot_ids(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _choice(_: click.Context, __: click.Parameter, value: str | None) -> Choice | None:
    if value is None:
        return None
    try:
        return chosen.parse(value)
    except InvalidRequest as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _thread_failed(thread: str) -> None:
    metrics.FAILURES.labels(thread).inc()


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@click.option(
    "--node-name",
    envvar=["NODE_NAME", "CARDWISE_NODE_NAME"],
    show_envvar=True,
    required=True,
    help="Name of the Node object of this machine.",
)
@click.option(
    "--simulated-cards",
    type=click.Path(dir_okay=False, path_type=Path),
    show_envvar=True,
    help="YAML file of cards, read again when it changes, instead of the machine's NVIDIA cards.",
)
@click.option(
    "--cards",
    metavar="CARD,...",
    callback=_choice,
    envvar="CARDWISE_CARDS",
    show_envvar=True,
    help="Indices or UUIDs of the cards that Cardwise shares; the others are left to whom you like, such as NVIDIA's "
    "device plugin. UUIDs are safer: indices move when a card is taken out. Default: all cards, and none while "
    "NVIDIA's device plugin serves the node.",
)
@click.option(
    "--kubelet-dir",
    type=_FOLDER,
    default=Path("/var/lib/kubelet"),
    show_envvar=True,
    help="The kubelet's folder, with device-plugins/ and pod-resources/ below it.",
)
@click.option(
    "--cdi-dir",
    type=_FOLDER,
    default=Path("/var/run/cdi"),
    show_envvar=True,
    help="Where the container runtime reads CDI specs.",
)
@click.option(
    "--state-dir",
    type=_FOLDER,
    default=Path("/var/lib/cardwise"),
    show_envvar=True,
    help="Where this node's grants are kept. Must survive reboots.",
)
@click.option(
    "--cri-socket",
    type=click.Path(path_type=Path),
    default=Path("/run/containerd/containerd.sock"),
    show_envvar=True,
    help="The container runtime's CRI socket: it says which containers are alive.",
)
@click.option(
    "--card-access",
    type=click.Choice(["auto", "cdi", "env"]),
    default="auto",
    show_envvar=True,
    help="How containers get their card. cdi: its device node and no other. env: by environment only, for runtimes "
    "without CDI; a user can then see the other cards. auto: cdi where the runtime has it.",
)
@click.option(
    "--slots",
    "slot_ids",
    type=int,
    default=slots.DEFAULT_COUNT,
    callback=_slot_ids,
    envvar="CARDWISE_SLOTS",
    show_envvar=True,
    help="Share slots: the most containers with a share that this node can run at a time.",
)
@click.option(
    "--nvidia-cdi-spec",
    "nvidia_cdi_specs",
    type=click.Path(path_type=Path),
    multiple=True,
    envvar="CARDWISE_NVIDIA_CDI_SPEC",
    default=[Path("/etc/cdi"), Path("/var/run/cdi")],
    show_envvar=True,
    help="Where the node's nvidia.com/gpu CDI spec is: a file, or a folder to look through. May be repeated.",
)
@click.option(
    "--start-on-sick-cards/--no-start-on-sick-cards",
    default=False,
    show_envvar=True,
    help="Whether containers whose card is unhealthy start all the same, or wait until it has recovered.",
)
def main(
    *,
    common: Common,
    node_name: str,
    simulated_cards: Path | None,
    cards: Choice | None,
    kubelet_dir: Path,
    cdi_dir: Path,
    state_dir: Path,
    cri_socket: Path,
    card_access: str,
    slot_ids: tuple[str, ...],
    nvidia_cdi_specs: tuple[Path, ...],
    start_on_sick_cards: bool,
) -> None:
    """Cardwise's device plugin: one for each node with cards.

    Tells the cluster of the node's cards (node capacities, ExtendedResources, health), and gives each container,
    when it starts, exactly the cards that its pod was placed on. Grants are kept on the node's disk, and are freed
    when the pod's containers are gone.
    """
    logs.setup(COMPONENT, common.log_level, common.log_format)
    settings = Settings(
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
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        gpus: Gpus = (
            SimulatedGpus(simulated_cards) if simulated_cards is not None else NvmlGpus(on_failure=_thread_failed)
        )
        client = KubeClient.load(common.kubeconfig, user_agent=COMPONENT)
        agent = Agent(settings, client, gpus)
        health = HealthServer(common.metrics_bind, ready=agent.problems)
    except (GpusUnavailable, KubeConfigError, OSError) as error:
        _log.error("cannot start", error=str(error))
        sys.exit(1)
    health.start()
    agent.start()
    _log.info("started", node=node_name, cards=len(agent.cards()), slots=len(slot_ids))
    stopped.wait()
    _log.info("stopping")
    agent.stop()
    health.stop()
    client.close()
    _log.info("stopped")
    sys.stderr.flush()
    # gRPC's own threads can hold the interpreter's end back; everything of ours has ended.
    os._exit(0)


if __name__ == "__main__":
    main()
