"""The program of `cardwise simulate`: reads a trace or a cluster, simulates it, and shows the results."""

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
from cardwise.cli.cluster import snapshots, whatif
from cardwise.cli.cluster.snapshots import Snapshot
from cardwise.cli.render import plotting, replays
from cardwise.core.api import names
from cardwise.core.api.cards import Card
from cardwise.core.api.policies import POLICIES
from cardwise.core.placement.scored.workload import InvalidWorkload
from cardwise.core.values.quantity import Unit
from cardwise.kube.client import KubeClient
from cardwise.simulation import runs, summary, traces
from cardwise.simulation.churn import churn
from cardwise.simulation.churn import expected_arrivals as expected_churn_arrivals
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.defaults import TUNE
from cardwise.simulation.fill import OnProgress, expected_arrivals, fill
from cardwise.simulation.runs import Run
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """The options of `cardwise simulate`."""

    pods: tuple[str, ...]
    nodes: str
    policy: tuple[str, ...]
    seeds: int
    seed: int
    tune: float | None
    known: bool
    leaving: bool
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
class _World:
    """What is simulated. `added` are nodes that are there only for what fits beside; `live` is the cluster."""

    workloads: list[SimulatedWorkload]
    tune: float | None
    more: list[tuple[str, PodShape]] = field(default_factory=list)
    added: list[SimulatedNode] = field(default_factory=list)
    live: Snapshot | None = None


def show(asked: SimulationOptions, of: Path | KubeClient) -> None:
    """Simulates the trace in a folder, or the cluster, and prints what came out. Raises InvalidRequest."""
    if asked.plots is not None:
        plotting.check()
    world = _of_trace(of, asked) if isinstance(of, Path) else _of_cluster(of, asked)
    live = world.live if world.more else None
    if asked.plots is not None:
        if live is None:
            plotting.prepare(asked.plots)
        else:
            console.say("note: --plots is left out: of what fits in a cluster nothing is drawn", err=True)
    if asked.leaving:
        outcome = _churned(world, asked)
    elif live is not None:
        outcome = _what_fits(live, world, asked)
    else:
        outcome = _filled(world, asked)
    _show(outcome, world, asked)


def _of_trace(folder: Path, asked: SimulationOptions) -> _World:
    workloads = [traces.read_trace(folder, name, asked.nodes) for name in asked.pods or ("default",)]
    specs = {spec for workload in workloads for spec in traces.requested_classes(workload)}
    world = _World(workloads, asked.tune or TUNE)
    models = [card.model for node in workloads[0].nodes for card in node.cards]
    return _completed(world, asked, models, lambda card, _: replace(card, classes=traces.classes_of(card.model, specs)))


def _of_cluster(client: KubeClient, asked: SimulationOptions) -> _World:
    live = snapshots.take(client, asked.cardwise_namespace)
    for note in live.notes:
        console.say(f"note: {note}", err=True)
    if not live.nodes:
        raise click.ClickException("the cluster has no card that Cardwise shares: `cardwise doctor` says why")
    world = _World([live.workload()], asked.tune, live=live)
    world = _completed(world, asked, live.models(), snapshots.classified(live))
    if not live.pods and not world.more:
        raise click.ClickException("no pod of the cluster uses cards or waits for some: --pod asks what would fit")
    if not world.more and not world.workloads[0].capacity:
        raise click.ClickException("the cluster has no GPU to replay pods on: --pod asks how many more devices fit")
    return world


def _completed(
    world: _World, asked: SimulationOptions, models: Sequence[str], named: Callable[[Card, str], Card]
) -> _World:
    """With the pods and nodes that are not there yet. Raises InvalidRequest."""
    known = world.live.classes if world.live is not None else {}
    world.more = [shape for one in asked.pod for shape in whatif.shapes(one, known, unit=Unit(asked.gpu_mem_unit))]
    models = list(dict.fromkeys(models))
    added = [node for i, one in enumerate(asked.add_nodes) for node in whatif.nodes(one, i, models, named)]
    there = {of for node in (*world.workloads[0].nodes, *added) for card in node.cards for of in card.classes}
    for name, shape in world.more:
        whatif.check_classes(name, shape, there | known.keys())
    if world.more:
        world.added = added
    elif added:
        world.workloads = [replace(one, nodes=(*one.nodes, *added)) for one in world.workloads]
    return world


@dataclass(slots=True)
class _Outcome:
    """What is shown: `table` for people, `rows` and `runs` for programs, `plots` by workload."""

    table: str
    rows: replays.Rows
    runs: list[dict[str, Any]]
    plots: Callable[[int], dict[str, bytes]]


def _plan(world: _World, asked: SimulationOptions) -> list[Run]:
    policies = asked.policy or sorted(POLICIES)
    seeds = range(asked.seed, asked.seed + asked.seeds)
    return [Run(i, policy, seed) for i in range(len(world.workloads)) for policy in policies for seed in seeds]


def _filled(world: _World, asked: SimulationOptions) -> _Outcome:
    plan, workloads = _plan(world, asked), world.workloads
    job = partial(
        fill,
        tune=world.tune,
        learning=not (asked.known or world.live),  # what is simulated of a cluster is what its extender has seen
        extra_shapes=tuple(shape for _, shape in world.more),
        added_nodes=tuple(world.added),
    )
    with _progress(sum(expected_arrivals(workloads[run.workload], world.tune) for run in plan)) as on_progress:
        results = runs.run_all(
            job, workloads, plan, processes=asked.processes or runs.available_cores(), on_progress=on_progress
        )
    levels = sorted({level for workload in workloads for level in summary.reached_levels(workload, world.tune)})
    found = summary.summarize_fills(plan, results, levels)
    table = replays.of_fills(workloads, found)
    if world.more:
        fits = [(name, one.policy, one.fits[i]) for i, (name, _) in enumerate(world.more) for one in found]
        table += f"\nMore pods that fit at the end:\n{replays.of_fits(fits)}"

    def plots(of: int) -> dict[str, bytes]:
        shown = [one for one in found if one.workload == of]
        curves = {one.policy: [(p.arrived, p.allocated, p.fragmented) for p in one.points] for one in shown}
        refused = {one.policy: one.refused for one in shown}
        return plotting.draw("asked for so far, in percent of all cards", curves, refused)

    rows = replays.fill_rows(workloads, plan, results)
    return _Outcome(table, rows, replays.as_json(workloads, plan, results), plots)


def _churned(world: _World, asked: SimulationOptions) -> _Outcome:
    plan, workloads = _plan(world, asked), world.workloads
    load, lifetimes = asked.load, asked.lifetimes
    job = partial(churn, load=load, lifetimes=lifetimes, learning=not (asked.known or world.live))
    with _progress(
        sum(expected_churn_arrivals(workloads[run.workload], load, lifetimes) for run in plan)
    ) as on_progress:
        results = runs.run_all(
            job, workloads, plan, processes=asked.processes or runs.available_cores(), on_progress=on_progress
        )
    found = summary.summarize_churns(plan, results)

    def plots(of: int) -> dict[str, bytes]:
        shown = [one for one in found if one.workload == of]
        curves = {one.policy: [(m.time, m.allocated, m.fragmented) for m in one.moments] for one in shown}
        return plotting.draw("time, in mean lifetimes of a pod", curves, {one.policy: one.refused for one in shown})

    rows = replays.churn_rows(workloads, plan, results)
    return _Outcome(replays.of_churns(workloads, found), rows, replays.as_json(workloads, plan, results), plots)


def _what_fits(live: Snapshot, world: _World, asked: SimulationOptions) -> _Outcome:
    """How many more of each shape have room in the cluster as it is. Nothing is drawn of that."""
    found = []
    shapes = [shape for _, shape in world.more]
    for policy in asked.policy or sorted(POLICIES):
        cluster = SimulatedCluster(live.nodes, policy)
        for holding in live.holdings:
            cluster.add_assigned_pod(holding)
        _teach(cluster, live, shapes)
        found.append((policy, cluster.count_fitting(shapes, world.added)))
    fits = [(name, policy, counts[i]) for i, (name, _) in enumerate(world.more) for policy, counts in found]
    if live.waiting:
        console.say(f"note: {live.waiting} pods wait, and may take some of that room first", err=True)
    heads = ["pod", "policy", "now", "added"]
    rows = [heads[: 2 + len(counts)] for _, _, counts in fits[:1]] + [
        [name, policy, *map(str, counts)] for name, policy, counts in fits
    ]
    runs = [dict(zip(heads, (name, policy, *counts), strict=False)) for name, policy, counts in fits]
    return _Outcome(replays.of_fits(fits), rows, runs, lambda _: {})


def _teach(cluster: SimulatedCluster, live: Snapshot, shapes: Sequence[PodShape]) -> None:
    """What the extender has learned, or where that is not known, what is there, or else what is asked about."""
    if live.learned:
        try:
            cluster.load_workload(live.learned)
        except InvalidWorkload as error:
            console.say(f"note: the ConfigMap {names.WORKLOAD} is not used: {error}", err=True)
        else:
            return
    cluster.set_workload([pod.shape for pod in live.pods] or shapes)


def _show(outcome: _Outcome, world: _World, asked: SimulationOptions) -> None:
    if asked.output == "json":
        console.data(json.dumps({"runs": outcome.runs}, indent=2))
    elif asked.output == "csv":
        console.data(replays.as_csv(outcome.rows), nl=False)
    else:
        console.show(outcome.table)
    if asked.plots is not None:
        for i, workload in enumerate(world.workloads):
            prefix = f"{workload.name}-churn" if asked.leaving else workload.name
            for path in plotting.write(asked.plots, prefix, outcome.plots(i)):
                console.say(f"wrote {path}", err=True)


@contextmanager
def _progress(pods: int) -> Iterator[OnProgress]:
    """A bar on a terminal, where it does not stand between what is printed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=pods, label="simulating", file=sys.stderr, show_pos=True) as bar:
        yield bar.update
