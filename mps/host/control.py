"""Sends commands to an MPS daemon through NVIDIA's control program: one process and one timeout for each command.

This module handles all traps of the protocol (docs/design/0005-mps.md). Almost every error has return code 0, setters
are not confirmed, answers have no delimiters, and the program hangs if the daemon hangs.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cardwise.core.values.quantity import MiB
from cardwise.core.values.wording import quote_text, sanitize_message

_MAX_QUOTED_BYTES = 256  # maximum length of an answer that an error message quotes
_MAX_COMMAND_BYTES = 4000  # maximum length of a command; 4095 bytes crash daemons of driver 580 and later
_ERROR_PREFIXES = (
    "Unknown command",
    "Insufficient privileges",
    "Not enough privilege",
    "Invalid ",
    "Failed ",
    "A user id",
    "The MPS control daemon is shutting down",
)
_SERVER_NOT_FOUND_PATTERN = re.compile(r"Server \d* ?not found")
_SIZE_PATTERN = re.compile(r"(\d+)([KMG])B?")
_MIB_BY_UNIT = {"K": 1 / 1024, "M": 1, "G": 1024}


class ControlError(Exception):
    """A command failed."""


class NoDaemon(ControlError):
    """No daemon listens, or it is shutting down."""


class DaemonTimeout(ControlError):
    """The daemon did not answer in time."""


class CommandRefused(ControlError):
    """The daemon answered with an error, whatever its return code."""


class UnknownCommand(CommandRefused):
    """The driver of the daemon does not have the command."""


class ServerStatus(StrEnum):
    """The status of a server, as of `get_server_status`."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"


class FrontEnd(Protocol):
    """Sends commands to one daemon."""

    def send(self, command: str, timeout: float) -> str:
        """Send a command and return the answer's text. `timeout` in seconds. Raises ControlError."""


class ControlProgram:
    """A `FrontEnd` that runs nvidia-cuda-mps-control.

    environment: the program's whole environment, with the daemon's pipe folder.
    """

    def __init__(self, binary: Path, environment: Mapping[str, str]) -> None:
        self._binary = binary
        self._environment = dict(environment)

    def send(self, command: str, timeout: float) -> str:
        line = command.encode()
        if len(line) > _MAX_COMMAND_BYTES or b"\n" in line:
            raise CommandRefused(f"{quote_text(command)} would crash the daemon: it is too long, or has several lines")
        try:
            process = subprocess.run(
                [self._binary],
                input=line + b"\n",
                capture_output=True,
                timeout=timeout,
                check=False,
                env=self._environment,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise DaemonTimeout(f"no answer to {quote_text(command)} within {timeout:g} s") from error
        except OSError as error:
            raise ControlError(f"{self._binary} does not start: {error}") from error
        answer = process.stdout.decode(errors="replace").strip()
        # The only meaningful code is 1: no daemon runs. The message may be on stdout or stderr.
        if process.returncode != 0:
            raise NoDaemon(
                sanitize_message(process.stderr.decode(errors="replace").strip() or answer, _MAX_QUOTED_BYTES)
                or f"{quote_text(command)} ended with rc {process.returncode}"
            )
        check_answer(command, answer)
        return answer


def check_answer(command: str, answer: str) -> None:
    """Check an answer for an error.

    Raises CommandRefused, or UnknownCommand if the daemon does not have the command.
    """
    if answer.startswith("Unknown command"):
        raise UnknownCommand(f"{quote_text(command)}: {sanitize_message(answer, _MAX_QUOTED_BYTES)}")
    if answer.startswith(_ERROR_PREFIXES) or _SERVER_NOT_FOUND_PATTERN.match(answer):
        raise CommandRefused(f"{quote_text(command)}: {sanitize_message(answer, _MAX_QUOTED_BYTES)}")


@dataclass(frozen=True, slots=True)
class Client:
    """A client of an MPS server: the PIDs of the client and of the server."""

    server: int
    pid: int


class Control:
    """The commands of one daemon. All methods raise ControlError."""

    def __init__(self, front_end: FrontEnd, timeout: float) -> None:
        """timeout: seconds for the answer to one command."""
        self._front_end = front_end
        self._timeout = timeout

    def servers(self) -> list[int]:
        """The PIDs of the servers; [] if the daemon runs but has no server."""
        return self._list_pids("get_server_list")

    def status(self, server: int) -> ServerStatus:
        """The status of a server."""
        answer = self._send(f"get_server_status {server}")
        try:
            return ServerStatus(answer)
        except ValueError as error:
            raise CommandRefused(f"get_server_status {server}: {quote_text(answer)} is not a status") from error

    def start_server(self) -> None:
        """Start a server for root, which every daemon allows. Failures are only in the daemon's log."""
        self._send("start_server -uid 0")

    def clients(self, server: int) -> list[Client]:
        """The clients of a server, with PIDs in the daemon's namespace."""
        return [Client(server, pid) for pid in self._list_pids(f"get_client_list {server}") if pid > 0]

    def terminate(self, client: Client) -> None:
        """Detach the client from its server. Afterwards the client can be killed safely."""
        answer = self._send(f"terminate_client {client.server} {client.pid}")
        if "not found" in answer:
            raise CommandRefused(
                f"terminate_client {client.server} {client.pid}: {sanitize_message(answer, _MAX_QUOTED_BYTES)}"
            )

    def percentage(self) -> str:
        """The default percentage of SMs, as the daemon prints it, such as "100.0"."""
        return self._send("get_default_active_thread_percentage")

    def set_percentage(self, percent: int) -> None:
        """Set the default percentage of SMs. Raises CommandRefused if MPS then reports another value."""
        self._send(f"set_default_active_thread_percentage {percent}")
        if (answer := self.percentage()) != f"{percent:.1f}":
            raise CommandRefused(f"set the default of {percent} %, but MPS reports {quote_text(answer)}")

    def ceiling(self, ordinal: int) -> MiB | None:
        """The memory limit that the next server sets for its clients on a device; None without a limit.

        ordinal: the device's number in CUDA_VISIBLE_DEVICES of the daemon.
        """
        return parse_limit(self._send(f"get_default_device_pinned_mem_limit {ordinal}"))

    def server_ceiling(self, server: int, ordinal: int) -> MiB | None:
        """The memory limit of clients of a running server; None if there is no limit, and while the server starts."""
        return parse_limit(self._send(f"get_device_pinned_mem_limit {server} {ordinal}"))

    def set_ceiling(self, ordinal: int, mib: MiB) -> None:
        """Set the memory limit for the next server. Raises CommandRefused if MPS then reports another value."""
        self._send(f"set_default_device_pinned_mem_limit {ordinal} {mib}M")
        if (answer := self.ceiling(ordinal)) != mib:
            raise CommandRefused(f"set a ceiling of {mib} MiB on device {ordinal}, but MPS reports {answer}")

    def set_server_ceiling(self, server: int, ordinal: int, mib: MiB) -> None:
        """Set the limit of future clients of a running server. Raises CommandRefused if MPS then reports another
        value.
        """
        self._send(f"set_device_pinned_mem_limit {server} {ordinal} {mib}M")
        if (answer := self.server_ceiling(server, ordinal)) != mib:
            raise CommandRefused(f"set a ceiling of {mib} MiB in server {server}, but MPS reports {answer}")

    def quit(self, seconds: int, timeout: float) -> None:
        """End the daemon, by force after `seconds`. Only the end of its process shows success."""
        self._front_end.send(f"quit -t {seconds}", timeout)

    def _list_pids(self, command: str) -> list[int]:
        answer = self._send(command)
        try:
            return [int(word) for word in answer.split()]
        except ValueError as error:
            raise CommandRefused(f"{command}: {quote_text(answer)} are not PIDs") from error

    def _send(self, command: str) -> str:
        return self._front_end.send(command, self._timeout)


def parse_limit(answer: str) -> MiB | None:
    """Parse a limit as daemons print it (`3G`, `512M`); None if it is empty. Raises CommandRefused."""
    if not answer:
        return None
    match = _SIZE_PATTERN.fullmatch(answer)
    if match is None:
        raise CommandRefused(f"{quote_text(answer)} is not a limit")
    return MiB(int(int(match[1]) * _MIB_BY_UNIT[match[2]]))
