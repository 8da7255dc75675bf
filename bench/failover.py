"""From the end of a leading extender to the first filter answer of the next: told to end (SIGTERM), and killed.

Two extenders of a real control plane, which are asked in turn as kube-scheduler would ask: a call that is answered with
an error is no answer. Nothing else runs, so the time is that of Lease, catching up and start of the term.
"""

import http.client
import json
import os
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.timing import Row
from cardwise.core.api import names
from tests.build import pod
from tests.cluster import Cluster, ClusterSpec
from tests.cluster.processes import Process
from tests.integration.replicas import Pair, ready, two_extenders
from tests.integration.sharing import kill9

_LIMIT = 60.0  # seconds
_PAUSE = 0.02  # seconds between two questions


def run(nodes: int, times: int) -> list[Row]:
    state = Path(tempfile.gettempdir()) / f"cwf-{os.getuid()}"  # one folder: a run cleans up what a killed one has left
    spec = ClusterSpec(state_dir=state, sim_nodes=nodes)
    with Cluster.start(spec, lambda text: print(text, file=sys.stderr)) as cluster, two_extenders(cluster) as pair:
        ways: dict[str, Callable[[Process], None]] = {
            "told to end (SIGTERM)": lambda leader: os.kill(leader.pid, 15),
            "killed (SIGKILL)": kill9,
        }
        return [_row(what, [_once(pair, nodes, end) for _ in range(times)]) for what, end in ways.items()]


def _once(pair: Pair, nodes: int, end: Callable[[Process], None]) -> float:
    leader = pair.leader()
    heir = pair.other(leader)
    asked = _Asked(pair, heir.name, nodes)
    assert not asked.answers(), "it stands by"
    began = time.monotonic()
    end(leader)
    while not asked.answers():
        if time.monotonic() > began + _LIMIT:
            raise RuntimeError(f"{heir.name} does not answer")
        time.sleep(_PAUSE)
    seconds = time.monotonic() - began
    print(f"{seconds:.2f} s", file=sys.stderr)
    leader.restart()
    ready(leader)
    return seconds


class _Asked:
    """One extender, to which filter is sent."""

    def __init__(self, pair: Pair, name: str, nodes: int) -> None:
        self._port = pair.ports[name]
        tls = pair.cluster.parts.tls_dir
        self._context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
        self._context.load_cert_chain(tls / "client.crt", tls / "client.key")
        share = pod("asked", gpu_mem=100)
        share["metadata"] |= {"uid": "asked", "namespace": "default"}
        limits = share["spec"]["containers"][0]["resources"]["limits"]
        limits[names.SHARE] = "1"
        self._body = json.dumps({"Pod": share, "NodeNames": [f"sim-{i + 1}" for i in range(nodes)]})

    def answers(self) -> bool:
        """With nodes."""
        caller = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=2)
        try:
            caller.request("POST", f"{names.EXTENDER_PREFIX}/filter", self._body)
            answer = json.loads(caller.getresponse().read())
        except OSError:
            return False
        finally:
            caller.close()
        return bool(answer.get("NodeNames")) and not answer.get("Error")


def _row(what: str, seconds: list[float]) -> Row:
    ordered = sorted(seconds)
    values = {"p50": f"{ordered[len(ordered) // 2]:.2f} s", "p99": f"{ordered[-1]:.2f} s"}
    return Row(f"leader {what} to the next one's first filter answer", values | {"runs": str(len(seconds))})
