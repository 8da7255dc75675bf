"""Equal pods bound to different cards of one node at the same moment: each opens its own card, and no other.

Who guesses from Allocate which pod it is for confuses pods that ask for the same (gpushare-scheduler-extender #220).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from tests.cluster import Cluster
from tests.cluster.cards import TestCard
from tests.integration.conftest import spaces
from tests.integration.ruleone import RuleOne
from tests.integration.sharing import Space, cards_of, device_numbers, node_and_card, probe, probed, workload

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node]

NODE = "n1"
CARDS = 8
OVER_HALF = 9000  # MiB: no two of these pods fit on one card
ENDED = ("Succeeded", "Failed")


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    with cards_of(cluster, **{NODE: [TestCard()] * CARDS}):
        yield from spaces(cluster, request)


def test_eight_pairs_are_not_swapped(space):
    assert mismatches(space, pairs=8) == []


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_thousand_pairs_are_not_swapped(space):
    assert mismatches(space, pairs=1000) == []


def mismatches(space: Space, *, pairs: int) -> list[str]:
    """Rounds of as many pairs as the node has room for; what came out otherwise than the annotations say."""
    numbers = device_numbers(space.cluster, NODE)
    assert len(set(numbers.values())) == CARDS
    script = probe(numbers)
    findings: list[str] = []
    done = 0
    with RuleOne(space.cluster) as watcher:  # on a busy machine the first may end before the last is bound
        while done < pairs:
            at_once = min(CARDS // 2, pairs - done)
            findings += one_round(space, f"r{done}", 2 * at_once, script, numbers)
            done += at_once
            print(f"{done} of {pairs} pairs, {len(findings)} mismatches", flush=True)
    assert not watcher.failed, watcher.failed
    assert watcher.events > pairs
    return findings + watcher.violations


def one_round(space: Space, name: str, count: int, script: str, numbers: dict[str, str]) -> list[str]:
    pods = [
        workload(f"{name}-{i}", gpu_mem=OVER_HALF, node=NODE, command=script, spec={"restartPolicy": "Never"})
        for i in range(count)
    ]
    # All of them are in the queue before the first is placed, so they are bound within milliseconds.
    scheduler = space.cluster.process("kube-scheduler")
    scheduler.pause()
    try:
        with ThreadPoolExecutor(count) as threads:
            uids = set(threads.map(space.create, pods))
    finally:
        scheduler.resume()

    def ours() -> list[dict]:
        return [pod for pod in space.pods() if pod["metadata"]["uid"] in uids]

    space.wait(lambda: all(pod["status"]["phase"] in ENDED for pod in ours()), f"round {name} is over")
    ended = ours()
    findings = []
    for pod in ended:
        output = pod["status"]["containerStatuses"][0]["state"]["terminated"].get("message", "").splitlines()
        node, card = node_and_card(pod)
        if node != NODE or output != probed(numbers, card):
            findings.append(f"{pod['metadata']['name']} on card {card}: {output}")
        assert pod["metadata"]["annotations"][names.ASSIGNMENT]
    collection = paths.pods(space.name)
    space.cluster.api.delete(collection, {"gracePeriodSeconds": 0})
    return findings
