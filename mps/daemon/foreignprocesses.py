"""Finds foreign processes: processes on a closed card that are not clients of the card's MPS server, and that prevent
the server's start.

Theory of operation. EXCLUSIVE_PROCESS gives a card to the first process that opens it. Between two servers this may be
a tenant's process that bypasses the daemon's pipe. Such a process has the whole card, without a limit. So all processes
on the card are checked before a server is started, and before the card counts as ready.

Clients of a dead server may keep running for a while; their memory on the card belonged to the server. So these former
clients do not count as foreign when the next server starts. If the next server cannot open the card, a former client
may hold the card, and the card stays closed. For `FORMER_CLIENT_SECONDS`, `processes` does not contain former clients,
since most of them end soon. Processes that are older are in `processes`, since they may bypass MPS.

Example: a server with clients 41 and 42 dies at 100 s. At 105 s process 42 still is on the card: it is a former client,
and a new server may start. At 710 s the process is still there, and no server got the card. So the process is reported
    as foreign.
"""

import math
from collections.abc import Callable, Collection, Iterable

from cardwise.clock import Clock
from cardwise.gpus.protocol import CardControl
from mps.daemon.machine import ActResult, Outcome
from mps.daemon.units import DaemonUnit
from mps.host.control import Client
from mps.host.processes import Host

FORMER_CLIENT_SECONDS = 600.0  # maximum time since a server last listed the client
_MAX_SHOWN = 3


class ForeignProcesses:
    """The foreign processes on one unit's cards. Not thread-safe; `processes` may be read by any thread."""

    def __init__(
        self,
        unit: DaemonUnit,
        card_control: CardControl,
        host: Host,
        describe_process: Callable[[int], str],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._unit = unit
        self._card_control = card_control
        self._host = host
        self._describe_process = describe_process
        self._former_clients: set[int] = set()  # clients of the last server
        self._last_client_time: dict[
            int, float
        ] = {}  # PID -> when a server last listed this process, which is still on a card
        self._start_tried = False  # whether a start was tried since a card was ready last
        self.processes: frozenset[tuple[str, int]] = frozenset()  # card UUID and PID of each process

    def set_clients(self, client_pids: Iterable[int]) -> None:
        """Set the clients of the present server. Clients of a former server are kept while they are on a card."""
        now, client_pids, running_pids = (
            self._clock.now(),
            set(client_pids),
            {pid for _, pid in self._unit.processes(self._card_control)},
        )
        self._former_clients = (self._former_clients | client_pids) & running_pids
        self._last_client_time = {
            pid: now if pid in client_pids else self._last_client_time.get(pid, now) for pid in self._former_clients
        }

    def set_all_as_clients(self) -> None:
        """Treat all processes on the closed cards as clients, since an orphaned server still runs."""
        now = self._clock.now()
        self._former_clients = {pid for _, pid in self._unit.processes(self._card_control)}
        self._last_client_time = {pid: self._last_client_time.get(pid, now) for pid in self._former_clients}

    def mark_start_tried(self) -> None:
        """Record that a daemon is being started."""
        self._start_tried = True

    def clear(self) -> None:
        """Forget the foreign processes, since a server has opened the cards, or the cards are not closed any more."""
        self._start_tried, self.processes = False, frozenset()

    def start_block_result(self) -> ActResult | None:
        """The result to report if processes prevent the start of a daemon; None if no process does."""
        if self._start_tried:
            self._former_clients.clear()
        return self._build_blocker_result(
            self._unit.processes(self._card_control) - self._pair_with_cards(self._former_clients)
        )

    def server_block_result(self, clients: Callable[[], Iterable[Client]]) -> ActResult | None:
        """The result to report if processes keep an MPS server from opening the cards; None if no process does.

        Raises ControlError.

        clients: returns the clients of the server, if it runs.
        """
        # List processes before clients: a process becomes a client before it uses the card through MPS.
        processes = self._unit.processes(self._card_control)
        server_pids = {server.pid for server in self._host.servers(self._unit.pipe)}
        return self._build_blocker_result(
            processes
            - self._pair_with_cards({*server_pids, *(client.pid for client in clients()), *self._former_clients})
        )

    def _build_blocker_result(self, processes: set[tuple[str, int]]) -> ActResult | None:
        # A process that has just ended may be listed for a moment.
        live_processes = {(card, pid) for card, pid in processes if self._host.activity(pid) is not None}
        now = self._clock.now()
        former_clients = {
            (card, pid)
            for card, pid in live_processes
            if now - self._last_client_time.get(pid, -math.inf) < FORMER_CLIENT_SECONDS
        }
        self.processes = foreign_processes = frozenset(live_processes - former_clients)
        if not live_processes:
            return None
        reported_processes = foreign_processes or former_clients
        problem = "bypasses MPS" if foreign_processes else "was a client of an MPS server that ended"
        shown_processes = [
            f"{self._describe_process(pid)} on {card}" for card, pid in sorted(reported_processes)[:_MAX_SHOWN]
        ]
        hidden_text = (
            f" and {len(reported_processes) - len(shown_processes)} more"
            if len(reported_processes) > len(shown_processes)
            else ""
        )
        reason = f"process {', '.join(shown_processes)}{hidden_text} {problem}: no server can start before it ends"
        return ActResult(Outcome.BUSY, reason)

    def _pair_with_cards(self, pids: Collection[int]) -> set[tuple[str, int]]:
        return {(card, pid) for card in self._unit.uuids for pid in pids}
