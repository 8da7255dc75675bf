"""The double of a card: its memory, its processes and their faults, for tenants that run on doublecuda.

A tenant is a connection, so what it held is free when its process ends, however it ends; and the kernel says which
process it is, also of one in a container. NVML's part is the file of simulated cards, which is written on each change.
MPS' part is the control double's, whose files in the daemon's log folder say who its clients are and that one faulted.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cardwise.core.api import mps
from cardwise.gpus.simulated import SimulatedGpus
from tests.realcard.doublecuda import ERRORS

MEMORY = 143_771  # MiB; an H200
CONTEXT, SMALLEST_CONTEXT = 514, 544  # MiB: what CUDA's own takes, and what it needs to start
DRIVER = "580.159.04"
SMS = 132
_KERNEL_SECONDS = 0.002


@dataclass(eq=False)
class _Client:
    """A tenant's process. `held` and `limit` in MiB."""

    pid: int
    through: bool = False
    limit: int | None = None
    percent: float = 100.0
    held: float = 0.0


class DoubleCard:
    """One card in `folder`. `mps_root`: of the manager whose daemon serves it."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "card.sock"
        self.mps_root: Path | None = None
        self._card: dict[str, Any] = {
            "index": 0,
            "uuid": f"GPU-double-{os.getpid()}",
            "model": "double of an H200",
            "memoryMiB": MEMORY,
            "properties": {"driver": DRIVER},
        }
        self._file = folder / "cards.yaml"
        self._lock = threading.Lock()
        self._clients: list[_Client] = []
        self._faulted: list[_Client] = []
        self._write()
        self.gpus = SimulatedGpus(self._file)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.address))
        self.address.chmod(0o666)
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def serving(self, file: Path) -> Iterator[SimulatedGpus]:
        """Meanwhile it is the only card of this file, which other programs read."""
        before = self._file, self._card
        with self._lock:
            (card,) = yaml.safe_load(file.read_text())["cards"]
            self._file, self._card = file, card
        yield SimulatedGpus(file)
        with self._lock:
            self._file, self._card = before

    def close(self) -> None:
        self.gpus.close()
        with contextlib.suppress(OSError):  # so that `accept` returns
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        client = _Client(int.from_bytes(credentials[:4], "little"))
        with connection, contextlib.suppress(OSError):
            while message := connection.recv(65536):
                request = json.loads(message)
                answer = getattr(self, f"_on_{request.pop('call')}")(client, **request)
                connection.send(json.dumps(answer).encode())
        with self._lock:
            for clients in (self._clients, self._faulted):
                if client in clients:
                    clients.remove(client)
            self._write()

    def _on_init(self, client: _Client, *, through: bool, limit: int | None, percent: float) -> dict:
        client.through = through
        client.limit, client.percent = (limit, percent) if through else (None, 100.0)
        if client.limit is not None and client.limit < SMALLEST_CONTEXT:
            return {"code": ERRORS["out of memory"]}
        with self._lock:
            client.held = CONTEXT
            self._clients.append(client)
            self._write()
        return {"code": 0}

    def _on_see(self, client: _Client) -> dict:
        with self._lock:
            return {"free": int(self._free(client)), "total": MEMORY, "sms": int(SMS * client.percent / 100) // 2 * 2}

    def _on_allocate(self, client: _Client, *, mib: float) -> dict:
        with self._lock:
            if mib > self._free(client):
                return {"code": ERRORS["out of memory"]}
            client.held += mib
            self._write()
        return {"code": 0}

    def _on_launch(self, client: _Client, *, blocks: int, bad: bool) -> dict:
        time.sleep(_KERNEL_SECONDS if blocks < SMS else 2 * _KERNEL_SECONDS)
        with self._lock:
            log = self._log()
            if bad:
                self._faulted += [other for other in self._clients if other.through and client.through]
                if client.through and log:
                    (log / "fault").touch()
            if log and (log / "terminated").exists() and str(client.pid) in (log / "terminated").read_text().split():
                return {"code": ERRORS["terminated"]}
            return {"code": ERRORS["illegal address"] if bad or client in self._faulted else 0}

    def _free(self, client: _Client) -> float:
        card = MEMORY - sum(other.held for other in self._clients)
        return card if client.limit is None else min(card, client.limit - client.held)

    def _log(self) -> Path | None:
        """The folder in which the control double finds its files; None without a daemon."""
        if self.mps_root is None:
            return None
        log = Path(mps.card_daemon_folder(str(self.mps_root), self._card["uuid"])) / mps.LOG_FOLDER
        return log if log.is_dir() else None

    def _write(self) -> None:
        processes = [{"pid": client.pid, "memoryMiB": int(client.held)} for client in self._clients]
        scratch = self._file.with_suffix(".new")
        scratch.write_text(json.dumps({"cards": [self._card | {"processes": processes}]}))  # which is YAML too
        scratch.replace(self._file)
        if log := self._log():
            clients = [client.pid for client in self._clients if client.through]
            (log / "clients").write_text("".join(f"{pid}\n" for pid in clients))
