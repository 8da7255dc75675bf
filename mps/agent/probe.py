"""The startup probe's request to the agent.

Each probe is a new process, so it must be cheap. The probe repeats its request for some seconds. So the pod starts as
soon as the agent is ready, and does not wait for the kubelet's next probe.
"""

import socket
import sys
import time
from collections.abc import Mapping
from typing import Final

from cardwise.core.api import shareagent

_MAX_TRIES, _PAUSE_SECONDS = 25, 0.2  # the probe fails after five seconds; then the kubelet shows the reason
_REQUEST_SECONDS: Final = 3.0  # maximum time of a request
_OK_STATUS: Final = b"200"


def wait_ready(environ: Mapping[str, str], tries: int = _MAX_TRIES, pause: float = _PAUSE_SECONDS) -> int:
    """Wait until the pod's containers may start; returns the exit status.

    If the containers may not start, writes the reason to stderr. The kubelet shows the reason in the pod's events.
    """
    path = f"{environ.get(shareagent.FOLDER_ENV) or shareagent.FOLDER}/{shareagent.SOCKET_FILE}"
    reason = _unready_reason(path)
    while reason is not None and tries > 1:
        time.sleep(pause)  # Clock is not imported, because the import would delay each probe
        tries, reason = tries - 1, _unready_reason(path)
    if reason is None:
        return 0
    sys.stderr.write(reason)
    return 1


def _unready_reason(path: str) -> str | None:
    """Request /readyz once. Returns why the pod may not start; None if it may."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_REQUEST_SECONDS)
            client.connect(path)
            client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            response = b""
            while received := client.recv(4096):
                response += received
    except OSError as error:
        return f"the share agent does not answer at {path}: {error}\n"
    head, _, body = response.partition(b"\r\n\r\n")
    return None if head.split()[1:2] == [_OK_STATUS] else body.decode(errors="replace")
