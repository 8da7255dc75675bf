"""A TCP balancer in front of several replicas, as a Service would be: each new connection goes to the next one."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Sequence

from tests.cluster.processes import PATIENCE


class Balancer:
    """Listens on `port` (0: any) of loopback until closed; a replica that refuses is skipped."""

    def __init__(self, replicas: Sequence[int], port: int = 0) -> None:
        self.served = dict.fromkeys(replicas, 0)
        self._turn = itertools.cycle(replicas)
        self._listener = socket.create_server(("127.0.0.1", port), reuse_port=False)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # shutdown wakes the accept; close alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            _end(connection)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it goes on taking connections"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            replica = self._connect()
            if replica is None:
                client.close()
                continue
            self._open |= {client, replica}
            for source, other in ((client, replica), (replica, client)):
                threading.Thread(target=self._pump, args=(source, other), daemon=True).start()

    def _connect(self) -> socket.socket | None:
        for port in itertools.islice(self._turn, len(self.served)):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 2)
                connection.settimeout(None)
                self.served[port] += 1
                return connection
        return None

    def _pump(self, source: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                other.sendall(data)
        for connection in (source, other):
            _end(connection)
            self._open.discard(connection)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
