"""Measures failover: the time from a leading extender's end to the first filter response of the next leader.

The leader ends by SIGTERM or SIGKILL. Two extenders of a real control plane get filter calls as from kube-scheduler; an
error does not count as a response. Nothing else runs, so the time consists of the Lease's expiry, the standby's last
updates, and its start as leader.
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

_TIMEOUT = 60.0  # maximum seconds of a failover
_PAUSE = 0.02  # seconds between two calls


def run(nodes: int, times: int) -> list[Row]:
    """Measure `times` failovers by SIGTERM, and the same number by SIGKILL."""
    state = (
        Path(tempfile.gettempdir()) / f"cwf-{os.getuid()}"
    )  # always the same folder, so that a run cleans up after a killed run
    spec = ClusterSpec(state_dir=state, sim_nodes=nodes)
    with Cluster.start(spec, lambda text: print(text, file=sys.stderr)) as cluster, two_extenders(cluster) as pair:
        signals: dict[str, Callable[[Process], None]] = {
            "stopped (SIGTERM)": lambda leader: os.kill(leader.pid, 15),
            "killed (SIGKILL)": kill9,
        }
        return [_row(label, [_fail_over(pair, nodes, end) for _ in range(times)]) for label, end in signals.items()]


def _fail_over(pair: Pair, nodes: int, end: Callable[[Process], None]) -> float:
    """End the leader with `end`. Returns the seconds until the standby serves filter."""
    leader = pair.leader()
    standby = pair.other(leader)
    caller = _FilterCaller(pair, standby.name, nodes)
    assert not caller.is_served(), "a standby serves no calls"
    start = time.monotonic()
    end(leader)
    while not caller.is_served():
        if time.monotonic() > start + _TIMEOUT:
            raise RuntimeError(f"{standby.name} does not serve filter")
        time.sleep(_PAUSE)
    seconds = time.monotonic() - start
    print(f"{seconds:.2f} s", file=sys.stderr)
    leader.restart()
    ready(leader)
    return seconds


class _FilterCaller:
    """Calls the filter verb of one extender."""

    def __init__(self, pair: Pair, name: str, nodes: int) -> None:
        self._port = pair.ports[name]
        tls = pair.cluster.parts.tls_dir
        self._context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
        self._context.load_cert_chain(tls / "client.crt", tls / "client.key")
        share = pod("failover", gpu_mem=100)
        share["metadata"] |= {"uid": "failover", "namespace": "default"}
        limits = share["spec"]["containers"][0]["resources"]["limits"]
        limits[names.SHARE] = "1"
        self._body = json.dumps({"Pod": share, "NodeNames": [f"sim-{i + 1}" for i in range(nodes)]})

    def is_served(self) -> bool:
        """Whether the extender responds to filter with nodes."""
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=2)
        try:
            connection.request("POST", f"{names.EXTENDER_PREFIX}/filter", self._body)
            response = json.loads(connection.getresponse().read())
        except OSError:
            return False
        finally:
            connection.close()
        return bool(response.get("NodeNames")) and not response.get("Error")


def _row(label: str, seconds: list[float]) -> Row:
    ordered = sorted(seconds)
    cells = {"p50": f"{ordered[len(ordered) // 2]:.2f} s", "p99": f"{ordered[-1]:.2f} s"}
    return Row(f"leader {label} to the first filter response of the next", cells | {"runs": str(len(seconds))})
