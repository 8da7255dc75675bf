"""Finds processes on a closed card that are no clients of its MPS server: while there are any, no server starts.

EXCLUSIVE_PROCESS gives a card to the first process that comes. Between two servers this may be a tenant's process
that goes past the daemon's pipe: it then has the whole card, without a limit. So all processes on the card are looked
at before a server is started, and before the card is called ready.

Clients of a dead server may live on for a while; their memory on the card was the server's. So they are no strangers
to the next server. If that server does not get the card, the old clients may be the reason, and the card stays closed.
For `WINDING_DOWN` seconds they are not reported (`found`), since they may be about to end. After that they are, since
a former client may use the card past MPS by now.
"""

import math
from collections.abc import Callable, Collection, Iterable

from cardwise.clock import Clock
from cardwise.gpus.protocol import CardUse
from mps.daemon.machine import Outcome, Result
from mps.daemon.units import DaemonUnit
from mps.host.control import Client
from mps.host.processes import Host

WINDING_DOWN = 600.0  # seconds since a server was last seen with the client
_SHOWN = 3


class Strangers:
    """The strangers on one unit's cards. For one thread; `found` is for any."""

    def __init__(self, unit: DaemonUnit, use: CardUse, host: Host, whose: Callable[[int], str], clock: Clock) -> None:
        self._clock = clock
        self._unit = unit
        self._use = use
        self._host = host
        self._whose = whose
        self._former: set[int] = set()  # clients of the last server
        self._seen: dict[int, float] = {}  # when those of all servers that are on a card yet were seen as clients last
        self._tried = False  # a server was tried for since a card was ready
        self.found: frozenset[tuple[str, int]] = frozenset()  # card and PID

    def clients(self, pids: Iterable[int]) -> None:
        """The clients of the present server. Clients of a former server stay known while they are on a card."""
        now, pids, there = self._clock.now(), set(pids), {pid for _, pid in self._unit.users(self._use)}
        self._former = (self._former | pids) & there
        self._seen = {pid: now if pid in pids else self._seen.get(pid, now) for pid in self._former}

    def served(self) -> None:
        """A server without a daemon is there still: whoever is on its closed card came through it."""
        now = self._clock.now()
        self._former = {pid for _, pid in self._unit.users(self._use)}
        self._seen = {pid: self._seen.get(pid, now) for pid in self._former}

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
        return self._judge(self._unit.users(self._use) - self._of(self._former))

    def beside(self, clients: Callable[[], Iterable[Client]]) -> Result | None:
        """What keeps the card from being ready, or its daemon from being asked for a server; `clients` are those of the
        server that may be there. Raises ControlError.
        """
        there = self._unit.users(self._use)  # before the clients: who is on a card through MPS was a client first
        ours = {server.pid for server in self._host.servers(self._unit.pipe)}
        return self._judge(there - self._of({*ours, *(one.pid for one in clients()), *self._former}))

    def _judge(self, strangers: set[tuple[str, int]]) -> Result | None:
        # Who has just ended may be listed for a moment.
        there = {one for one in strangers if self._host.pulse(one[1]) is not None}
        now = self._clock.now()
        leaving = {one for one in there if now - self._seen.get(one[1], -math.inf) < WINDING_DOWN}
        self.found = found = frozenset(there - leaving)
        if not there:
            return None
        named = found or leaving
        why = "has come past MPS" if found else "was a client of an MPS server that ended"
        shown = [f"{self._whose(pid)} on card {card}" for card, pid in sorted(named)[:_SHOWN]]
        more = f" and {len(named) - len(shown)} more" if len(named) > len(shown) else ""
        return Result(Outcome.BUSY, f"process {', '.join(shown)}{more} {why}: no server starts before it has ended")

    def _of(self, pids: Collection[int]) -> set[tuple[str, int]]:
        return {(card, pid) for card in self._unit.uuids for pid in pids}
