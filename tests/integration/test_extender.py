"""The extender under the stock kube-scheduler: who may call it, races, its own death, and hanging."""

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core import names, schedulerconfig
from tests.build import P100, container
from tests.cluster import Cluster
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, inspect, kill9, workload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CARDS = 8  # of the cluster below


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four simulated nodes of two cards each."""
    yield from started(SpecOf(sim_nodes=4))


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Space]:
    made = Space(cluster, f"extender-{time.monotonic_ns() % 10**9}")
    yield made
    cluster.process("extender").resume()
    made.clear()
    made.wait(lambda: all(not used for _, used, _ in inspect(cluster).values()), "nothing is held any more", 90)


def create_at_once(space: Space, pods: list[dict]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(space.create, pods))


def ask(port: int, context: ssl.SSLContext, method: str, path: str) -> bytes:
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=5)) as caller:
        caller.request(method, names.EXTENDER_PREFIX + path, body=b"{}" if method == "POST" else None)
        return caller.getresponse().read()


def from_annotations(space: Space) -> dict[tuple[str, int], dict[str, int]]:
    """Who holds what by the pods' own word."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for pod in space.pods():
        node = pod["spec"].get("nodeName")
        if node:
            for share in assigned(pod).shares():
                name = f"{space.name}/{pod['metadata']['name']}"
                found.setdefault((node, share.index), {})[name] = share.mem
    return found


def ledger(cluster: Cluster) -> dict[tuple[str, int], dict[str, int]]:
    return {card: pods for card, (_, _, pods) in inspect(cluster).items() if pods}


def bound(space: Space) -> list[dict]:
    return [pod for pod in space.pods() if pod["spec"].get("nodeName")]


def test_a_caller_without_a_certificate_is_refused(cluster: Cluster):
    folder = cluster.parts.tls_dir
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    for key in ("extender", "extender-bind"):
        port = cluster.parts.ports[key]
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            ask(port, context, "POST", "/bind")


def test_a_hundred_pods_that_race_for_little_memory_never_fill_a_card_over(cluster: Cluster, space: Space):
    mem = 6000  # two on a card; what is left of two cards would be enough, so only the extender can refuse
    create_at_once(space, [workload(f"p{i}", gpu_mem=mem) for i in range(100)])
    space.wait(lambda: len(bound(space)) == 2 * CARDS, "every card has two pods", 90)
    time.sleep(2)
    assert len(bound(space)) == 2 * CARDS
    held = from_annotations(space)
    assert all(sum(pods.values()) <= P100 for pods in held.values())
    space.wait(lambda: ledger(cluster) == held, "the ledger says what the annotations say", 60)
    refused = next(pod for pod in space.pods() if not pod["spec"].get("nodeName"))
    space.wait(
        lambda: "Insufficient GPU Memory in one device" in space.reasons(refused["metadata"]["name"]), "the reason", 60
    )


def test_killed_in_the_middle_it_comes_back_with_the_ledger_of_the_annotations(cluster: Cluster, space: Space):
    extender = cluster.process("extender")
    create_at_once(space, [workload(f"p{i}", gpu_mem=2000) for i in range(40)])
    for _ in range(2):
        time.sleep(0.5)
        kill9(extender)
        extender.restart()
        cluster.parts.wait_ready("extender", 60)
    space.wait(lambda: len(bound(space)) == 40, "all pods have a node", 120)
    held = from_annotations(space)
    assert all(sum(pods.values()) <= P100 for pods in held.values())
    space.wait(lambda: ledger(cluster) == held, "the ledger says what the annotations say", 60)


def test_while_it_hangs_pods_without_gpu_wait_no_longer_than_the_fast_timeout(cluster: Cluster, space: Space):
    limit = float(schedulerconfig.FAST_TIMEOUT.rstrip("s"))
    extender = cluster.process("extender")
    extender.pause()
    create_at_once(space, [workload("gpu", gpu_mem=1000)])
    time.sleep(0.3)
    waited = []
    for i in range(5):
        began = time.monotonic()
        space.create(workload(f"cpu{i}", [container() | {"resources": {"limits": {"cpu": "1"}}}]))
        space.placed(f"cpu{i}", 60)
        waited.append(time.monotonic() - began)
    assert max(waited) < limit + 3.0, waited
    extender.resume()
    space.placed("gpu", 60)


def test_the_gpushare_tools_json_is_served(cluster: Cluster):
    folder = cluster.parts.tls_dir
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "client.crt", folder / "client.key")
    (node,) = json.loads(ask(cluster.parts.ports["extender"], context, "GET", "/inspect/sim-1"))["nodes"]
    assert (node["name"], node["totalGPU"], len(node["devs"])) == ("sim-1", 2 * P100, 2)
