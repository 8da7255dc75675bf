"""The front end of MPS: one command for each process, a time limit on each, and nothing believed but text.

Every trap of the protocol ends here: return code 0 for almost every error, silent setters, answers without delimiters,
a front end that hangs with its daemon (docs/design/0005-mps.md, Traps and their tests).
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cardwise.core.values.quantity import MiB
from cardwise.core.values.wording import message, quoted

_MOST_SAID = 256  # bytes of an answer that an error quotes
_LONGEST_LINE = 4000  # bytes; 4095 kill daemons of 580 and above
_ERRORS = (
    "Unknown command",
    "Insufficient privileges",
    "Not enough privilege",
    "Invalid ",
    "Failed ",
    "A user id",
    "The MPS control daemon is shutting down",
)
_NOT_FOUND = re.compile(r"Server \d* ?not found")
_SIZE = re.compile(r"(\d+)([KMG])B?")
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024}


class ControlError(Exception):
    """A command that did not do what it should."""


class NoDaemon(ControlError):
    """Nobody listens, or who does is going down."""


class Silent(ControlError):
    """The daemon did not answer in time: it is frozen, or hangs."""


class CommandRefused(ControlError):
    """The daemon answered with an error, whatever its return code."""


class UnknownCommand(CommandRefused):
    """The daemon is of a driver that does not have the command."""


class ServerStatus(StrEnum):
    """As `get_server_status` says it."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"


class FrontEnd(Protocol):
    """A way to one daemon."""

    def ask(self, command: str, timeout: float) -> str:
        """The answer's text. Raises ControlError."""


class Program:
    """`FrontEnd` by the real program. `environment` is whole, with the daemon's pipe folder in it."""

    def __init__(self, binary: Path, environment: Mapping[str, str]) -> None:
        self._binary = binary
        self._environment = dict(environment)

    def ask(self, command: str, timeout: float) -> str:
        line = command.encode()
        if len(line) > _LONGEST_LINE or b"\n" in line:
            raise CommandRefused(f"{quoted(command)} is no command that a daemon would survive")
        try:
            done = subprocess.run(
                [self._binary],
                input=line + b"\n",
                capture_output=True,
                timeout=timeout,
                check=False,
                env=self._environment,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise Silent(f"no answer to {quoted(command)} within {timeout:g} s") from error
        except OSError as error:
            raise ControlError(f"{self._binary} does not start: {error}") from error
        said = done.stdout.decode(errors="replace").strip()
        # 1 is the only code that means something: no daemon. Where it says so, by stream, differs.
        if done.returncode != 0:
            raise NoDaemon(
                message(done.stderr.decode(errors="replace").strip() or said, _MOST_SAID)
                or f"{quoted(command)} ended with rc {done.returncode}"
            )
        check(command, said)
        return said


def check(command: str, said: str) -> None:
    """Raises CommandRefused where the text is an error."""
    if said.startswith("Unknown command"):
        raise UnknownCommand(f"{quoted(command)}: {message(said, _MOST_SAID)}")
    if said.startswith(_ERRORS) or _NOT_FOUND.match(said):
        raise CommandRefused(f"{quoted(command)}: {message(said, _MOST_SAID)}")


@dataclass(frozen=True, slots=True)
class Client:
    """A process that computes through a server."""

    server: int
    pid: int


class Control:
    """What is asked of a daemon, in its own words. All methods raise ControlError."""

    def __init__(self, front: FrontEnd, timeout: float) -> None:
        """`timeout`: seconds for one answer."""
        self._front = front
        self._timeout = timeout

    def servers(self) -> list[int]:
        """PIDs. Empty is an answer too: the daemon lives and has no server."""
        return self._pids("get_server_list")

    def status(self, server: int) -> ServerStatus:
        said = self._ask(f"get_server_status {server}")
        try:
            return ServerStatus(said)
        except ValueError as error:
            raise CommandRefused(f"get_server_status {server}: {quoted(said)} is no status") from error

    def start_server(self) -> None:
        """For root, who may always; silent, failures are in the log only."""
        self._ask("start_server -uid 0")

    def clients(self, server: int) -> list[Client]:
        """PIDs in the daemon's namespace."""
        return [Client(server, pid) for pid in self._pids(f"get_client_list {server}") if pid > 0]

    def terminate(self, client: Client) -> None:
        """Takes the client off its server, after which it may be killed."""
        said = self._ask(f"terminate_client {client.server} {client.pid}")
        if "not found" in said:
            raise CommandRefused(f"terminate_client {client.server} {client.pid}: {message(said, _MOST_SAID)}")

    def percentage(self) -> str:
        return self._ask("get_default_active_thread_percentage")

    def set_percentage(self, percent: int) -> None:
        """Raises CommandRefused when it is not so afterwards."""
        self._ask(f"set_default_active_thread_percentage {percent}")
        if (said := self.percentage()) != f"{percent:.1f}":
            raise CommandRefused(f"the default of {percent} % was set, and {quoted(said)} is read back")

    def ceiling(self, ordinal: int) -> MiB | None:
        """The memory limit for clients of the next server; None: there is none."""
        return parse_size(self._ask(f"get_default_device_pinned_mem_limit {ordinal}"))

    def server_ceiling(self, server: int, ordinal: int) -> MiB | None:
        """The memory limit for clients of a running server; None also while it is starting."""
        return parse_size(self._ask(f"get_device_pinned_mem_limit {server} {ordinal}"))

    def set_ceiling(self, ordinal: int, mib: MiB) -> None:
        """For the next server. Raises CommandRefused when it is not so afterwards."""
        self._ask(f"set_default_device_pinned_mem_limit {ordinal} {mib}M")
        if (said := self.ceiling(ordinal)) != mib:
            raise CommandRefused(f"a ceiling of {mib} MiB on device {ordinal} was set, and {said} is read back")

    def set_server_ceiling(self, server: int, ordinal: int, mib: MiB) -> None:
        """For the clients that a running server will take. Raises CommandRefused when it is not so afterwards."""
        self._ask(f"set_device_pinned_mem_limit {server} {ordinal} {mib}M")
        if (said := self.server_ceiling(server, ordinal)) != mib:
            raise CommandRefused(f"a ceiling of {mib} MiB in server {server} was set, and {said} is read back")

    def quit(self, seconds: int, timeout: float) -> None:
        """Ends the daemon, with force after `seconds`. Its return code says nothing: see whether it is gone."""
        self._front.ask(f"quit -t {seconds}", timeout)

    def _pids(self, command: str) -> list[int]:
        said = self._ask(command)
        try:
            return [int(word) for word in said.split()]
        except ValueError as error:
            raise CommandRefused(f"{command}: {quoted(said)} are no PIDs") from error

    def _ask(self, command: str) -> str:
        return self._front.ask(command, self._timeout)


def parse_size(said: str) -> MiB | None:
    """A limit as daemons tell it (`3G`, `512M`); None for none."""
    if not said:
        return None
    found = _SIZE.fullmatch(said)
    if found is None:
        raise CommandRefused(f"{quoted(said)} is no limit")
    return MiB(int(int(found[1]) * _MIB[found[2]]))
