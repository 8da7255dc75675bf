"""Who is on a closed card and is no client of its MPS server: while they are there, no server starts.

EXCLUSIVE_PROCESS keeps a card for one process, whoever comes first. Between two servers that may be a tenant's: one
that goes past the daemon's pipe has the whole card then, without a limit. So before a server is asked for, and before
the card is called ready, everybody on it is looked at.

Clients may outlive their server for a while; what they had of the card was its server's. So those who were its clients
when it was last seen are no strangers to its first successor. Where that one does not get the card, they are.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from cardwise.gpus.protocol import CardUnwilling, CardUse
from mps.control import Client
from mps.machine import Outcome, Result
from mps.processes import Host
from mps.units import Unit

_SHOWN = 3


class Strangers:
    """Of one unit, for one thread; `found` is for any."""

    def __init__(self, unit: Unit, use: CardUse, host: Host, whose: Callable[[int], str]) -> None:
        self._unit = unit
        self._use = use
        self._host = host
        self._whose = whose
        self._former: set[int] = set()  # clients of the last server
        self._tried = False  # a server was tried for since a card was ready
        self.found: frozenset[tuple[str, int]] = frozenset()  # card and PID

    def clients(self, pids: Iterable[int]) -> None:
        """Of the server that there is; those who were it before and are on a card yet stay known."""
        self._former = (self._former | set(pids)) & {pid for _, pid in self._on_cards()}

    def served(self) -> None:
        """A server without a daemon is there still: whoever is on its closed card came through it."""
        self._former = {pid for _, pid in self._on_cards()}

    def tries(self) -> None:
        """A daemon is being started."""
        self._tried = True

    def none(self) -> None:
        """The cards are a server's now, or open to all."""
        self._tried, self.found = False, frozenset()

    def without_server(self) -> Result | None:
        """What keeps a daemon from being started."""
        if self._tried:
            self._former.clear()
        return self._judge(self._on_cards() - self._of(self._former))

    def beside(self, clients: Callable[[], Iterable[Client]]) -> Result | None:
        """What keeps the card from being ready, or its daemon from being asked for a server; `clients` are those of the
        server that may be there. Raises ControlError.
        """
        there = self._on_cards()  # before the clients: who is on a card through MPS was a client first
        ours = {server.pid for server in self._host.servers(self._unit.pipe)}
        return self._judge(there - self._of({*ours, *(one.pid for one in clients()), *self._former}))

    def _judge(self, strangers: set[tuple[str, int]]) -> Result | None:
        # Who has just ended may be listed for a moment.
        self.found = found = frozenset(one for one in strangers if self._host.pulse(one[1]) is not None)
        if not found:
            return None
        shown = [f"{self._whose(pid)} on card {card}" for card, pid in sorted(found)[:_SHOWN]]
        more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        return Result(
            Outcome.BUSY, f"process {', '.join(shown)}{more} has come past MPS: no server starts before it has ended"
        )

    def _of(self, pids: Collection[int]) -> set[tuple[str, int]]:
        return {(card, pid) for card in self._unit.uuids for pid in pids}

    def _on_cards(self) -> set[tuple[str, int]]:
        """Card and PID; none where the driver does not tell."""
        with suppress(CardUnwilling):
            return {(card, one.pid) for card in self._unit.uuids for one in self._use.processes(card)}
        return set()
