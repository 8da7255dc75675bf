"""Free loopback ports below the kernel's range for outgoing connections, which would take them."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_LOW, _HIGH = 15_000, 30_000
_own_ports: set[int] = set()  # by this process
_locks: dict[str, int] = {}  # by kind the open file, whose byte N is locked by the process that has number N


def free(count: int) -> list[int]:
    """Ports that nothing listens on now, and that no other process of the tests was given and still runs.

    A cluster draws its ports at once and listens on the last of them many seconds later, while others start.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(_LOW, _HIGH)
        if port in _own_ports or not claim_number("ports", port):
            continue
        _own_ports.add(port)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    return ports


def claim_number(kind: str, number: int) -> bool:
    """Whether no other process of the tests has this number of its kind: then it is ours as long as we run."""
    if kind not in _locks:
        path = Path(tempfile.gettempdir()) / f"cardwise-tests-{kind}"
        _locks[kind] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(_locks[kind], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        return False
    return True
