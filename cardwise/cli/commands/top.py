"""`cardwise top`: GPUs and the pods that use them, printed once or refreshed."""

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import usage, visible
from cardwise.cli.cluster.usage import CardUsage, NodeUsage
from cardwise.cli.options import DURATION
from cardwise.cli.render import printing, toptable, visibletable
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.kube import errors
from cardwise.kube.client import KubeClient

_DEFAULT_LIMIT = 20  # maximum number of nodes shown, unless the user sets another limit
_FULL_REFRESH_SECONDS = (
    30.0  # pause between two reads of all cards of a big cluster; the shown cards are read on each refresh
)
_BIG_CLUSTER_CARDS = 2000  # a cluster with at least this number of cards is big


@click.command()
@options.cluster
@click.option(
    "-w/-1", "--watch/--once", default=None, help="Keep refreshing, or print once. Default: refresh on a terminal."
)
@click.option("--interval", type=DURATION, default="3s", show_default=True, help="Refresh interval, at least 1s.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="Number of nodes to show; 0: all.",
)
@options.plain_output
@options.cardwise_namespace
@click.argument("node", nargs=-1)
def top(
    *,
    watch: bool | None,
    interval: float,
    limit: int,
    output: str,
    cardwise_namespace: str,
    node: tuple[str, ...],
) -> None:
    """Show GPUs, the shares granted on each, and what their pods use: the busiest nodes first, or NODE…

    GRANTED: what containers hold. USED-MIB: what their processes use, measured by the MPS managers; "-" where none
    runs. CORE: percent of the SMs that are requested. STATE: ok, unhealthy, cordoned, whole, that of MPS, or
    only:NAMESPACE (shared within it). ISOLATION: what limits the memory of shares. HOLDERS: the pods that hold most;
    "!" marks one that uses 640 MiB more than its share.
    """
    if watch and output != "table":
        raise click.UsageError(f"-o {output} prints once, for programs: remove --watch")
    client = options.load_client()
    view = TopView(
        client, nodes=node, limit=limit, cardwise_namespace=cardwise_namespace, clock=options.current_clock()
    )
    try:
        if watch or (watch is None and output == "table" and sys.stdout.isatty()):
            show_live(view, max(1.0, interval), options.current_clock())
            return
        view.refresh()
    except errors.Forbidden as error:
        visibletable.print_visible(visible.read_visible(client, error, node), error, output)
        return
    if output == "table":
        console.print_lines(view.render_screen(console.terminal_columns()))
    else:
        printing.print_object(view.as_json(), output)


@dataclass(slots=True, kw_only=True)
class _Screen:
    all_nodes: list[NodeUsage] = field(default_factory=list)
    shown_nodes: list[NodeUsage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class TopView:
    """The text and the JSON of `cardwise top`; `refresh` reads the present state.

    nodes: the nodes to show, whatever their number; empty for the busiest nodes.
    limit: the maximum number of nodes if `nodes` is empty; 0 for all.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        nodes: Sequence[str] = (),
        limit: int = _DEFAULT_LIMIT,
        cardwise_namespace: str = names.NAMESPACE,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._nodes = tuple(dict.fromkeys(nodes))
        self._limit = 0 if nodes else limit
        self._cardwise_namespace = cardwise_namespace
        self._clock = clock
        self._last_full_refresh = float("-inf")
        self._cards: list[CardUsage] = []
        self._screen = _Screen()

    def refresh(self, max_lines: int | None = None) -> None:
        """Read the present state. Raises `ClickException` for a node without cards, and `KubeError`.

        max_lines: the number of cards that fit on the screen; None for no limit.
        """
        now = self._clock.now()
        if len(self._cards) < _BIG_CLUSTER_CARDS or now - self._last_full_refresh >= _FULL_REFRESH_SECONDS:
            self._cards = usage.read_cards(self._client, self._nodes)
            self._last_full_refresh = now
            all_nodes = usage.group_by_node(self._cards)
            shown_nodes = self._select_shown_nodes(all_nodes, max_lines)
        else:
            all_nodes = self._screen.all_nodes
            refreshed_names = [node.name for node in self._select_shown_nodes(all_nodes, max_lines)]
            shown_nodes = usage.group_by_node(usage.read_cards(self._client, refreshed_names))
        missing = set(self._nodes) - {node.name for node in all_nodes}
        if missing:
            raise click.ClickException(
                f"no GPU that Cardwise shares on {wording.enumerate_first(sorted(missing), 5, 'node')}"
            )
        details = (
            usage.read_details(self._client, [node.name for node in shown_nodes], self._cardwise_namespace)
            if shown_nodes
            else None
        )
        if details is not None:
            reasons = details.unschedulable_reasons
            shown_nodes = [
                NodeUsage(node.name, tuple(map(details.with_holders, node.cards)), reasons.get(node.name, ""))
                for node in shown_nodes
            ]
        self._screen = _Screen(
            all_nodes=all_nodes, shown_nodes=shown_nodes, notes=details.notes if details is not None else []
        )

    def _select_shown_nodes(self, nodes: Sequence[NodeUsage], max_lines: int | None) -> list[NodeUsage]:
        """Return the first nodes, at most `limit` of them and at most `max_lines` cards, but at least one node."""
        first_nodes: list[NodeUsage] = []
        lines = 0
        for node in nodes[: self._limit or None]:
            lines += len(node.cards)
            if max_lines is not None and lines > max_lines and first_nodes:
                break
            first_nodes.append(node)
        return first_nodes

    def render_screen(self, columns: int | None = None) -> str:
        """Return the text to show. `columns`: the width of the terminal; None without a terminal."""
        screen = self._screen
        if not screen.all_nodes:
            return "no GPU is shared: run `cardwise doctor` for the cause\n"
        hidden_count = len(screen.all_nodes) - len(screen.shown_nodes)
        hidden_note = (
            f"{wording.pluralize(hidden_count, 'more node')} with lower use; --limit shows more, NODE shows one\n"
            if hidden_count
            else ""
        )
        notes = "".join(f"{console.clean_line(f'note: {note}')}\n" for note in screen.notes)
        table = toptable.table(screen.shown_nodes, columns)
        return f"{toptable.summary_line(screen.all_nodes)}\n\n{table}{hidden_note}{notes}"

    def as_json(self) -> dict[str, object]:
        """The output as JSON."""
        return toptable.as_json(self._screen.all_nodes, self._screen.shown_nodes, self._screen.notes)


def show_live(view: TopView, interval: float, clock: Clock = SYSTEM) -> None:
    """Show the live screen until q or Ctrl-C is typed."""
    from cardwise.cli.render import livescreen  # noqa: PLC0415 - rich, for which no other command waits

    view.refresh(_terminal_size()[1])  # an error of the first read ends the program, as in any other command
    problem = ""
    with suppress(KeyboardInterrupt), livescreen.open_screen() as draw, livescreen.open_keyboard(clock) as keyboard:
        quit_hint = "q ends" if keyboard.has_terminal else "Ctrl-C ends"
        while True:
            now = clock.wall().astimezone()
            head = f"cardwise top, {now:%H:%M:%S}, {quit_hint}{problem}"
            draw(console.clean_text(f"{head}\n{view.render_screen(_terminal_size()[0])}"))
            if keyboard.wait_for_key("q", interval):
                return
            try:
                view.refresh(_terminal_size()[1])
                problem = ""
            except errors.KubeError as error:
                problem = f"; outdated: {wording.sanitize_message(str(error))}"


def _terminal_size() -> tuple[int, int]:
    """Return the terminal's number of columns, and the number of its lines for cards."""
    columns, lines = shutil.get_terminal_size()
    return columns, max(1, lines - 7)  # 7: the lines around the table
