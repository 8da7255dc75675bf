"""A pod for the share agent: the node's MPS folders as they are mounted there, and the agent as a process."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cardwise.core import assignment as codec
from cardwise.core import mps, names, shareagent
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.mps import Scope, State, Status
from cardwise.core.quantity import MiB, Percent
from cardwise.gpus import mpsnode
from mps import homes
from tests.mps.worlds import eventually

P100 = 16276
ONE, TWO = "GPU-1", "GPU-2"
AGENT = [sys.executable, "-m", "mps.agent"]


def share(uuid: str = ONE, mem: int = 8138, core: int = 0) -> CardShare:
    return CardShare(int(uuid[-1]), uuid, MiB(mem), Percent(core), MiB(P100))


def assignment(**containers: list[CardShare]) -> str:
    """By container key, where `c0` is 0 and `init_1` is init-1."""
    by_key = {key.lstrip("c").replace("_", "-"): tuple(shares) for key, shares in containers.items()}
    return codec.encode(Assignment(by_key), assume_time_ns=1)[names.ASSIGNMENT]


class Card:
    """A card's folder, and a socket that listens as its daemon's does."""

    def __init__(self, root: Path, uuid: str = ONE) -> None:
        self.uuid = uuid
        self.home = root / mps.folder(str(root), uuid).name
        homes.prepare(self.home)
        self.status = Status(
            uuids=(uuid,),
            scope=Scope.CARD,
            state=State.READY,
            checked=mpsnode.now(),
            valid_seconds=600.0,
            ceilings={uuid: MiB(P100)},
        )
        self.socket: socket.socket | None = None

    def says(self, **changes: Any) -> "Card":
        self.status = replace(self.status, **changes)
        homes.write_status(self.home, self.status)
        return self

    def runs(self) -> "Card":
        self.dies()
        (self.home / mps.PIPE / mps.CONTROL).unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(self.home / mps.PIPE / mps.CONTROL))
        self.socket.listen()
        return self

    def dies(self) -> "Card":
        """As with SIGKILL: the socket's file stays."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            (self.home / mps.PIPE / mps.CONTROL).unlink()
            dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dead.bind(str(self.home / mps.PIPE / mps.CONTROL))
            dead.close()
        return self


class Pod:
    """`start` an agent in it, ask it, end it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "share"
        self.folder.mkdir()
        self.root = folder / "mps"
        self.root.mkdir()
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}

    def start(self, told: str, *, wait: bool = True, port: int = 0, hook: bool = False) -> "Pod":
        self.env = {
            shareagent.ASSIGNMENT_ENV: told,
            shareagent.WAIT_ENV: State.READY if wait else "",
            shareagent.METRICS_PORT_ENV: str(port),
            shareagent.FOLDER_ENV: str(self.folder),
            shareagent.MPS_ROOT_ENV: str(self.root),
            "PATH": os.environ["PATH"],
            **({shareagent.HOOK_ENV: "true"} if hook else {}),
        }
        return self.again()

    def again(self) -> "Pod":
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(AGENT, env=self.env, stderr=log)
        eventually(self.answers, "the agent answers")
        return self

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(20)
        self.process = None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)

    def answers(self) -> bool:
        try:
            self.ask("/readyz")
        except OSError:
            return False
        return True

    def probe(self) -> tuple[int, str]:
        """As the kubelet does: exit status and what it would show."""
        done = command("--probe", env=self.env)
        return done.returncode, done.stdout + done.stderr

    def ask(self, path: str, container: str = "") -> tuple[int, str]:
        return parsed(self.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), container))

    def raw(self, request: bytes, container: str = "") -> bytes:
        with self.connected(container) as client:
            client.sendall(request)
            return received(client)

    def connected(self, container: str = "") -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(str(self.folder / container / shareagent.SOCKET))
            client.settimeout(20)  # not before: a queue that is full would be an error
        except OSError:
            client.close()
            raise
        return client

    def document(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / container / shareagent.FILE).read_text())
        return found

    def told_enforced(self, container: str, by: str) -> None:
        eventually(lambda: self.document(container)["enforced"] == by, f"{container} is told {by!r}")


def command(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AGENT, *arguments], env=env, capture_output=True, text=True, timeout=50, check=False)


def received(client: socket.socket) -> bytes:
    answer = b""
    while more := client.recv(65536):
        answer += more
    return answer


def parsed(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
