"""`cardwise nodes`: each node's GPUs and free memory, and how much of the free memory is fragmented.

`cardwise.core.defrag.fragmentation` measures fragmentation. This module is imported only when the command runs.
Otherwise all other commands would wait for numpy.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import cordons, liveworkload, nodestates, published, visible
from cardwise.cli.render import inspecttable, printing, tables, visibletable
from cardwise.core.api import names
from cardwise.core.api.cards import POSITION_BITS
from cardwise.core.api.request import Load
from cardwise.core.placement import totals
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.decoded import Json
from cardwise.kube import clusterstate, errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.clusterstate import ClusterState
from cardwise.simulation.workload import UNLIMITED_LOAD

if TYPE_CHECKING:
    from cardwise.core.defrag.fragmentation import Memory
    from cardwise.core.placement.scored.shapes import RequestSize

_CLUSTER_ROW_NAME = "CLUSTER"  # the name in the row of the whole cluster; no node can have this name
_OPTIONAL_COLUMNS = ("PODS", "FRAGMENTED(MiB)")  # columns that are left out on a narrow terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """A node, or the whole cluster.

    largest: MiB of the largest share that still fits on one card.
    mps: the MPS states of the cards.
    isolation: what limits the memory of shares on the cards, as `MemoryTier`s.
    only_namespaces: the namespaces whose pods alone may share a card, by card.
    unschedulable_reason: why the whole node takes no new pods; "" if it takes new pods.
    usable: the number of cards that take new pods.
    """

    name: str
    models: tuple[str, ...]
    cards: int
    unhealthy: tuple[str, ...]
    cordoned: tuple[str, ...]
    empty: int
    largest: int
    pods: int
    mps: tuple[str, ...]
    isolation: tuple[str, ...]
    memory: "Memory"
    only_namespaces: Mapping[str, str]
    unschedulable_reason: str = ""
    usable: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """All nodes, sorted by name.

    fragmentation_basis: the expected pods that the fragmentation is computed for: "learned" or "running"; None if both
        are unknown.
    notes: which numbers are inexact, and why.
    """

    nodes: list[NodeSummary]
    cluster: NodeSummary
    classes: "Mapping[str, Memory]"
    fragmentation_basis: str | None
    notes: list[str]

    def format_fragmented(self, memory: "Memory") -> str:
        """The fragmented MiB and their percentage; "-" if they are unknown."""
        return f"{round(memory.fragmented)} ({round(memory.percent)}%)" if self.fragmentation_basis else "-"


@click.command()
@options.cluster
@options.output
@options.cardwise_namespace
@click.argument("node", nargs=-1)
def nodes(output: str, cardwise_namespace: str, node: tuple[str, ...]) -> None:
    """Show the GPUs of each NODE and what still fits there: MiB, whole free GPUs, fragmentation, isolation, pods.

    GPUS: GPUs that take new pods/all GPUs. FREE-GPUS: those that no pod uses. LARGEST: the largest share that still
    fits on one GPU. FRAGMENTED: free MiB that a typical pod cannot use. ISOLATION: what limits the memory of shares.
    The last line is the whole cluster.
    """
    client = options.load_client()
    try:
        cluster_state = clusterstate.read_cluster_state(client, addresses=False, own_namespace=client.namespace)
    except errors.Forbidden as error:
        visibletable.print_visible(visible.read_visible(client, error, node), error, output)
        return
    available = [state.name for state in inspecttable.nodes_with_cards(cluster_state.ledger)]
    missing = [name for name in node if name not in available]
    if missing:
        available_text = ", ".join(available) or "none"
        raise click.ClickException(
            f"node {missing[0]!r} has no GPU that Cardwise shares; nodes that have: {available_text}"
        )
    summary = summarize_cluster(client, cluster_state, cardwise_namespace)
    for card in cordons.abandoned_defrag_cordons(cluster_state.resources, client.server_time()):
        summary.notes.append(
            f"{cordons.describe_card(card)} was cordoned{cordons.author_suffix(card)} by a defrag; if that is no "
            f"longer running, uncordon it: {cordons.uncordon_command(card)}"
        )
    for note in summary.notes:
        console.print_text(f"note: {note}", err=True)
    printing.print_cluster_warnings(cluster_state)
    if output in ("json", "yaml"):
        printing.print_object(as_json(summary, node), output)
    else:
        console.print_lines(table(summary, node, console.terminal_columns(), wide=output == "wide"))


def summarize_cluster(
    client: KubeClient, cluster_state: ClusterState, cardwise_namespace: str = names.NAMESPACE
) -> ClusterSummary:
    """Read what `ClusterState` does not contain, and summarize. Raises `KubeError`."""
    from cardwise.core.defrag import fragmentation  # noqa: PLC0415 - see above

    free_loads, reasons, loads_note = _read_free_loads(client)
    request_weights, typical, requests_note = _read_requests(client, cluster_state, cardwise_namespace)
    fragments = fragmentation.Fragments(fragmentation.typical_pods(request_weights, cluster_state.ledger.kinds))
    cordoned = {state.name: _cordoned_cards(state) for state in cluster_state.ledger.nodes()}
    for name in reasons:  # the node's free memory cannot be used, so it counts neither as free nor as fragmented
        if (node := cluster_state.ledger.node(name)) is not None:
            cluster_state.ledger.set_cards(name, [replace(card, cordoned=True) for card in node.cards])
    states = inspecttable.nodes_with_cards(cluster_state.ledger)
    for state in states:
        fragments.set_node(state.name, state, free_loads.get(state.name, UNLIMITED_LOAD))
    mps: dict[str, set[str]] = {}
    tiers: dict[str, set[str]] = {}
    for resource in cluster_state.resources:
        if resource.status.mps is not None:
            mps.setdefault(resource.spec.node, set()).add(resource.status.mps.state)
        if resource.status.isolation is not None:
            tiers.setdefault(resource.spec.node, set()).add(resource.status.isolation.memory)
    summaries = [
        replace(
            _summarize_node(cluster_state, state, fragments.memory_of_node(state.name)),
            mps=tuple(sorted(mps.get(state.name, ()))),
            isolation=tuple(sorted(tiers.get(state.name, ()))),
            cordoned=cordoned[state.name],
            unschedulable_reason=reasons.get(state.name, ""),
        )
        for state in states
    ]
    cluster = _summarize_all(summaries, fragments.total())
    notes = nodestates.describe_unschedulable(
        {node.name: node.unschedulable_reason for node in summaries if node.unschedulable_reason}
    )
    notes += filter(None, (loads_note, requests_note))
    return ClusterSummary(summaries, cluster, fragments.memory_by_class(cluster_state.ledger.kinds), typical, notes)


def _read_free_loads(client: KubeClient) -> tuple[Mapping[str, Load], Mapping[str, str], str | None]:
    """Read the nodes.

    Returns their free CPU, memory and the like, why a node takes no new pods, and a note on failed reads.
    """
    try:
        nodes = list(client.list_objects(paths.nodes()))
        free_loads = liveworkload.free_loads(nodes, client.list_objects(paths.pods()))
    except errors.Forbidden as error:
        return {}, {}, liveworkload.describe_unlimited_loads(error)
    return free_loads, nodestates.unschedulable_reasons(nodes), None


def _cordoned_cards(state: NodeState) -> tuple[str, ...]:
    return tuple(str(card.index) for card in state.cards if card.cordoned)


def _read_requests(
    client: KubeClient, cluster_state: ClusterState, cardwise_namespace: str
) -> "tuple[Mapping[RequestSize, float], str | None, str | None]":
    """Return the requests of typical pods, with their weights.

    These are the requests that the extender has learned; if they are unknown, the requests of the pods that hold cards
    now. Also returns the `fragmentation_basis` and the note of `ClusterSummary`.
    """
    from cardwise.core.defrag import fragmentation  # noqa: PLC0415 - see above
    from cardwise.core.placement.scored.workload import InvalidWorkload, Workload  # noqa: PLC0415 - see above

    settings = published.read_published(client, cardwise_namespace)
    reason = settings.note or "the extender has not seen enough pods yet"
    if settings.workload:
        learned = Workload()
        try:
            learned.load(settings.workload)
        except InvalidWorkload as error:
            reason = f"the extender's saved data cannot be read ({error})"
        asks = fragmentation.only_card_requests(learned.counts)
        if asks:
            return asks, "learned", None
    held_requests = fragmentation.count_requests(
        holding for holding in cluster_state.ledger.holdings() if holding.namespace != clusterstate.OTHER_NAMESPACES
    )
    if held_requests:
        return (
            held_requests,
            "running",
            f"fragmentation is measured with the requests of the pods that hold GPUs now: {reason}",
        )
    return {}, None, f"fragmentation cannot be measured, because no pod that uses GPUs is known: {reason}"


def _summarize_node(cluster_state: ClusterState, state: NodeState, memory: "Memory") -> NodeSummary:
    """Summarize the node by the ledger; without the states and tiers of its cards."""
    ascending = state.codes_fullest_first()
    return NodeSummary(
        name=state.name,
        models=tuple(dict.fromkeys(card.model or "unknown" for card in state.cards)),
        cards=len(state.cards),
        unhealthy=tuple(str(card.index) for card in state.cards if not card.healthy),
        cordoned=_cordoned_cards(state),
        empty=sum(state.is_empty(i) for i in range(len(state.cards))),
        largest=max(0, ascending[-1] >> POSITION_BITS) if ascending else 0,
        pods=sum(bool(holding.assignment.containers) for holding in cluster_state.ledger.holdings(state.name)),
        mps=(),
        isolation=(),
        memory=memory,
        only_namespaces={
            str(state.cards[i].index): namespace
            for i, namespace in sorted(totals.only_namespaces(cluster_state.ledger, state).items())
        },
        usable=sum(card.healthy and not card.cordoned for card in state.cards),
    )


def _summarize_all(nodes: Sequence[NodeSummary], memory: "Memory") -> NodeSummary:
    return NodeSummary(
        name=_CLUSTER_ROW_NAME,
        models=tuple(sorted({model for node in nodes for model in node.models})),
        cards=sum(node.cards for node in nodes),
        unhealthy=tuple(f"{node.name}/{index}" for node in nodes for index in node.unhealthy),
        cordoned=tuple(f"{node.name}/{index}" for node in nodes for index in node.cordoned),
        empty=sum(node.empty for node in nodes),
        largest=max((node.largest for node in nodes), default=0),
        pods=sum(node.pods for node in nodes),
        mps=tuple(sorted({state for node in nodes for state in node.mps})),
        isolation=tuple(sorted({tier for node in nodes for tier in node.isolation})),
        memory=memory,
        only_namespaces={
            f"{node.name}/{index}": namespace for node in nodes for index, namespace in node.only_namespaces.items()
        },
        usable=sum(node.usable for node in nodes),
    )


def table(
    summary: ClusterSummary, only: Collection[str] = (), columns: int | None = None, *, wide: bool = False
) -> str:
    """Format one row for each node and one for the cluster.

    only: the nodes to print; empty for all.
    columns: the width of the terminal.
    wide: whether to print also unhealthy and cordoned cards, cards of one namespace, models, and a table of the
        classes.
    """
    heads = ["NAME", "GPUS", "USED/TOTAL(MiB)", "FREE-GPUS", "LARGEST", "FRAGMENTED(MiB)", "ISOLATION", "PODS"]
    rows = [[*heads, "UNHEALTHY", "CORDONED", "ONLY-NAMESPACE", "MODELS"] if wide else heads]
    for view in _select_summaries(summary, only):
        memory = view.memory
        row = [view.name, f"{view.usable}/{view.cards}", f"{memory.used}/{memory.total}", str(view.empty)]
        row += [str(view.largest), summary.format_fragmented(memory), ",".join(view.isolation) or "-", str(view.pods)]
        only_namespaces = ",".join(f"{card}:{namespace}" for card, namespace in view.only_namespaces.items())
        wide_cells = [",".join(view.unhealthy) or "-", ",".join(view.cordoned) or "-", only_namespaces or "-"]
        wide_cells.append(", ".join(view.models))
        rows.append([*row, *wide_cells] if wide else row)
    return (
        tables.stack_tables([rows, _class_rows(summary)])
        if wide
        else tables.fit_columns(rows, columns, _OPTIONAL_COLUMNS)
    )


def _class_rows(summary: ClusterSummary) -> list[list[str]]:
    rows = [["CLASS", "USED/TOTAL(MiB)", "FREE(MiB)", "FRAGMENTED(MiB)"]]
    for name, memory in sorted(summary.classes.items()):
        rows.append([name, f"{memory.used}/{memory.total}", str(memory.free), summary.format_fragmented(memory)])
    return rows


def as_json(summary: ClusterSummary, only: Collection[str] = ()) -> Json:
    """The output as JSON, with all fields."""
    measured = bool(summary.fragmentation_basis)
    *node_objects, cluster = [_summary_as_json(view, measured=measured) for view in _select_summaries(summary, only)]
    del cluster["name"], cluster["unschedulableReason"]
    of_classes = [
        {"name": name, **_memory_as_json(memory, measured=measured)} for name, memory in sorted(summary.classes.items())
    ]
    return {
        "nodes": node_objects,
        "classes": of_classes,
        "cluster": cluster,
        "typicalPods": summary.fragmentation_basis,
    }


def _memory_as_json(memory: "Memory", *, measured: bool) -> Json:
    return {
        "memoryMiB": memory.total,
        "usedMiB": memory.used,
        "freeMiB": memory.free,
        "fragmentedMiB": round(memory.fragmented) if measured else None,
        "fragmentedPercent": round(memory.percent, 1) if measured else None,
    }


def _select_summaries(summary: ClusterSummary, only: Collection[str]) -> list[NodeSummary]:
    return [*(view for view in summary.nodes if not only or view.name in only), summary.cluster]


def _summary_as_json(view: NodeSummary, *, measured: bool) -> Json:
    return {
        "name": view.name,
        "models": list(view.models),
        "gpus": view.cards,
        "unhealthyGPUs": list(view.unhealthy),
        "cordonedGPUs": list(view.cordoned),
        "onlyNamespaces": dict(view.only_namespaces),
        **_memory_as_json(view.memory, measured=measured),
        "freeGPUs": view.empty,
        "largestFreeMiB": view.largest,
        "mps": list(view.mps),
        "isolation": list(view.isolation),
        "pods": view.pods,
        "unschedulableReason": view.unschedulable_reason,
    }
