"""The agent's one thread: looks at the cards, writes the files, answers. Ends with the signal, at once."""

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
from cardwise.core.values import wording
from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import mpsfiles
from cardwise.gpus.mpsfiles import CardReadiness
from mps.agent import podshares
from mps.agent.endpoint import Endpoint, Reply
from mps.agent.podshares import Told

_WAITING_SECONDS = 2.0
_READY_SECONDS = 5.0
_OPEN = 0o755
_READABLE = 0o644
_POD = ""  # the listeners that are no container's
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_BAD_SETTING = 2


class ShareAgent:
    """`run` never returns. `hook`: the pod's containers get the frameworks' hook from here."""

    def __init__(self, told: Told, folder: Path, mps_root: Path, *, hook: bool = False, clock: Clock = BOOT) -> None:
        self._told = told
        self._folder = folder
        self._mps_root = mps_root
        self._clock = clock
        self._endpoint = Endpoint(self._answer, clock)
        self._looks: dict[str, CardReadiness] = {}
        self._enforced = dict.fromkeys(told.shares, podshares.UNKNOWN)
        self._unwritten = set(told.shares)
        self._unopened: dict[Path | int, str] = {
            **{folder / key / shareagent.SOCKET: key for key in told.shares},
            # Last: who asks it finds everything else in its place.
            folder / shareagent.SOCKET: _POD,
            **({told.port: _POD} if told.port else {}),
        }
        self._trouble: dict[str, str] = {}
        self._hookless = "the frameworks' hook is not laid out yet" if hook else ""
        # For good: who restarts in a pod that runs must not call it unready for what befalls MPS now.
        self._ready = (folder / shareagent.STARTED).exists()

    def run(self) -> NoReturn:
        while True:
            self._endpoint.serve(self.turn())

    def turn(self) -> float:
        """A look at everything, and what follows from it; seconds until the next one."""
        if self._told.waits:
            self._look()
        if self._hookless:
            self._lay_out_hook()
        self._tell()
        self._listen()
        if not self._ready and not self._problems():
            self._ready = True
            self._note_start()
            _say("info", "the pod's containers may start")
        return _READY_SECONDS if self._ready else _WAITING_SECONDS

    def _note_start(self) -> None:
        """For who comes after a restart of ours; the folder goes with the pod."""
        try:
            (self._folder / shareagent.STARTED).touch()
        except OSError as error:
            self._told_trouble("a restarted agent will not know that the pod has started", error)

    def _look(self) -> None:
        for uuid, need in self._told.needs().items():
            before, seen = (
                self._looks.get(uuid),
                mpsfiles.card_readiness(self._mps_root, uuid, memory_limit=need, clock=self._clock),
            )
            if before is None or before.reason != seen.reason:
                level = "warning" if seen.reason else "info"
                _say(level, "MPS", card=uuid, usable=not seen.reason, reason=seen.reason)
            self._looks[uuid] = seen

    def _problems(self) -> list[str]:
        """For readiness, and so for the pod's events."""
        found = [*(look.reason for look in self._looks.values()), self._hookless]
        return [wording.message(problem) for problem in found if problem]

    def _lay_out_hook(self) -> None:
        """Python programs of the pod's containers have the folder on their PYTHONPATH."""
        from cardwise.share import installation  # noqa: PLC0415 - for the few pods that ask for it

        try:
            installation.install_files(self._folder / shareagent.HOOK)
        except OSError as error:
            self._hookless = f"the frameworks' hook cannot be laid out: {error}"
            self._told_trouble("the frameworks' hook cannot be laid out", error)
        else:
            self._hookless = ""

    def _tell(self) -> None:
        states = {uuid: look.state for uuid, look in self._looks.items() if look.state is not None}
        for key, shares in self._told.shares.items():
            # A state file that cannot be read for a moment takes nothing back.
            by = podshares.enforced(shares, states, waits=self._told.waits) or self._enforced[key]
            if by == self._enforced[key] and key not in self._unwritten:
                continue
            self._enforced[key] = by
            self._unwritten.add(key)
            try:
                _replace(self._folder / key / shareagent.FILE, podshares.document(shares, by))
            except OSError as error:
                self._told_trouble(f"{shareagent.FILE} of container {key} cannot be written", error)
            else:
                self._unwritten.discard(key)

    def _listen(self) -> None:
        for where, name in list(self._unopened.items()):
            try:
                if isinstance(where, int):
                    self._endpoint.listen_tcp(where, name)
                else:
                    self._endpoint.listen_unix(where, name)
            except OSError as error:
                self._told_trouble(f"cannot listen at {where}", error)
            else:
                del self._unopened[where]

    def _told_trouble(self, what: str, error: OSError) -> None:
        """In the log, once. It is tried again at every turn."""
        if self._trouble.get(what) != str(error):
            self._trouble[what] = str(error)
            _say("error", what, error=str(error))

    def _answer(self, listener: str, path: str) -> Reply:
        match path:
            case "/share" if listener != _POD:
                body = podshares.document(self._told.shares[listener], self._enforced[listener])
                return Reply(200, body + "\n", "application/json")
            case "/metrics":
                body = podshares.metrics(self._told, self._enforced, self._looks, ready=self._ready)
                return Reply(200, body, _METRICS)
            case "/readyz":
                body = "".join(f"{problem}\n" for problem in self._problems()) or "ok\n"
                return Reply(200 if self._ready else 503, body)
        return Reply(404, "there are /share (on a container's own socket), /metrics and /readyz\n")


def run(environ: Mapping[str, str]) -> NoReturn:
    """Runs the agent until it is told to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        told = podshares.read(environ)
    except InvalidRequest as error:
        _say("error", "cannot start", error=str(error))
        sys.exit(_BAD_SETTING)
    folder = Path(environ.get(shareagent.FOLDER_ENV) or shareagent.FOLDER)
    root = Path(environ.get(shareagent.MPS_ROOT_ENV) or shareagent.MPS_ROOT)
    ShareAgent(told, folder, root, hook=bool(environ.get(shareagent.HOOK_ENV))).run()


def _end(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - the signature of signal handlers
    """Nothing is left to do: the folder goes with the pod."""
    os._exit(0)


def _replace(path: Path, content: str) -> None:
    """In one step: a reader finds the whole file, or the one before. Raises OSError."""
    if not path.parent.is_dir():
        path.parent.mkdir()
        path.parent.chmod(_OPEN)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(content)
    scratch.chmod(_READABLE)
    scratch.replace(path)


def _say(level: str, event: str, **fields: object) -> None:
    """A line of the form that all parts log in."""
    told = {key: wording.message(value) if isinstance(value, str) else value for key, value in fields.items()}
    line = {"event": wording.message(event), **told, "level": level, "component": shareagent.CONTAINER}
    sys.stderr.write(json.dumps(line | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n")
