"""A pod for the share agent: the node's MPS folders as they are mounted there, and the agent as a process."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cardwise.clock import BOOT, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.mps import DaemonScope, MpsState, Status
from cardwise.core.values.quantity import MiB, Percent
from mps.agent import podshares, probe
from mps.agent.running import ShareAgent
from mps.daemon import directories
from tests.fakes.clock import FakeClock

P100 = 16276
ONE, TWO = "GPU-1", "GPU-2"
SECONDS = 60.0
AGENT = [sys.executable, "-m", "mps.agent"]


def share(uuid: str = ONE, mem: int = 8138, core: int = 0) -> CardShare:
    return CardShare(int(uuid[-1]), uuid, MiB(mem), Percent(core), MiB(P100))


def assignment(**containers: list[CardShare]) -> str:
    """By container key, where `c0` is 0 and `init_1` is init-1."""
    by_key = {key.lstrip("c").replace("_", "-"): tuple(shares) for key, shares in containers.items()}
    return codec.encode(Assignment(by_key), assume_time_ns=1)[names.ASSIGNMENT]


class Card:
    """A card's folder, and a socket that listens as its daemon's does."""

    def __init__(self, root: Path, uuid: str = ONE, clock: Clock = BOOT) -> None:
        self.uuid = uuid
        self.home = root / mps.card_daemon_folder(str(root), uuid).name
        directories.prepare_folders(self.home)
        self.status = Status(
            uuids=(uuid,),
            scope=DaemonScope.CARD,
            state=MpsState.READY,
            checked=clock.now(),
            valid_seconds=600.0,
            ceilings={uuid: MiB(P100)},
        )
        self.socket: socket.socket | None = None

    def says(self, **changes: Any) -> "Card":
        self.status = replace(self.status, **changes)
        directories.write_status(self.home, self.status)
        return self

    def runs(self) -> "Card":
        self.dies()
        (self.home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET).unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(self.home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET))
        self.socket.listen()
        return self

    def dies(self) -> "Card":
        """As with SIGKILL: the socket's file stays."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            (self.home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET).unlink()
            dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dead.bind(str(self.home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET))
            dead.close()
        return self


class Pod:
    """`start` an agent in it, in the test's own thread; `later` it takes its next turn."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.folder = folder / "share"
        self.folder.mkdir()
        self.root = folder / "mps"
        self.root.mkdir()
        self.env: dict[str, str] = {}
        self.agent: ShareAgent | None = None

    def start(self, assignment_text: str, *, wait: bool = True, hook: bool = False) -> "Pod":
        self.environment(assignment_text, wait=wait, hook=hook)
        self.agent = ShareAgent(
            podshares.parse_settings(self.env), self.folder, self.root, installs_hook=hook, clock=self.clock
        )
        self._next = self.agent.refresh_share()
        return self

    def environment(self, assignment_text: str, *, wait: bool = True, hook: bool = False) -> dict[str, str]:
        self.env = {
            shareagent.ASSIGNMENT_ENV: assignment_text,
            shareagent.WAIT_ENV: MpsState.READY if wait else "",
            shareagent.FOLDER_ENV: str(self.folder),
            shareagent.MPS_ROOT_ENV: str(self.root),
            "PATH": os.environ["PATH"],
            **({shareagent.HOOK_ENV: "true"} if hook else {}),
        }
        return self.env

    def again(self) -> "Pod":
        """As after SIGKILL: what it had open is closed, and its files stay."""
        self.close()
        return self.start(
            self.env[shareagent.ASSIGNMENT_ENV],
            wait=bool(self.env[shareagent.WAIT_ENV]),
            hook=shareagent.HOOK_ENV in self.env,
        )

    def later(self) -> "Pod":
        self.clock.advance(self._next)
        self._next = self.agent.refresh_share()
        return self

    def close(self) -> None:
        if self.agent is not None:
            self.agent._endpoint.close()
            self.agent = None

    def serve(self) -> None:
        """All that the agent can do at present: takes connections, reads, and answers."""
        for _ in range(4):
            self.agent._endpoint.serve_once(0.0)

    def probe(self, tries: int = 1, meanwhile: Callable[[], object] = lambda: None) -> tuple[int, str]:
        """What the kubelet's probe finds: exit status and what it would show. `meanwhile` happens again and again."""
        stderr = io.StringIO()
        codes: list[int] = []
        asking = threading.Thread(target=lambda: codes.append(probe.wait_ready(self.env, tries, 0.0)))
        with contextlib.redirect_stderr(stderr):
            asking.start()
            while asking.is_alive():
                self.agent._endpoint.serve_once(0.005)
                meanwhile()
        return codes[0], stderr.getvalue()

    def get(self, path: str, container: str = "") -> tuple[int, str]:
        return parsed(self.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), container))

    def raw(self, request: bytes, container: str = "") -> bytes:
        with self.connected(container) as client:
            client.sendall(request)
            return self.answered(client)

    def answered(self, client: socket.socket) -> bytes:
        self.serve()
        return received(client)

    def connected(self, container: str = "") -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(str(self.folder / container / shareagent.SOCKET_FILE))
        client.settimeout(SECONDS)
        self.serve()
        return client

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def document(self, container: str) -> dict[str, Any]:
        share: dict[str, Any] = json.loads((self.folder / container / shareagent.SHARE_FILE).read_text())
        return share


def command(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AGENT, *arguments], env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


def received(client: socket.socket) -> bytes:
    answer = b""
    while received := client.recv(65536):
        answer += received
    return answer


def parsed(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
