"""The startup probe's question to the agent. It runs every two seconds and must not cost a thing."""

import socket
import sys
from collections.abc import Mapping

from cardwise.core.api import shareagent

_SECONDS = 3.0
_YES = b"200"


def ask(environ: Mapping[str, str]) -> int:
    """The exit status. Says why not on stderr, which the kubelet puts into the pod's events."""
    path = f"{environ.get(shareagent.FOLDER_ENV) or shareagent.FOLDER}/{shareagent.SOCKET}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_SECONDS)
            client.connect(path)
            client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            answer = b""
            while more := client.recv(4096):
                answer += more
    except OSError as error:
        sys.stderr.write(f"the share agent does not answer at {path}: {error}\n")
        return 1
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split()[1:2] == [_YES]:
        return 0
    sys.stderr.write(body.decode(errors="replace"))
    return 1
