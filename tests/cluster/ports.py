"""Free loopback ports below the kernel's range for outgoing connections, which would take them."""

import random
import socket

_LOW, _HIGH = 15_000, 30_000


def free(count: int) -> list[int]:
    """Ports that nothing listens on now. Two clusters that start together draw from 15,000 at random."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(_LOW, _HIGH)
        if port in found:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
