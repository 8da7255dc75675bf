"""The share agent's only thread: checks the cards, writes the files, and responds to requests."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from cardwise.clock import BOOT, Clock
from cardwise.core.api import shareagent
from cardwise.core.api.mps import MpsState
from cardwise.core.values import wording
from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import mpsfiles
from cardwise.gpus.mpsfiles import CardReadiness
from mps.agent import podshares
from mps.agent.endpoint import Endpoint, Response
from mps.agent.podshares import AgentSettings

_WAITING_SECONDS = 2.0
_READY_SECONDS = 5.0
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644
_POD_LISTENER = ""  # the name of the listeners that serve the whole pod
_EXIT_BAD_SETTING = 2


class ShareAgent:
    """The agent of one pod.

    installs_hook: whether to install the frameworks' hook for the pod's containers.
    """

    def __init__(
        self, settings: AgentSettings, folder: Path, mps_root: Path, *, installs_hook: bool = False, clock: Clock = BOOT
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._mps_root = mps_root
        self._clock = clock
        self._endpoint = Endpoint(self._handle_request, clock)
        self._readiness: dict[str, CardReadiness] = {}
        self._enforced_by = dict.fromkeys(settings.shares, podshares.UNKNOWN_ENFORCEMENT)
        self._unwritten = set(settings.shares)
        self._unbound_listeners: dict[Path, str] = {
            **{folder / key / shareagent.SOCKET_FILE: key for key in settings.shares},
            # The last one: once this socket answers, all other sockets answer too.
            folder / shareagent.SOCKET_FILE: _POD_LISTENER,
        }
        self._logged_problems: dict[str, str] = {}
        self._hook_problem = "the frameworks' hook is not installed yet" if installs_hook else ""
        # Kept on disk: an agent that restarts in a running pod must not become unready if MPS fails.
        self._ready = (folder / shareagent.STARTED_FILE).exists()

    def run(self) -> NoReturn:
        while True:
            self._endpoint.serve(self.refresh_share())

    def refresh_share(self) -> float:
        """Check the cards, and write what has changed. Returns the seconds until the next update."""
        if self._settings.waits:
            self._check_cards()
        if self._hook_problem:
            self._install_hook()
        self._write_shares()
        self._listen()
        if not self._ready and not self._unready_reasons():
            self._ready = True
            self._mark_started()
            _log_line("info", "the pod's containers may start")
        return _READY_SECONDS if self._ready else _WAITING_SECONDS

    def _mark_started(self) -> None:
        """Record the start for a restarted agent. The folder is deleted with the pod."""
        try:
            (self._folder / shareagent.STARTED_FILE).touch()
        except OSError as error:
            self._log_problem("failed to record that the pod has started", error)

    def _check_cards(self) -> None:
        for uuid, memory_limit in self._settings.min_ceilings_by_card().items():
            previous, readiness = (
                self._readiness.get(uuid),
                mpsfiles.card_readiness(self._mps_root, uuid, memory_limit=memory_limit, clock=self._clock),
            )
            if previous is None or previous.reason != readiness.reason:
                level = "warning" if readiness.reason else "info"
                _log_line(level, "MPS", card=uuid, usable=not readiness.reason, reason=readiness.reason or "")
            self._readiness[uuid] = readiness

    def _unready_reasons(self) -> list[str]:
        """Why the pod is not ready: the texts that the probe writes into the pod's events."""
        # Where MPS is unavailable, only a pod that requires MPS waits, and the device plugin holds its containers back.
        readinesses = [
            readiness for readiness in self._readiness.values() if readiness.state is not MpsState.UNAVAILABLE
        ]
        problems = [*(readiness.reason for readiness in readinesses), self._hook_problem]
        return [wording.sanitize_message(problem) for problem in problems if problem]

    def _install_hook(self) -> None:
        """Install the frameworks' hook into the folder that the pod's containers have in PYTHONPATH."""
        from cardwise.share import installation  # noqa: PLC0415 - few pods request it

        try:
            installation.install_files(self._folder / shareagent.HOOK_FOLDER)
        except OSError as error:
            self._hook_problem = f"the frameworks' hook cannot be installed: {error}"
            self._log_problem("failed to install the frameworks' hook", error)
        else:
            self._hook_problem = ""

    def _write_shares(self) -> None:
        states = {uuid: readiness.state for uuid, readiness in self._readiness.items() if readiness.state is not None}
        for key, shares in self._settings.shares.items():
            # If a state file cannot be read for a moment, the last value is kept.
            enforced_by = (
                podshares.find_enforcement(shares, states, waits=self._settings.waits) or self._enforced_by[key]
            )
            if enforced_by == self._enforced_by[key] and key not in self._unwritten:
                continue
            self._enforced_by[key] = enforced_by
            self._unwritten.add(key)
            try:
                _write_atomically(
                    self._folder / key / shareagent.SHARE_FILE, podshares.build_document(shares, enforced_by)
                )
            except OSError as error:
                self._log_problem(f"failed to write {shareagent.SHARE_FILE} of container {key}", error)
            else:
                self._unwritten.discard(key)

    def _listen(self) -> None:
        for address, name in list(self._unbound_listeners.items()):
            try:
                self._endpoint.listen_unix(address, name)
            except OSError as error:
                self._log_problem(f"failed to listen at {address}", error)
            else:
                del self._unbound_listeners[address]

    def _log_problem(self, event: str, error: OSError) -> None:
        """Log a problem once, although the action is tried again at every update."""
        if self._logged_problems.get(event) != str(error):
            self._logged_problems[event] = str(error)
            _log_line("error", event, error=str(error))

    def _handle_request(self, listener: str, path: str) -> Response:
        match path:
            case "/share" if listener != _POD_LISTENER:
                body = podshares.build_document(self._settings.shares[listener], self._enforced_by[listener])
                return Response(200, body + "\n", "application/json")
            case "/readyz":
                body = "".join(f"{problem}\n" for problem in self._unready_reasons()) or "ok\n"
                return Response(200 if self._ready else 503, body)
        return Response(404, "supported: /share (on a container's own socket) and /readyz\n")


def run(environ: Mapping[str, str]) -> NoReturn:
    """Run the share agent until a signal ends it."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _exit)
    try:
        settings = podshares.parse_settings(environ)
    except InvalidRequest as error:
        _log_line("error", "cannot start", error=str(error))
        sys.exit(_EXIT_BAD_SETTING)
    folder = Path(environ.get(shareagent.FOLDER_ENV) or shareagent.FOLDER)
    root = Path(environ.get(shareagent.MPS_ROOT_ENV) or shareagent.MPS_ROOT)
    ShareAgent(settings, folder, root, installs_hook=bool(environ.get(shareagent.HOOK_ENV))).run()


def _exit(signal_number: int, frame: object) -> NoReturn:  # noqa: ARG001 - the signature of signal handlers
    """Exit at once, without cleaning up: the folder is deleted with the pod."""
    os._exit(0)


def _write_atomically(path: Path, content: str) -> None:
    """Write a file so that readers see either the old or the whole new content. Raises OSError."""
    if not path.parent.is_dir():
        path.parent.mkdir()
        path.parent.chmod(_FOLDER_MODE)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(content)
    temporary.chmod(_FILE_MODE)
    temporary.replace(path)


def _log_line(level: str, event: str, **fields: object) -> None:
    """Write a log line in the form that all components use."""
    sanitized_fields = {
        key: wording.sanitize_message(field) if isinstance(field, str) else field for key, field in fields.items()
    }
    line = {
        "event": wording.sanitize_message(event),
        **sanitized_fields,
        "level": level,
        "component": shareagent.CONTAINER_NAME,
    }
    sys.stderr.write(json.dumps(line | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n")
