"""The extender under the stock kube-scheduler: races, and its own death."""

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core.api import names
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, assigned, inspect, kill9, scheduler_tls, workload

pytestmark = [pytest.mark.cluster("sim", last=True)]

CARDS = 8  # of the nodes below


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """With four nodes of two cards each."""
    for space in spaces(cluster, request):
        space.nodes(4)
        yield space


def create_at_once(space: Space, pods: list[dict]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(space.create, pods))


def request(port: int, context: ssl.SSLContext, method: str, path: str) -> bytes:
    caller = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE)
    with contextlib.closing(caller):
        caller.request(method, names.EXTENDER_PREFIX + path, body=b"{}" if method == "POST" else None)
        return caller.getresponse().read()


def from_annotations(space: Space) -> dict[tuple[str, int], dict[str, int]]:
    """Who holds what by the pods' own word."""
    cards: dict[tuple[str, int], dict[str, int]] = {}
    for pod in space.pods():
        node = pod["spec"].get("nodeName")
        if node:
            for share in assigned(pod).shares():
                name = f"{space.name}/{pod['metadata']['name']}"
                cards.setdefault((node, share.index), {})[name] = share.mem
    return cards


def ledger(cluster: Cluster) -> dict[tuple[str, int], dict[str, int]]:
    return {card: pods for card, (_, _, pods) in inspect(cluster).items() if pods}


def bound(space: Space) -> list[dict]:
    return [pod for pod in space.pods() if pod["spec"].get("nodeName")]


def test_forty_pods_that_race_for_little_memory_never_fill_a_card_over(cluster: Cluster, space: Space):
    mem = 6000  # two on a card; what is left of two cards would be enough, so only the extender can refuse
    create_at_once(space, [workload(f"p{i}", gpu_mem=mem) for i in range(40)])
    space.wait(lambda: len(bound(space)) == 2 * CARDS, "every card has two pods")
    waiting = {pod["metadata"]["name"] for pod in space.pods()} - {pod["metadata"]["name"] for pod in bound(space)}
    for name in waiting:
        space.refused(name, "Insufficient GPU Memory in one device")
    space.create_and_locate(workload("late", gpu_mem=4000))  # it came after them all, and fits beside two
    assert len(bound(space)) == 2 * CARDS + 1
    held = from_annotations(space)
    assert all(sum(pods.values()) <= P100 for pods in held.values())
    space.wait(lambda: ledger(cluster) == held, "the ledger says what the annotations say")


def test_killed_in_the_middle_it_comes_back_with_the_ledger_of_the_annotations(cluster: Cluster, space: Space):
    extender = cluster.process("extender")
    pods = [workload(f"p{i}", gpu_mem=2000) for i in range(40)]
    create_at_once(space, pods[:20])
    for some, later in ((5, pods[20:30]), (25, pods[30:])):
        space.wait(lambda some=some: len(bound(space)) >= some, f"{some} pods have a node")
        kill9(extender)
        create_at_once(space, later)  # so that some have no node, however fast the others were
        extender.restart()
        cluster.parts.wait_ready("extender")
    space.wait(lambda: len(bound(space)) == 40, "all pods have a node")
    held = from_annotations(space)
    assert all(sum(pods.values()) <= P100 for pods in held.values())
    space.wait(lambda: ledger(cluster) == held, "the ledger says what the annotations say")


def test_the_gpushare_tools_json_is_served(cluster: Cluster, space: Space):
    (name, *_) = space.nodes()
    context = scheduler_tls(cluster.parts.tls_dir)
    (node,) = json.loads(request(cluster.parts.ports["extender"], context, "GET", f"/inspect/{name}"))["nodes"]
    assert (node["name"], node["totalGPU"], len(node["devs"])) == (name, 2 * P100, 2)
