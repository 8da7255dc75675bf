"""The implementation of `cardwise simulate`: reads a trace or a cluster, simulates it, and prints the results."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from cardwise.cli import console
from cardwise.cli.cluster import engine, liveworkload, whatif
from cardwise.cli.cluster.liveworkload import LiveWorkload
from cardwise.cli.render import plotting, replays
from cardwise.core.api.cards import Card
from cardwise.core.api.policies import CARD_POLICIES
from cardwise.core.values.quantity import Unit
from cardwise.kube.client import KubeClient
from cardwise.simulation import runs, summary, traces
from cardwise.simulation.churn import expected_arrivals as expected_churn_arrivals
from cardwise.simulation.churn import simulate_churn
from cardwise.simulation.defaults import DEMAND
from cardwise.simulation.fill import OnProgress, expected_arrivals, simulate_fill
from cardwise.simulation.runs import SimulationRun
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """The options of `cardwise simulate`."""

    pods: tuple[str, ...]
    nodes: str
    policy: tuple[str, ...]
    seeds: int
    seed: int
    demand: float | None
    show_workload: bool
    is_churn: bool
    load: float
    lifetimes: float
    cardwise_namespace: str
    pod: tuple[str, ...]
    gpu_mem_unit: str
    add_nodes: tuple[str, ...]
    processes: int | None
    plots: Path | None
    output: str


@dataclass(slots=True)
class _SimulatedWorld:
    """The workloads and nodes to simulate.

    demand: the total amount to request, as a multiple of all GPUs; None: the pods of the workload.
    extra_shapes: pods of --pod, by name.
    added_nodes: nodes of --add-nodes, used only to count how many of the extra pods fit.
    live: the cluster as a workload; None for a trace.
    """

    workloads: list[SimulatedWorkload]
    demand: float | None
    extra_shapes: list[tuple[str, PodShape]] = field(default_factory=list)
    added_nodes: list[SimulatedNode] = field(default_factory=list)
    live: LiveWorkload | None = None


def run_simulation(settings: SimulationOptions, source: Path | KubeClient) -> None:
    """Simulate the trace in a folder, or the cluster, and print the results. Raises InvalidRequest."""
    if settings.plots is not None:
        plotting.check_pygal()
    world = _read_trace(source, settings) if isinstance(source, Path) else _read_cluster(source, settings)
    live = world.live if world.extra_shapes else None
    if settings.plots is not None:
        if live is None:
            plotting.prepare_folder(settings.plots)
        else:
            console.print_text("note: ignoring --plots: there is no plot of what fits in a cluster", err=True)
    if settings.is_churn:
        outcome = _simulate_churn(world, settings)
    elif live is not None:
        outcome = _count_fits(live, world, settings)
    else:
        outcome = _simulate_fill(world, settings)
    _print_outcome(outcome, world, settings)


def _read_trace(folder: Path, settings: SimulationOptions) -> _SimulatedWorld:
    workloads = [traces.read_trace(folder, name, settings.nodes) for name in settings.pods or ("default",)]
    specs = {spec for workload in workloads for spec in traces.requested_classes(workload)}
    world = _SimulatedWorld(workloads, settings.demand or DEMAND)
    models = [card.model for node in workloads[0].nodes for card in node.cards]
    return _add_simulated(
        world, settings, models, lambda card, _: replace(card, classes=traces.classes_of(card.model, specs))
    )


def _read_cluster(client: KubeClient, settings: SimulationOptions) -> _SimulatedWorld:
    live = liveworkload.read_cluster_for_simulation(client, settings.cardwise_namespace)
    for note in live.notes:
        console.print_text(f"note: {note}", err=True)
    if not live.nodes:
        raise click.ClickException("the cluster has no GPU that Cardwise shares: run `cardwise doctor` for the cause")
    world = _SimulatedWorld([live.workload()], settings.demand, live=live)
    world = _add_simulated(world, settings, live.models(), liveworkload.card_classifier(live))
    if not live.pods and not world.extra_shapes:
        raise click.ClickException("no pod of the cluster uses or waits for GPUs: use --pod to see what would fit")
    if not world.extra_shapes and not world.workloads[0].capacity:
        raise click.ClickException(
            "the cluster has no GPU to replay pods on: use --pod to see how many more devices fit"
        )
    return world


def _add_simulated(
    world: _SimulatedWorld,
    settings: SimulationOptions,
    models: Sequence[str],
    classify_card: Callable[[Card, str], Card],
) -> _SimulatedWorld:
    """Add the pods and nodes of `--pod` and `--add-nodes`. Raises InvalidRequest."""
    known_classes = world.live.classes if world.live is not None else {}
    world.extra_shapes = [
        shape
        for argument in settings.pod
        for shape in whatif.parse_shapes(argument, known_classes, unit=Unit(settings.gpu_mem_unit))
    ]
    models = list(dict.fromkeys(models))
    added_nodes = [
        node
        for i, argument in enumerate(settings.add_nodes)
        for node in whatif.parse_nodes(argument, i, models, classify_card)
    ]
    existing_classes = {
        class_name
        for node in (*world.workloads[0].nodes, *added_nodes)
        for card in node.cards
        for class_name in card.classes
    }
    for name, shape in world.extra_shapes:
        whatif.check_classes(name, shape, existing_classes | known_classes.keys())
    if world.extra_shapes:
        world.added_nodes = added_nodes
    elif added_nodes:
        world.workloads = [replace(argument, nodes=(*argument.nodes, *added_nodes)) for argument in world.workloads]
    return world


@dataclass(slots=True)
class _Outcome:
    """The output of a simulation: `table` for people, `rows` and `runs` for programs, `plots` by workload."""

    table: str
    rows: replays.Rows
    runs: list[dict[str, Any]]
    plots: Callable[[int], dict[str, bytes]]


def _plan_runs(world: _SimulatedWorld, settings: SimulationOptions) -> list[SimulationRun]:
    policies = settings.policy or CARD_POLICIES
    seeds = range(settings.seed, settings.seed + settings.seeds)
    return [
        SimulationRun(i, policy, seed) for i in range(len(world.workloads)) for policy in policies for seed in seeds
    ]


def _simulate_fill(world: _SimulatedWorld, settings: SimulationOptions) -> _Outcome:
    plan, workloads = _plan_runs(world, settings), world.workloads
    job = partial(
        simulate_fill,
        demand=world.demand,
        learning=not (
            settings.show_workload or world.live
        ),  # the extender of a live cluster has already learned from these pods
        extra_shapes=tuple(shape for _, shape in world.extra_shapes),
        added_nodes=tuple(world.added_nodes),
    )
    with _show_progress(sum(expected_arrivals(workloads[run.workload], world.demand) for run in plan)) as on_progress:
        fills = runs.run_all(
            job, workloads, plan, processes=settings.processes or runs.available_cores(), on_progress=on_progress
        )
    levels = sorted({level for workload in workloads for level in summary.reached_levels(workload, world.demand)})
    summaries = summary.summarize_fills(plan, fills, levels)
    table = replays.format_fills(workloads, summaries)
    if world.extra_shapes:
        fits = [
            (name, fill_summary.policy, fill_summary.fits[shape_index])
            for shape_index, (name, _) in enumerate(world.extra_shapes)
            for fill_summary in summaries
        ]
        table += f"\nMore pods that fit at the end:\n{replays.format_fitting_counts(fits)}"

    def plots(workload: int) -> dict[str, bytes]:
        workload_summaries = [fill_summary for fill_summary in summaries if fill_summary.workload == workload]
        curves = {
            fill_summary.policy: [(p.arrived, p.allocated, p.fragmented) for p in fill_summary.points]
            for fill_summary in workload_summaries
        }
        refused = {fill_summary.policy: fill_summary.refused for fill_summary in workload_summaries}
        return plotting.draw_plots("requested so far, in percent of all GPUs", curves, refused)

    rows = replays.fill_rows(workloads, plan, fills)
    return _Outcome(table, rows, replays.as_json(workloads, plan, fills), plots)


def _simulate_churn(world: _SimulatedWorld, settings: SimulationOptions) -> _Outcome:
    plan, workloads = _plan_runs(world, settings), world.workloads
    load, lifetimes = settings.load, settings.lifetimes
    job = partial(simulate_churn, load=load, lifetimes=lifetimes, learning=not (settings.show_workload or world.live))
    with _show_progress(
        sum(expected_churn_arrivals(workloads[run.workload], load, lifetimes) for run in plan)
    ) as on_progress:
        churns = runs.run_all(
            job, workloads, plan, processes=settings.processes or runs.available_cores(), on_progress=on_progress
        )
    summaries = summary.summarize_churns(plan, churns)

    def plots(workload: int) -> dict[str, bytes]:
        workload_summaries = [churn_summary for churn_summary in summaries if churn_summary.workload == workload]
        curves = {
            churn_summary.policy: [(m.time, m.allocated, m.fragmented) for m in churn_summary.samples]
            for churn_summary in workload_summaries
        }
        return plotting.draw_plots(
            "time, in mean lifetimes of a pod",
            curves,
            {churn_summary.policy: churn_summary.refused for churn_summary in workload_summaries},
        )

    rows = replays.churn_rows(workloads, plan, churns)
    return _Outcome(replays.format_churns(workloads, summaries), rows, replays.as_json(workloads, plan, churns), plots)


def _count_fits(live: LiveWorkload, world: _SimulatedWorld, settings: SimulationOptions) -> _Outcome:
    """Count how many more pods of each shape fit into the present cluster. The outcome has no plots."""
    counts_by_policy = []
    shapes = [shape for _, shape in world.extra_shapes]
    for policy in settings.policy or CARD_POLICIES:
        cluster, note = engine.simulate_present(live, policy, live.holdings, shapes)
        if note:
            console.print_text(f"note: {note}", err=True)
        counts_by_policy.append((policy, cluster.count_fitting(shapes, world.added_nodes)))
    fits = [
        (name, policy, counts[i])
        for i, (name, _) in enumerate(world.extra_shapes)
        for policy, counts in counts_by_policy
    ]
    if live.pending_count:
        console.print_text(f"note: {live.pending_count} pending pods may take some of that capacity first", err=True)
    keys = ["pod", "policy", "now", "added"]
    rows = [keys[: 2 + len(counts)] for _, _, counts in fits[:1]] + [
        [name, policy, *map(str, counts)] for name, policy, counts in fits
    ]
    runs = [dict(zip(keys, (name, policy, *counts), strict=False)) for name, policy, counts in fits]
    return _Outcome(replays.format_fitting_counts(fits), rows, runs, lambda _: {})


def _print_outcome(outcome: _Outcome, world: _SimulatedWorld, settings: SimulationOptions) -> None:
    if settings.output == "json":
        console.print_data(json.dumps({"runs": outcome.runs}, indent=2))
    elif settings.output == "csv":
        console.print_data(replays.as_csv(outcome.rows), nl=False)
    else:
        console.print_lines(outcome.table)
    if settings.plots is not None:
        for i, workload in enumerate(world.workloads):
            prefix = f"{workload.name}-churn" if settings.is_churn else workload.name
            for path in plotting.write_plots(settings.plots, prefix, outcome.plots(i)):
                console.print_text(f"wrote {path}", err=True)


@contextmanager
def _show_progress(pods: int) -> Iterator[OnProgress]:
    """Show a progress bar on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=pods, label="simulating", file=sys.stderr, show_pos=True) as bar:
        yield bar.update
