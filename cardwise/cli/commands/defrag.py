"""`cardwise defrag`: finds pods to move until a big request fits again, and moves them one at a time.

`cardwise.core.defrag.defrag` searches for the pods with the extender's engine. Both are imported only when the command
runs. Otherwise all other commands would wait for numpy.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import click
import msgspec

from cardwise.cli import console, options, signals
from cardwise.cli.cluster import cordons, evicting, liveworkload, movables, published, whatif, workloads
from cardwise.cli.options import DURATION
from cardwise.cli.render import printing, tables
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.defrag.defrag import MovePlan, plan
from cardwise.core.defrag.moving import DefragGoal, MovablePod, Move, WhatIfCluster
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from cardwise.kube import clusterstate, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.extendedresources import ExtendedResource
from cardwise.kube.pods import budgets
from cardwise.simulation.workload import PodShape

_FIT: Final = "--fit"
_HELP: Final = """Find the fewest pods to move so that whole GPUs are free, or pods of a shape fit.

    With --evict it moves them, one after another. Only pods that a controller recreates are moved: no bare pods, no
    pods of DaemonSets or gangs, none that a PodDisruptionBudget protects, and none with the annotation
    cardwise.dev/no-defrag: "true". The plan follows the extender's placement. Where that saves moves, the GPUs that
    pods leave are cordoned until all have moved. Exits with status 1 if there is no such plan, or if the plan fails
    because the cluster has changed.

    \b
    cardwise defrag --free-gpus 2               which pods would have to move
    cardwise defrag --fit gpu-mem=8138,cpu=2x4   capacity for four more of these
    cardwise defrag --free-gpus 1 --class nvidia.l4 --max-moves 3 --evict
"""
_SHAPE_AND_COUNT: Final = re.compile(r"(.+)x([0-9]+)", re.DOTALL)
_MAX_FITS: Final = 1000
_UNKNOWN_LIMITS: Final = (
    "warning: the extender's limits per GPU are unknown (headroomMiB, maxClients, coreOvercommit): if one of them is "
    "set, pods may be moved to a GPU that the extender then considers full"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefragRequest:
    """The user's request: the pods or cards that must fit.

    text: the request in words, such as "2 whole cards".
    spec: the spec of a pod that must fit, as the user wrote it; empty without a pod.
    """

    text: str
    request: PodRequest
    load: Load
    count: int
    resource_class: str
    namespace: str | None
    max_moves: int | None
    cordon: bool
    spec: Json


@dataclass(frozen=True, slots=True)
class DefragOutcome:
    """A plan, with the pods that may be moved.

    excluded_nodes: how many nodes the request cannot use, such as "1 of 4 nodes with cards"; None if it can use all.
    """

    request: DefragRequest
    plan: MovePlan
    movable: movables.MovablePods
    excluded_nodes: str | None = None

    def steps(self) -> Iterator[tuple[Move, MovablePod, Json, int]]:
        """Yield each move, its pod, the pod's controller, and how often the request fits after the move."""
        by_uid = {pod.uid: pod for pod in self.movable.pods}
        for move, fit_count in zip(self.plan.moves, self.plan.fit_counts[1:], strict=True):
            pod = by_uid[move.before.uid]
            yield move, pod, workloads.controller_of(self.movable.objects[pod.uid]), fit_count

    def needless_cordons(self, cordoned: Iterable[ExtendedResource]) -> list[ExtendedResource]:
        """Return the cards in `cordoned` that may be uncordoned, because the plan does not need them."""
        moves = self.plan.moves if self.plan.cordons and self.is_reached else ()
        uuids = {share.uuid for move in moves for share in move.before.assignment.shares()}
        return [card for card in cordoned if card.spec.uuid not in uuids]

    @property
    def is_reached(self) -> bool:
        return self.plan.fit_counts[-1] >= self.request.count


@click.command("defrag", help=_HELP)
@options.cluster
@click.option("--free-gpus", type=click.IntRange(1, _MAX_FITS), metavar="N", help="How many whole GPUs to free.")
@click.option(
    "--fit", metavar="SHAPE[xN]", help="Free capacity for N pods of this shape (as --pod of cardwise simulate)."
)
@options.gpu_mem_unit
@click.option("--class", "resource_class", default="", metavar="NAME", help="Free GPUs of this ResourceClass only.")
@click.option("-n", "--namespace", help="Move pods of this namespace only.")
@click.option("--max-moves", type=click.IntRange(1), metavar="N", help="Move at most N pods.")
@click.option(
    "--cordon/--no-cordon",
    default=True,
    show_default=True,
    help="Cordon the GPUs that pods leave if that saves moves.",
)
@click.option(
    "--dry-run/--evict",
    "dry_run",
    default=True,
    show_default=True,
    help="Whether to carry out the plan. Default: only show it.",
)
@click.option(
    "--timeout",
    type=DURATION,
    default="5m",
    show_default=True,
    help="With --evict: how long to wait for permission to evict a pod, and then for its replacement to be ready.",
)
@options.plain_output
@options.cardwise_namespace
def defrag(
    *,
    cardwise_namespace: str,
    free_gpus: int | None,
    fit: str | None,
    gpu_mem_unit: str,
    resource_class: str,
    namespace: str | None,
    max_moves: int | None,
    cordon: bool,
    dry_run: bool,
    timeout: float,
    output: str,
) -> None:
    if (free_gpus is None) is (fit is None):
        raise click.UsageError("write either --free-gpus N or --fit SHAPE")
    client = options.load_client()
    clock = options.current_clock()
    settings = published.read_published(client, cardwise_namespace)
    cluster_state = clusterstate.read_cluster_state(
        client, addresses=False, with_unknown_holders=True, limits=settings.limits
    )
    try:
        defrag_request = _parse_request(
            cluster_state,
            free_gpus,
            fit,
            resource_class,
            unit=Unit(gpu_mem_unit),
            namespace=namespace,
            max_moves=max_moves,
            cordon=cordon,
        )
    except InvalidRequest as error:
        raise click.ClickException(str(error)) from error
    if settings.note:
        console.print_text(f"note: assuming that the extender's policy is {settings.policy}: {settings.note}", err=True)
    abandoned = _ignore_cordons_of_defrag(cluster_state)
    for card in abandoned:
        next_step = "--evict uncordons it or takes it over" if dry_run else "it will be uncordoned or taken over"
        author = cordons.author_suffix(card)
        console.print_text(
            f"note: {cordons.describe_card(card)} was cordoned{author} by another defrag and counts as free: "
            f"{next_step}",
            err=True,
        )
    outcome = _search_plan(client, cluster_state, defrag_request, settings, client.server_time())
    if output == "table":
        console.print_lines(format_outcome(outcome))
    else:
        printing.print_object(as_json(outcome), output)
    move_run = evicting.MoveRun(client, timeout, clock)
    if not dry_run:
        for card in outcome.needless_cordons(abandoned):
            move_run.restore_card(card, card.spec.cordon)
    if not outcome.is_reached:
        sys.exit(1)
    if outcome.plan.moves and dry_run:
        console.print_text("nothing was changed; --evict moves them", err=True)
    elif outcome.plan.moves:
        if settings.known_limits is None:
            console.print_text(_UNKNOWN_LIMITS, err=True)
        _execute_plan(move_run, outcome)
        new_state = clusterstate.read_cluster_state(client, addresses=False, limits=settings.limits)
        fits_after = _search_plan(client, new_state, defrag_request, settings, client.server_time()).plan.fit_counts[0]
        if fits_after < defrag_request.count:
            raise click.ClickException(
                f"all pods have moved, but {_describe_fits(fits_after, defrag_request)}: other pods have been placed "
                "meanwhile"
            )
        console.print_text(f"done: {_describe_fits(fits_after, defrag_request)}", err=True)


def _parse_request(
    cluster_state: clusterstate.ClusterState,
    cards: int | None,
    fit: str | None,
    resource_class: str,
    *,
    unit: Unit,
    namespace: str | None,
    max_moves: int | None,
    cordon: bool,
) -> DefragRequest:
    """Parse the options that name the pods or cards that must fit. Raises InvalidRequest."""
    class_names = {name for node in cluster_state.ledger.nodes() for card in node.cards for name in card.classes}
    if cards is not None:
        container = ContainerRequest(key="0", name="main", cards=1, resource_class=resource_class)
        shape = PodShape(PodRequest(containers=(container,)), Load(0, 0, 0))
        whatif.check_classes(resource_class, shape, class_names, "--class")
        spec: Json = {}
        text, count = f"free whole GPU{' of class ' * bool(resource_class)}{resource_class}", cards
    else:
        count, pod = _parse_fit_option(cluster_state, fit or "", resource_class, unit)
        text, shape, spec = f"pod {pod.name}", pod.shape, pod.spec
        whatif.check_classes(text, shape, class_names, _FIT)
    if shape.request is None:
        raise InvalidRequest(_FIT, "the pod requests no GPU", "write, for example, gpu-mem=8138")
    return DefragRequest(
        text=text,
        request=shape.request,
        load=shape.load,
        count=count,
        resource_class=resource_class,
        namespace=namespace,
        max_moves=max_moves,
        cordon=cordon,
        spec=spec,
    )


def _ignore_cordons_of_defrag(cluster_state: clusterstate.ClusterState) -> list[ExtendedResource]:
    """Treat cards that an earlier defrag has cordoned as not cordoned, and return them."""
    abandoned = [card for card in cluster_state.resources if cordons.is_cordoned_by_defrag(card)]
    uuids = {card.spec.uuid for card in abandoned}
    for name in {card.spec.node for card in abandoned}:
        if (node := cluster_state.ledger.node(name)) is not None:
            cards = [replace(card, cordoned=card.cordoned and card.uuid not in uuids) for card in node.cards]
            cluster_state.ledger.set_cards(name, cards)
    return abandoned


def _execute_plan(move_run: evicting.MoveRun, outcome: DefragOutcome) -> None:
    """Carry out the moves. Raises `ClickException` at any deviation from the plan, and `KubeError`."""
    with signals.raise_on_signals(), ExitStack() as stack:
        for i, move in enumerate(outcome.plan.moves, 1):
            if outcome.plan.cordons:
                move_run.cordon_cards(move.before, stack)
            move_run.move_pod(move, outcome.movable.objects[move.before.uid], f"{i}/{len(outcome.plan.moves)}")


def _parse_fit_option(
    cluster_state: clusterstate.ClusterState, fit: str, resource_class: str, unit: Unit
) -> tuple[int, whatif.NamedPod]:
    """Return the wanted number of pods, and one such pod. Raises InvalidRequest."""
    count_match = _SHAPE_AND_COUNT.fullmatch(fit)
    shape_text, count = (
        (count_match[1], int(count_match[2])) if count_match is not None and not Path(fit).is_file() else (fit, 1)
    )
    if not 1 <= count <= _MAX_FITS:
        raise InvalidRequest(f"{_FIT} {fit}", f"{count} pods are out of range", f"write 1 to {_MAX_FITS}")
    if resource_class and "=" not in shape_text:
        raise InvalidRequest(f"{_FIT} {fit}", "the pod of a file names its class itself", "leave --class out")
    with_class = f"{shape_text},class={resource_class}" if resource_class else shape_text
    pods = whatif.parse_pods(with_class, cluster_state.classes, _FIT, unit=unit)
    if len(pods) > 1:
        pod_names = ", ".join(pod.name for pod in pods)
        raise InvalidRequest(f"{_FIT} {fit}", f"has several pods ({pod_names})", "write each into its own file")
    return count, pods[0]


def _search_plan(
    client: KubeClient,
    cluster_state: clusterstate.ClusterState,
    defrag_request: DefragRequest,
    settings: published.PublishedPolicy,
    now: datetime,
) -> DefragOutcome:
    """Read what `ClusterState` does not contain, and search for a plan. Raises `KubeError`."""
    from cardwise.cli.cluster.engine import ClusterEngine  # noqa: PLC0415 - see above

    nodes, pods = list(client.list_objects(paths.nodes())), list(client.list_objects(paths.pods()))
    listed_jobs = client.list_objects(paths.jobs()) if movables.has_job_pods(pods) else ()
    jobs = {job["metadata"]["uid"]: job for job in listed_jobs}
    limits = budgets.Budgets()
    for budget in client.list_objects(paths.poddisruptionbudgets()):
        record = budgets.decode_budget(msgspec.json.encode(budget))
        if record is not None:
            limits.set_budget(*record)
    ledger = cluster_state.ledger
    engine = ClusterEngine(ledger, liveworkload.free_loads(nodes, pods), settings.workload)
    if engine.note:
        console.print_text(f"note: {engine.note}", err=True)

    def is_in_namespace(holding: Holding) -> bool:
        return defrag_request.namespace in (None, holding.namespace)

    facts = movables.ClusterFacts(pods, nodes, jobs, limits, settings, now)
    movable = movables.find_movable_pods(facts, ledger, is_in_namespace)
    world = WhatIfCluster(
        ledger, engine, lambda namespace: [headroom for _, headroom in cluster_state.quota_headroom(namespace)]
    )
    tolerations = [*(defrag_request.spec.get("tolerations") or ()), *movables.common_tolerations(facts, ledger)]
    allowed = movables.allowed_nodes({"spec": {**defrag_request.spec, "tolerations": tolerations}}, nodes, ledger)
    goal = DefragGoal(
        request=defrag_request.request,
        load=defrag_request.load,
        count=defrag_request.count,
        policy=settings.policy,
        nodes=allowed,
    )
    move_plan = plan(world, goal, movable.pods, max_moves=defrag_request.max_moves, cordon=defrag_request.cordon)
    return DefragOutcome(defrag_request, move_plan, movable, _describe_excluded_nodes(ledger, allowed))


def _describe_excluded_nodes(ledger: Ledger, allowed: frozenset[str] | None) -> str | None:
    card_nodes = [node.name for node in ledger.nodes()]
    excluded_count = sum(name not in allowed for name in card_nodes) if allowed is not None else 0
    return f"{excluded_count} of {wording.pluralize(len(card_nodes), 'node')} with GPUs" if excluded_count else None


def format_outcome(outcome: DefragOutcome) -> str:
    """Describe in sentences how often the request fits, which pods move, and what prevents more."""
    defrag_request, move_plan = outcome.request, outcome.plan
    # The search stops counting at the wanted number.
    has_enough = move_plan.fit_counts[0] >= defrag_request.count
    fits_text = _describe_fits(move_plan.fit_counts[0], defrag_request, is_minimum=has_enough)
    lines = [f"Now {fits_text}, of {defrag_request.count} that are wanted."]
    if not outcome.is_reached:
        lines += _describe_failure(outcome)
        return "\n".join(lines) + "\n"
    if not move_plan.moves:
        return f"{lines[0]} No pod has to be moved.\n"
    lines.append(f"{wording.pluralize(len(move_plan.moves), 'pod')} would move{_lower_bound_suffix(move_plan)}:")
    rows = [["#", "POD", "FROM", "TO", "MIB", "PRIORITY", "AGE", "CONTROLLER", "FITS"]]
    for i, (move, pod, owner, fit_count) in enumerate(outcome.steps(), 1):
        row = [
            str(i),
            f"{move.before.namespace}/{move.before.name}",
            _format_place(move.before),
            _format_place(move.after),
        ]
        row += [
            str(pod.mem),
            str(pod.priority),
            tables.format_age(pod.age),
            f"{owner['kind']}/{owner['name']}",
            str(fit_count),
        ]
        rows.append(row)
    lines.append(tables.align_rows(rows).rstrip("\n"))
    lines.append("Each pod is deleted and recreated: its data in memory and on its local disk is lost.")
    if move_plan.cordons:
        lines.append(
            "The GPUs of a moved pod are cordoned until the last pod has moved: otherwise the pod could return to "
            "them, or more pods would have to be moved. --no-cordon skips this."
        )
    return "\n".join(lines) + "\n"


def _lower_bound_suffix(move_plan: MovePlan) -> str:
    return "" if move_plan.is_minimal else f", possibly more than necessary (at least {move_plan.min_moves})"


def _describe_fits(fit_count: int, defrag_request: DefragRequest, *, is_minimum: bool = False) -> str:
    """Describe how often the request fits, such as "there is 1 free whole GPU".

    is_minimum: whether the request may fit more often.
    """
    prefix = "at least " * is_minimum
    noun, shape = (
        defrag_request.text.split(" ", 1) if defrag_request.text.startswith("pod ") else (defrag_request.text, "")
    )
    if shape:
        return f"there is capacity for {prefix}{wording.pluralize(fit_count, noun)} of {shape}"
    head, _, tail = noun.partition(" of class ")
    return (
        f"there {'is' if fit_count == 1 else 'are'} "
        f"{prefix}{wording.pluralize(fit_count, head)}{f' of class {tail}' if tail else ''}"
    )


def _describe_failure(outcome: DefragOutcome) -> list[str]:
    move_plan, defrag_request = outcome.plan, outcome.request
    verdict = f"{'It is impossible' if move_plan.is_exhaustive else 'No plan was found'} to get there by moving pods"
    if defrag_request.max_moves is not None:
        verdict += f" with at most {wording.pluralize(defrag_request.max_moves, 'move')}"
    if not defrag_request.cordon:
        verdict += " without cordoning the GPUs that they leave"
    if move_plan.moves:
        moves = wording.pluralize(len(move_plan.moves), "move")
        verdict += f"; the best plan found: {_describe_fits(move_plan.fit_counts[-1], defrag_request)}, by {moves}"
    lines = [f"{verdict}."]
    if not move_plan.is_exhaustive:
        lines.append("One may exist: not all plans could be tried.")
    if not defrag_request.cordon:
        lines.append(
            "There may be a plan without --no-cordon, or if you cordon the GPUs that should become free: cardwise "
            "cordon NODE/INDEX."
        )
    if outcome.excluded_nodes:
        lines.append(
            f"No capacity: {outcome.excluded_nodes}, because of a taint or of the pod's constraints on its node."
        )
    lines.append(f"{wording.pluralize(len(outcome.movable.pods), 'pod')} may be moved.")
    for reason, count in sorted(outcome.movable.unmovable.items(), key=lambda pair: (-pair[1], pair[0])):
        lines.append(f"Pods that cannot be moved because they {reason}: {count}.")
    return lines


def _format_place(holding: Holding) -> str:
    """Format a node with the indexes of cards, such as "n1 0,1"."""
    return f"{holding.node} {','.join(map(str, holding.assignment.indices()))}"


def as_json(outcome: DefragOutcome) -> Json:
    """The output as JSON, with all fields."""
    move_plan, defrag_request = outcome.plan, outcome.request
    moves = [
        {
            "namespace": move.before.namespace,
            "name": move.before.name,
            "uid": pod.uid,
            "from": _place_as_json(move.before),
            "to": _place_as_json(move.after),
            "memoryMiB": pod.mem,
            "priority": pod.priority,
            "ageSeconds": round(pod.age),
            "controller": {"kind": owner["kind"], "name": owner["name"]},
            "fits": fit_count,
        }
        for move, pod, owner, fit_count in outcome.steps()
    ]
    return {
        "requested": defrag_request.count,
        "fitsBefore": move_plan.fit_counts[0],
        "fitsAfter": move_plan.fit_counts[-1],
        "goalReached": outcome.is_reached,
        "minimal": move_plan.is_minimal if outcome.is_reached else None,
        "exhaustive": move_plan.is_exhaustive,
        "cordons": move_plan.cordons,
        "moves": moves,
        "unmovable": dict(sorted(outcome.movable.unmovable.items())),
    }


def _place_as_json(holding: Holding) -> Json:
    cards = [{"index": share.index, "uuid": share.uuid} for share in holding.assignment.shares()]
    return {"node": holding.node, "gpus": cards}
