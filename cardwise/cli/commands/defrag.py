"""`cardwise defrag`: which pods to move so that something big fits again, and moving them one by one.

The search is `cardwise.core.defrag.defrag`, asked with the extender's engine; both are imported when they are called:
nobody else waits for numpy.
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
from cardwise.cli.cluster import cordons, evicting, movables, published, snapshots, whatif, workloads
from cardwise.cli.options import DURATION
from cardwise.cli.render import printing, tables
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.defrag.defrag import MovePlan, plan
from cardwise.core.defrag.moving import Goal, Movable, Move, World
from cardwise.core.placement.ledger import Holding, Ledger
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from cardwise.kube import paths, survey
from cardwise.kube.client import KubeClient
from cardwise.kube.pods import budgets
from cardwise.kube.wire import ExtendedResource
from cardwise.simulation.workload import PodShape

_FIT: Final = "--fit"
_HELP: Final = """Find the fewest pods to move so that whole cards are free, or pods of a shape fit.

    With --evict it moves them, one after another. Only pods that a controller makes anew are moved: no bare pods, no
    pods of DaemonSets or gangs, none that a PodDisruptionBudget holds, and none that says cardwise.dev/no-defrag:
    "true". Each goes where the extender will put it. Where that saves moves, the cards that pods leave are cordoned
    until all have moved. Ends with 1 where no way is found, or where something else happens than was planned.

    \b
    cardwise defrag --free-cards 2               what would have to move
    cardwise defrag --fit gpu-mem=8138,cpu=2x4   room for four more of these
    cardwise defrag --free-cards 1 --class nvidia.l4 --max-moves 3 --evict
"""
_TIMES: Final = re.compile(r"(.+)x([0-9]+)", re.DOTALL)
_MOST_FITS: Final = 1000
_UNKNOWN_LIMITS: Final = (
    "warning: how much of a card the extender gives at most is not known (headroomMiB, maxClients, coreOvercommit): if "
    "one of these is set, pods may move for a card that the extender then says is too full"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefragRequest:
    """What the person wants. `text`: of what is to fit, such as "2 whole cards". `spec`: of a pod that is to fit, as it
    is written; empty where none is.
    """

    text: str
    request: PodRequest
    load: Load
    count: int
    resource_class: str
    namespace: str | None
    most: int | None
    cordon: bool
    spec: Json


@dataclass(frozen=True, slots=True)
class DefragOutcome:
    """A plan, with the pods that may be moved. `barred`: "1 of 4 nodes with cards", those that are no room for what is
    wanted; "" where there are none.
    """

    asked: DefragRequest
    plan: MovePlan
    found: movables.Found
    barred: str = ""

    def steps(self) -> Iterator[tuple[Move, Movable, Json, int]]:
        """Each move with its pod, who makes that anew, and how many of what is wanted fit then."""
        by_uid = {pod.uid: pod for pod in self.found.pods}
        for move, fits in zip(self.plan.moves, self.plan.fits[1:], strict=True):
            pod = by_uid[move.before.uid]
            yield move, pod, workloads.controller(self.found.objects[pod.uid]), fits

    def unneeded(self, cordoned: Iterable[ExtendedResource]) -> list[ExtendedResource]:
        """Those of these cards that the plan does not cordon."""
        moves = self.plan.moves if self.plan.cordons and self.reached else ()
        uuids = {share.uuid for move in moves for share in move.before.assignment.shares()}
        return [card for card in cordoned if card.spec.uuid not in uuids]

    @property
    def reached(self) -> bool:
        return self.plan.fits[-1] >= self.asked.count


@click.command("defrag", help=_HELP)
@options.cluster
@click.option("--free-cards", type=click.IntRange(1, _MOST_FITS), metavar="N", help="How many whole cards to free.")
@click.option("--fit", metavar="SHAPE[xN]", help="Make room for N pods of this shape (as --pod of cardwise simulate).")
@options.gpu_mem_unit
@click.option("--class", "resource_class", default="", metavar="NAME", help="Free cards of this ResourceClass only.")
@click.option("-n", "--namespace", help="Move pods of this namespace only.")
@click.option("--max-moves", type=click.IntRange(1), metavar="N", help="Move at most N pods.")
@click.option(
    "--cordon/--no-cordon",
    default=True,
    show_default=True,
    help="Cordon the cards that pods leave, where that saves moves.",
)
@click.option("--dry-run/--evict", "dry_run", default=True, show_default=True, help="Show the plan, or carry it out.")
@click.option(
    "--timeout",
    type=DURATION,
    default="5m",
    show_default=True,
    help="With --evict: how long to wait until a pod may go, and until its replacement is ready.",
)
@options.plain_output
@options.cardwise_namespace
def defrag(
    *,
    cardwise_namespace: str,
    free_cards: int | None,
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
    if (free_cards is None) is (fit is None):
        raise click.UsageError("write either --free-cards N or --fit SHAPE")
    client = options.client()
    clock = options.clock()
    told = published.take(client, cardwise_namespace)
    seen = survey.take(client, addresses=False, beyond=True, limits=told.limits)
    try:
        asked = _asked(
            seen,
            free_cards,
            fit,
            resource_class,
            unit=Unit(gpu_mem_unit),
            namespace=namespace,
            most=max_moves,
            cordon=cordon,
        )
    except InvalidRequest as error:
        raise click.ClickException(str(error)) from error
    if told.note:
        console.say(f"note: the extender's policy is taken as {told.policy}: {told.note}", err=True)
    left = _ignore_cordons_of_defrag(seen)
    for card in left:
        what = "--evict gives it back or takes it over" if dry_run else "it is given back or taken over"
        by = cordons.author(card)
        console.say(
            f"note: {cordons.title(card)} was cordoned{by} by another defrag, and counts as free: {what}", err=True
        )
    outcome = _planned(client, seen, asked, told, clock.wall())
    if output == "table":
        console.show(text(outcome))
    else:
        printing.dump(as_json(outcome), output)
    work = evicting.Carrying(client, timeout, clock)
    if not dry_run:
        for card in outcome.unneeded(left):
            work.give_back(card, card.spec.cordon)
    if not outcome.reached:
        sys.exit(1)
    if outcome.plan.moves and dry_run:
        console.say("nothing was changed; --evict moves them", err=True)
    elif outcome.plan.moves:
        if told.known_limits is None:
            console.say(_UNKNOWN_LIMITS, err=True)
        _carry_out(work, outcome)
        now = survey.take(client, addresses=False, limits=told.limits)
        after = _planned(client, now, asked, told, clock.wall()).plan.fits[0]
        if after < asked.count:
            raise click.ClickException(f"all pods have moved, but {_fits(after, asked)}: others have come meanwhile")
        console.say(f"done: {_fits(after, asked)}", err=True)


def _asked(
    seen: survey.Survey,
    cards: int | None,
    fit: str | None,
    resource_class: str,
    *,
    unit: Unit,
    namespace: str | None,
    most: int | None,
    cordon: bool,
) -> DefragRequest:
    """Raises InvalidRequest."""
    there = {name for node in seen.ledger.nodes() for card in node.cards for name in card.classes}
    if cards is not None:
        one = ContainerRequest(key="0", name="main", cards=1, resource_class=resource_class)
        shape = PodShape(PodRequest(containers=(one,)), Load(0, 0, 0))
        whatif.check_classes(resource_class, shape, there, "--class")
        spec: Json = {}
        text, count = f"free whole card{' of class ' * bool(resource_class)}{resource_class}", cards
    else:
        count, pod = _pod(seen, fit or "", resource_class, unit)
        text, shape, spec = f"pod {pod.name}", pod.shape, pod.spec
        whatif.check_classes(text, shape, there, _FIT)
    if shape.request is None:
        raise InvalidRequest(_FIT, "the pod asks for no card", "write for example gpu-mem=8138")
    return DefragRequest(
        text=text,
        request=shape.request,
        load=shape.load,
        count=count,
        resource_class=resource_class,
        namespace=namespace,
        most=most,
        cordon=cordon,
        spec=spec,
    )


def _ignore_cordons_of_defrag(seen: survey.Survey) -> list[ExtendedResource]:
    """Count the cards that a defrag has cordoned as free, and return them."""
    left = [card for card in seen.resources if cordons.is_of_defrag(card)]
    uuids = {card.spec.uuid for card in left}
    for name in {card.spec.node for card in left}:
        if (node := seen.ledger.node(name)) is not None:
            cards = [replace(card, cordoned=card.cordoned and card.uuid not in uuids) for card in node.cards]
            seen.ledger.set_cards(name, cards)
    return left


def _carry_out(work: evicting.Carrying, outcome: DefragOutcome) -> None:
    """Raises `ClickException` where something else happens than was planned, and `KubeError`."""
    with signals.as_exceptions(), ExitStack() as until:
        for i, move in enumerate(outcome.plan.moves, 1):
            if outcome.plan.cordons:
                work.cordon(move.before, until)
            work.carry(move, outcome.found.objects[move.before.uid], f"{i}/{len(outcome.plan.moves)}")


def _pod(seen: survey.Survey, fit: str, resource_class: str, unit: Unit) -> tuple[int, whatif.NamedPod]:
    """How many, and one of them. Raises InvalidRequest."""
    times = _TIMES.fullmatch(fit)
    given, count = (times[1], int(times[2])) if times is not None and not Path(fit).is_file() else (fit, 1)
    if not 1 <= count <= _MOST_FITS:
        raise InvalidRequest(f"{_FIT} {fit}", f"{count} pods are out of range", f"write 1 to {_MOST_FITS}")
    if resource_class and "=" not in given:
        raise InvalidRequest(f"{_FIT} {fit}", "a file says its class itself", "leave --class out")
    named = f"{given},class={resource_class}" if resource_class else given
    pods = whatif.pods(named, seen.classes, _FIT, unit=unit)
    if len(pods) > 1:
        known = ", ".join(pod.name for pod in pods)
        raise InvalidRequest(f"{_FIT} {fit}", f"has several pods ({known})", "write them into files of their own")
    return count, pods[0]


def _planned(
    client: KubeClient, seen: survey.Survey, asked: DefragRequest, told: published.Published, now: datetime
) -> DefragOutcome:
    """Reads what the survey lacks, and searches. Raises `KubeError`."""
    from cardwise.cli.cluster.engine import SurveyedEngine  # noqa: PLC0415 - see above

    nodes, pods = list(client.objects(paths.nodes())), list(client.objects(paths.pods()))
    found_jobs = client.objects(paths.jobs()) if movables.of_jobs(pods) else ()
    jobs = {job["metadata"]["uid"]: job for job in found_jobs}
    limits = budgets.Budgets()
    for budget in client.objects(paths.poddisruptionbudgets()):
        record = budgets.record(msgspec.json.encode(budget))
        if record is not None:
            limits.set(*record)
    ledger = seen.ledger
    engine = SurveyedEngine(ledger, snapshots.left(nodes, pods), told.workload)
    if engine.note:
        console.say(f"note: {engine.note}", err=True)

    def wanted(holding: Holding) -> bool:
        return asked.namespace in (None, holding.namespace)

    facts = movables.ClusterFacts(pods, nodes, jobs, limits, told, now)
    found = movables.find(facts, ledger, wanted)
    world = World(ledger, engine, lambda namespace: [left for _, left in seen.headroom(namespace)])
    tolerations = [*(asked.spec.get("tolerations") or ()), *movables.usual_tolerations(facts, ledger)]
    may = movables.nodes({"spec": {**asked.spec, "tolerations": tolerations}}, nodes, ledger)
    goal = Goal(request=asked.request, load=asked.load, count=asked.count, policy=told.policy, nodes=may)
    made = plan(world, goal, found.pods, most=asked.most, cordon=asked.cordon)
    return DefragOutcome(asked, made, found, _barred(ledger, may))


def _barred(ledger: Ledger, may: frozenset[str] | None) -> str:
    with_cards = [node.name for node in ledger.nodes()]
    barred = sum(name not in may for name in with_cards) if may is not None else 0
    return f"{barred} of {wording.count(len(with_cards), 'node')} with cards" if barred else ""


def text(outcome: DefragOutcome) -> str:
    """What fits, what moves, and what is in the way."""
    asked, made = outcome.asked, outcome.plan
    # Nobody counts further than to what is wanted.
    enough = made.fits[0] >= asked.count
    lines = [f"Now {_fits(made.fits[0], asked, least=enough)}, of {asked.count} that are wanted."]
    if not outcome.reached:
        lines += _no_way(outcome)
        return "\n".join(lines) + "\n"
    if not made.moves:
        return f"{lines[0]} Nothing has to move.\n"
    lines.append(f"{wording.count(len(made.moves), 'pod')} would move{_surely(made)}:")
    rows = [["#", "POD", "FROM", "TO", "MIB", "PRIORITY", "AGE", "CONTROLLER", "FITS"]]
    for i, (move, pod, owner, fits) in enumerate(outcome.steps(), 1):
        row = [str(i), f"{move.before.namespace}/{move.before.name}", _where(move.before), _where(move.after)]
        row += [
            str(pod.mem),
            str(pod.priority),
            tables.age(pod.age),
            f"{owner['kind']}/{owner['name']}",
            str(fits),
        ]
        rows.append(row)
    lines.append(tables.aligned(rows).rstrip("\n"))
    lines.append("Each is ended and started anew: what it has in memory and on its own disk is lost.")
    if made.cordons:
        lines.append(
            "Before each goes its cards are cordoned, until all have moved: else it would come back to them, or more "
            "would have to move. --no-cordon does without."
        )
    return "\n".join(lines) + "\n"


def _surely(made: MovePlan) -> str:
    return "" if made.exact else f", perhaps more than needed (at least {made.least})"


def _fits(fits: int, asked: DefragRequest, *, least: bool = False) -> str:
    """Such as "there is 1 free whole card", "there is room for 2 pods gpu-mem=100". `least`: there may be more."""
    at = "at least " * least
    what, of = asked.text.split(" ", 1) if asked.text.startswith("pod ") else (asked.text, "")
    if of:
        return f"there is room for {at}{wording.count(fits, what)} of {of}"
    head, _, tail = what.partition(" of class ")
    return f"there {'is' if fits == 1 else 'are'} {at}{wording.count(fits, head)}{f' of class {tail}' if tail else ''}"


def _no_way(outcome: DefragOutcome) -> list[str]:
    made, asked = outcome.plan, outcome.asked
    none = f"{'There is no way' if made.searched else 'No way was found'} to move pods for that"
    if asked.most is not None:
        none += f" by at most {wording.count(asked.most, 'move')}"
    if not asked.cordon:
        none += " without cordoning their cards meanwhile"
    if made.moves:
        none += f"; the best that was found: {_fits(made.fits[-1], asked)}, by {wording.count(len(made.moves), 'move')}"
    lines = [f"{none}."]
    if not made.searched:
        lines.append("There may be one all the same: not everything could be tried.")
    if not asked.cordon:
        lines.append(
            "Without --no-cordon there may be one, or cordon the cards that are to be free: cardwise cordon NODE/INDEX."
        )
    if outcome.barred:
        lines.append(f"No room: {outcome.barred}, by a taint or by what the pod asks of its node.")
    lines.append(f"{wording.count(len(outcome.found.pods), 'pod')} may be moved.")
    for why, many in sorted(outcome.found.kept.items(), key=lambda one: (-one[1], one[0])):
        lines.append(f"Not so those that {why}: {many}.")
    return lines


def _where(holding: Holding) -> str:
    """Such as "n1 0,1"."""
    return f"{holding.node} {','.join(map(str, holding.assignment.indices()))}"


def as_json(outcome: DefragOutcome) -> Json:
    """All of it, for programs."""
    made, asked = outcome.plan, outcome.asked
    moves = [
        {
            "namespace": move.before.namespace,
            "name": move.before.name,
            "uid": pod.uid,
            "from": _place(move.before),
            "to": _place(move.after),
            "memoryMiB": pod.mem,
            "priority": pod.priority,
            "ageSeconds": round(pod.age),
            "controller": {"kind": owner["kind"], "name": owner["name"]},
            "fits": fits,
        }
        for move, pod, owner, fits in outcome.steps()
    ]
    return {
        "wanted": asked.count,
        "fitsNow": made.fits[0],
        "fitsThen": made.fits[-1],
        "reached": outcome.reached,
        "fewestPossible": made.exact if outcome.reached else None,
        "everythingTried": made.searched,
        "cordons": made.cordons,
        "moves": moves,
        "kept": dict(sorted(outcome.found.kept.items())),
    }


def _place(holding: Holding) -> Json:
    cards = [{"index": share.index, "uuid": share.uuid} for share in holding.assignment.shares()]
    return {"node": holding.node, "cards": cards}
