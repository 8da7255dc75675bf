"""The options of `cardwise simulate`.

The simulation is imported only when the command runs. Otherwise all other commands would wait for numpy.
"""

import math
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from cardwise.cli import options
from cardwise.core.api.policies import CARD_POLICIES
from cardwise.core.values.invalid import InvalidRequest
from cardwise.simulation.defaults import DEMAND, FIRST_SEED, LIFETIMES, LOAD

_HELP: Final = """Replay a trace of pods, or the cluster's own pods, under each placement policy.

    TRACE is a folder in the format of openb (cluster-trace-gpu-v2023), with openb_node_list_NAME.csv and
    openb_pod_list_NAME.csv. Its pods arrive in an order that the seed determines, until they have requested 1.3 times
    all GPUs; pods that do not fit are refused. This is the protocol of FGD (USENIX ATC 2023), so the results are
    comparable. A GPU is 1000 units.

    With --from-cluster the running and pending pods of the cluster are placed on its nodes as if these were empty.

    \b
    With --pod it shows how many more such pods fit: now, and with --add-nodes. NODES are
      4x8xTesla-T4:16384   4 nodes of 8 GPUs of 16384 MiB, any cpu and memory
      4x8xTesla-T4:16Gi,cpu=64,memory=256Gi
    and PODS are a file of manifests (a Pod, or an object with a pod template), or
      gpu-mem=8138,cpu=2,memory=4Gi   8138 MiB of a GPU
      gpu=2                           two whole GPUs
      gpu-mem=8138,class=nvidia.tesla.t4,core=50

    \b
    cardwise simulate openb             every policy, three seeds
    cardwise simulate openb --churn     pods also end
    cardwise simulate openb --pods gpuspec33 --policy priced --seeds 10
    cardwise simulate --from-cluster    how each policy would place our pods
    cardwise simulate --from-cluster --pod gpu-mem=8138 --add-nodes 4x8xT4:16384
"""


class _Positive(click.FloatRange):
    """A finite number above 0: click's range would accept nan and inf."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number; write, for example, 1.3", param, ctx)
        return number


def _remove_duplicates(_ctx: click.Context, _param: click.Parameter, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Remove repeated arguments: a repeated argument would repeat the same runs, and its runs would count twice."""
    return tuple(dict.fromkeys(arguments))


@click.command("simulate", help=_HELP)
@click.argument("trace", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--from-cluster", is_flag=True, help="Use the nodes and pods of the cluster instead of a trace.")
@options.cluster
@options.cardwise_namespace
@click.option(
    "--pods",
    multiple=True,
    callback=_remove_duplicates,
    metavar="NAME",
    help="List of pods of the trace. Default: default.",
)
@click.option("--nodes", default="gpu_node", show_default=True, metavar="NAME", help="List of nodes of the trace.")
@click.option(
    "--policy",
    multiple=True,
    callback=_remove_duplicates,
    type=click.Choice(CARD_POLICIES),
    help="Policy to simulate. Default: all of them.",
)
@click.option(
    "--seeds",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Number of runs, each with its own seed.",
)
@click.option(
    "--seed",
    default=FIRST_SEED,
    show_default=True,
    help="Seed of the first run; each further run uses the next number.",
)
@click.option("--demand", type=_Positive(), help=f"Total amount to request, as a multiple of all GPUs. [{DEMAND}]")
@click.option(
    "--known",
    "show_workload",
    is_flag=True,
    help="Show all pods to the policies in advance. Default: they learn from the pods that have arrived.",
)
@click.option(
    "--churn", "is_churn", is_flag=True, help="Let pods arrive and end all the time instead of filling the cluster."
)
@click.option(
    "--load",
    default=LOAD,
    show_default=True,
    type=_Positive(),
    help="With --churn: mean requested amount, as a multiple of all GPUs.",
)
@click.option(
    "--lifetimes",
    default=LIFETIMES,
    show_default=True,
    type=_Positive(),
    help="With --churn: how long to measure, in mean lifetimes of a pod.",
)
@click.option("--pod", multiple=True, metavar="PODS", help="Show how many more of these pods fit.")
@options.gpu_mem_unit
@click.option("--add-nodes", multiple=True, metavar="NODES", help="Add nodes to those of the cluster.")
@click.option("--processes", type=click.IntRange(1), help="Number of parallel processes. Default: one per core.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Write plots (SVG) to this folder.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def simulate(*, trace: Path | None, from_cluster: bool, **settings: Any) -> None:
    if (trace is None) is not from_cluster:
        raise click.UsageError("name the folder of a trace, or give --from-cluster")
    if from_cluster and settings["pods"]:
        raise click.UsageError("--pods names a list of a trace, which --from-cluster does not use: remove one of them")
    if settings["is_churn"] and settings["pod"]:
        raise click.UsageError(
            "--pod needs a simulation that ends with a full cluster, and --churn never fills it: remove one of them"
        )
    ignored_options = ("demand",) if settings["is_churn"] else ("load", "lifetimes")
    for name in ignored_options:
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            advice = "do not give it with --churn" if settings["is_churn"] else "it has an effect only with --churn"
            raise click.UsageError(f"--{name} changes nothing: {advice}")
    from cardwise.cli import simulation  # noqa: PLC0415 - see above

    parsed = simulation.SimulationOptions(**settings)
    try:
        simulation.run_simulation(parsed, trace if trace is not None else options.load_client())
    except InvalidRequest as error:
        raise click.ClickException(str(error)) from error
