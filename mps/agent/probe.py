"""The startup probe's question to the agent. Each probe is a process of its own and must not cost a thing, so it asks
for a while: the pod starts when the agent says so, and not when the kubelet's next probe comes.
"""

import socket
import sys
import time
from collections.abc import Mapping
from typing import Final

from cardwise.core.api import shareagent

_TRIES, _PAUSE = 25, 0.2  # five seconds; the kubelet shows the reason after that
_SECONDS: Final = 3.0  # for an answer
_YES: Final = b"200"


def ask(environ: Mapping[str, str], tries: int = _TRIES, pause: float = _PAUSE) -> int:
    """The exit status: 0 once the others may start. Says why not on stderr, which the kubelet puts into the pod's
    events.
    """
    path = f"{environ.get(shareagent.FOLDER_ENV) or shareagent.FOLDER}/{shareagent.SOCKET}"
    why = _why_not(path)
    while why is not None and tries > 1:
        time.sleep(pause)  # without a Clock: each probe is a new process, so each import costs CPU again
        tries, why = tries - 1, _why_not(path)
    if why is None:
        return 0
    sys.stderr.write(why)
    return 1


def _why_not(path: str) -> str | None:
    """One question: why the pod may not start, None where it may."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_SECONDS)
            client.connect(path)
            client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            answer = b""
            while more := client.recv(4096):
                answer += more
    except OSError as error:
        return f"the share agent does not answer at {path}: {error}\n"
    head, _, body = answer.partition(b"\r\n\r\n")
    return None if head.split()[1:2] == [_YES] else body.decode(errors="replace")
