"""A machine with a real card: the manager with NVIDIA's own program, and tenants as processes."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import assignment as codec
from cardwise.core.api import mps
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.quantity import MiB, Percent
from cardwise.gpus import mpsfiles
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.selection import CardSelection, SelectedGpus
from cardwise.kube import paths
from mps.daemon.machine import DaemonPace
from mps.host.processes import CONTROL_PROGRAM, LOCAL
from mps.manager import ManagerLock, ManagerSettings, MpsManager
from tests.fakes.apiserver import ApiServer
from tests.mps.mpsnode import NODE
from tests.realcard.tenant import DOUBLE_ENV

PROGRAM = Path(__file__).parent / "tenant.py"
DOUBLE_LIBRARY = Path(__file__).parent / "doublecuda.py"  # which lies beside it
READY_SECONDS = 90.0
# As in a container: mounts, PIDs and IPC of its own, a small /dev/shm, and of MPS the clients' folder alone, read-only.
# $1: that folder; $2: where a container has it; $3: the manager's root; $4: the user; $5: the program.
CONTAINER = """
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p "$2"
mount --bind "$1" "$2"
mount -o remount,bind,ro "$2"
cp "$5" "${5%/*}/doublecuda.py" /run
mount -t tmpfs tmpfs "$3"
user=$4; shift 5
exec setpriv --reuid "$user" --regid "$user" --clear-groups /usr/bin/python3 /run/tenant.py "$@"
"""
UNSHARE = ("unshare", "--mount", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child")
KEEP = os.environ.get("CARDWISE_GPU_SETTINGS") == "keep"  # a lent card, whose settings are not ours to change
closes_the_card = pytest.mark.skipif(KEEP, reason="changes the card's compute mode; CARDWISE_GPU_SETTINGS=keep")


def eventually(ask: Callable[[], Any], condition: str = "", timeout: float = 30) -> Any:
    """What a real card and its daemon come to in their own time."""
    deadline = time.monotonic() + timeout
    while not (answer := ask()):
        assert time.monotonic() < deadline, condition or "not so in time"
        time.sleep(0.02)
    return answer


class Tenant:
    """A process with the environment of a container that has a share."""

    def __init__(self, environment: dict[str, str], command: list[str | Path], user: int | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, user=user
        )
        self._output: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the program itself, also in a container."""
        children = (Path("/proc") / str(self._process.pid) / "task" / str(self._process.pid) / "children").read_text()
        return int(children.split()[0]) if children.strip() else self._process.pid

    def heard(self, seconds: float = 60.0) -> dict[str, Any]:
        """The next that it says."""
        answer = self._output.get(timeout=seconds)
        assert answer is not None, f"it ended with rc {self._process.wait(5)} and said nothing"
        return answer

    def send_line(self, line: object = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> None:
        """Ends its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.finish()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._output.put(json.loads(line))
        self._output.put(None)


class Machine:
    """The first card, and at most one manager of it."""

    def __init__(self, folder: Path, gpus: NvmlGpus) -> None:
        self.root = folder / "mps"
        self.gpus = gpus
        self.card = gpus.cards()[0]
        self.api = ApiServer()
        metadata = {"name": self.card.uuid.lower(), "labels": {"cardwise.dev/node": NODE}}
        self.api.write_object(
            paths.extendedresources(),
            {"metadata": metadata, "spec": {"node": NODE, "uuid": self.card.uuid}, "status": {}},
        )
        self.manager: MpsManager | None = None
        self.tenants: list[Tenant] = []
        self._before = gpus.compute_mode(self.card.uuid)

    def start(self, **changes: Any) -> "Machine":
        """Until the card takes containers. `changes` are of the manager's settings."""
        control = shutil.which(CONTROL_PROGRAM)
        assert control is not None
        settings = ManagerSettings(
            node=NODE,
            root=self.root,
            scope=DaemonScope.CARD,
            control=Path(control),
            pace=DaemonPace(),
            exclusive=not KEEP,
            stop_daemons="always",
        )
        self._client = self.api.client()
        self._lock = ManagerLock(self.root)
        self._lock.acquire()
        chosen = _Lasting(self.gpus, CardSelection((self.card.uuid.lower(),)))
        self.manager = MpsManager(replace(settings, **changes), self._client, chosen, self.gpus)
        self.manager.start()
        self.wait_ready()
        return self

    def close(self) -> None:
        for tenant in self.tenants:
            tenant.close()
        if self.manager is not None:
            self.manager.stop()
            self._lock.release()
            self._client.close()
        for process in [*LOCAL.daemons(self.home / mps.PIPE_FOLDER), *LOCAL.servers(self.home / mps.PIPE_FOLDER)]:
            process.signal(signal.SIGKILL)
        if self.gpus.compute_mode(self.card.uuid) is not self._before:
            self.gpus.set_compute_mode(self.card.uuid, self._before)
        self.api.close()

    @property
    def home(self) -> Path:
        return Path(mps.card_daemon_folder(str(self.root), self.card.uuid))

    def problem(self, need: int = 0) -> str:
        return mpsfiles.unready_reason(self.root, self.card.uuid, memory_limit=MiB(need)) or ""

    def wait_ready(self, need: int = 0) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        eventually(lambda: not self.problem(need), self.problem(need), READY_SECONDS)
        return time.monotonic() - began

    def wait_not_ready(self) -> None:
        eventually(self.problem, "the card stays ready", 30.0)

    def bind(self, name: str, mib: int) -> None:
        shares = (CardShare(self.card.index, self.card.uuid, MiB(mib), Percent(0), self.card.memory),)
        annotations = codec.encode(Assignment({"0": shares}), assume_time_ns=1)
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations}
        pod = {"metadata": metadata, "spec": {"nodeName": NODE}, "status": {"phase": "Running"}}
        self.api.write_object(paths.pods(), pod)

    def share(self, name: str, mib: int) -> None:
        """Starts with a pod that has so much. Without one, CUDA has no room for its context on a large card."""
        self.bind(name, mib)
        self.start()
        self.wait_ready(mib)

    def visible(self, *, through: bool) -> dict[str, str]:
        """The variables by which a process sees this card alone, `through` MPS or straight."""
        # Nobody listens there, so CUDA goes without MPS; the default folder may have a daemon of somebody else's.
        pipe = self.home / mps.CLIENTS_FOLDER if through else self.root / "nowhere"
        return {"CUDA_VISIBLE_DEVICES": self.card.uuid, mps.PIPE_ENV: str(pipe)}

    def environment(self, *, mib: int, percent: int, through: bool) -> dict[str, str]:
        """That of a tenant's process."""
        kept = {name: variable for name, variable in os.environ.items() if not name.startswith("CUDA_")}
        limit = {mps.LIMIT_ENV: mps.limits_value([MiB(mib)])} if mib else {}
        return kept | self.visible(through=through) | limit | ({mps.PERCENT_ENV: str(percent)} if percent else {})

    def tenant(
        self,
        program: str,
        *numbers: object,
        mib: int = 0,
        percent: int = 0,
        through: bool = True,
        env: Mapping[str, str | None] | None = None,
        user: int | None = None,
    ) -> Tenant:
        """`mib` and `percent`: its own limits, 0 for none; not `through` MPS: straight to the card. `env`: in place of
        what it is given, None: without. `user`: another one's, in the system's own Python, since ours may lie where
        nobody else may go.
        """
        environment = self.environment(mib=mib, percent=percent, through=through)
        python: list[str | Path] = [sys.executable, PROGRAM]
        if user is not None:
            for file in (DOUBLE_LIBRARY, PROGRAM):
                copy = Path(shutil.copy(file, self.root))
                copy.chmod(0o644)
            python = ["/usr/bin/python3", copy]
        changed = {name: setting for name, setting in (environment | dict(env or {})).items() if setting is not None}
        return self.run(changed, [*python, program, *map(str, numbers)], user)

    def container(self, program: str, *numbers: object, mib: int = 0, percent: int = 0, user: int = 0) -> Tenant:
        """As `tenant` through MPS, in namespaces of its own, where it has of MPS what a container is given."""
        share = mps.container_environment([MiB(mib)] if mib else [], percent or None)
        kept = {name: os.environ[name] for name in ("PATH", DOUBLE_ENV) if name in os.environ}
        environment = kept | {"CUDA_VISIBLE_DEVICES": self.card.uuid} | share
        arguments = [self.home / mps.CLIENTS_FOLDER, mps.CONTAINER_PIPE, self.root, user, PROGRAM]
        command = [*UNSHARE, "sh", "-ec", CONTAINER, "sh", *map(str, arguments), program, *map(str, numbers)]
        return self.run(environment, command)

    def run(self, environment: dict[str, str], command: list[str | Path], user: int | None = None) -> Tenant:
        """Starts a program that speaks as the tenants' does."""
        self.tenants.append(Tenant(environment, command, user))
        return self.tenants[-1]


class _Lasting(SelectedGpus):
    """Of a driver that outlives the manager: the next test needs it."""

    def close(self) -> None:
        pass
