"""Preemption on the real kube-scheduler: who goes for a pod of high priority, and who gets what becomes free."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import P100
from tests.cluster import Cluster
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, inspect, kill9, outlive_lease, prioritize, workload

pytestmark = [pytest.mark.cluster("sim")]

HALF = P100 // 2
NODES, CARDS = 2, 2
SLOW = "simulated.test/ends-slowly"  # a finalizer: the pod is there, ending, until the test takes it away
PRIORITIES = {"low": 10, "middle": 100, "high": 1000}


@pytest.fixture(autouse=True, scope="module")
def _priorities(cluster: Cluster) -> None:
    prioritize(cluster, PRIORITIES)
    prioritize(cluster, {"never": 1000}, preempts=False)


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(NODES)
        yield space
        let_go(space, *(pod["metadata"]["name"] for pod in space.pods()))


def priority_pod(name: str, mem: int, priority: str, *, policy: str = "binpack") -> Json:
    return workload(name, gpu_mem=mem, spec={"priorityClassName": priority}, annotations={names.POLICY: policy})


def member(name: str, gang: str, minimum: int, *, card: bool = True) -> Json:
    """Of a gang of high priority."""
    pod = priority_pod(name, P100, "high")
    if not card:
        pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
    pod["metadata"]["annotations"] = {names.GROUP_NAME: gang, names.GROUP_NUM: str(minimum)}
    return pod


def slow(pod: Json) -> Json:
    """Its end takes as long as the test wants."""
    pod["metadata"]["finalizers"] = [SLOW]
    return pod


def let_go(space: Space, *ending: str) -> None:
    """What ends slowly has ended."""
    for name in ending:
        with contextlib.suppress(errors.NotFound):
            space.cluster.api.patch(paths.pods(space.name, name), {"metadata": {"finalizers": None}})


def there(space: Space) -> set[str]:
    """Pods with a node that are not being deleted."""
    return {
        pod["metadata"]["name"]
        for pod in space.pods()
        if pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp")
    }


def fill(space: Space, change: Callable[[Json], Json] = lambda pod: pod) -> dict[tuple[str, str], list[str]]:
    """Two pods of low priority on each GPU. Returns who is where, by node and card.

    The scheduler takes the youngest of a node: these are on two cards.
    """
    held: dict[tuple[str, str], list[str]] = {}
    for i in range(2 * NODES * CARDS):
        card = space.create_and_locate(change(priority_pod(f"low{i}", HALF, "low", policy="spread")))
        held.setdefault(card, []).append(f"low{i}")
    assert sorted(held.values()) == [[f"low{i}", f"low{i + NODES * CARDS}"] for i in range(NODES * CARDS)]
    return held


def test_exactly_those_who_free_one_card_go(space: Space) -> None:
    held = fill(space)
    everybody = there(space)
    for i in range(3):  # they wait for anything that becomes free
        space.create(priority_pod(f"next{i}", HALF, "low"))
    card = space.create_and_locate(priority_pod("first", P100, "high"))
    assert there(space) == everybody - set(held[card]) | {"first"}
    space.running("first")
    # What is left of nobody: those who wait have got nothing of the freed card.
    assert there(space) == everybody - set(held[card]) | {"first"}


@pytest.mark.parametrize("free", [0, 1])
def test_as_many_go_as_a_gang_lacks_cards(space: Space, free: int) -> None:
    """Three workers of a card each and a server without; nobody goes for a gang that would not be complete."""
    held = fill(space)
    for card in sorted(held)[:free]:
        space.delete(*held[card])
        space.wait_for_deletion(*held[card])
    everybody = there(space)
    too_many = [member(f"many{i}", "many", NODES * CARDS + 1) for i in range(NODES * CARDS + 1)]
    for pod in too_many:
        space.create(pod)
    space.wait(lambda: "waits for capacity for all its members" in space.reasons("many0"), "it waits")
    assert there(space) == everybody
    space.delete(*(pod["metadata"]["name"] for pod in too_many))
    space.wait_for_deletion(*(pod["metadata"]["name"] for pod in too_many))
    gang = [member(f"g{i}", "g", 4) for i in range(3)] + [member("server", "g", 4, card=False)]
    for pod in gang:
        space.create(pod)
    cards = {space.placed(f"g{i}") for i in range(3)}
    space.placed("server")
    assert len(cards) == 3
    spared = {name for card in held.keys() - cards for name in held[card]}
    assert there(space) == (spared & everybody) | {"g0", "g1", "g2", "server"}


def test_a_disruption_budget_is_respected(space: Space) -> None:
    """Three pods of a node may go: both of one card, and the younger one of the other."""
    held = fill(space)
    card = min(held)
    (other,) = (candidate for candidate in held if candidate[0] == card[0] and candidate != card)
    free = {*held[card], held[other][1]}
    spared = there(space) - free
    for name in spared:
        space.cluster.api.patch(paths.pods(space.name, name), {"metadata": {"labels": {"app": "spared"}}})
    spec = {"minAvailable": len(spared), "selector": {"matchLabels": {"app": "spared"}}}
    space.cluster.api.create(paths.poddisruptionbudgets(space.name), {"metadata": {"name": "spare"}, "spec": spec})
    path = paths.poddisruptionbudgets(space.name, "spare")
    space.wait(
        lambda: space.cluster.api.get(path).get("status", {}).get("currentHealthy") == len(spared), "it is counted"
    )
    assert space.create_and_locate(priority_pod("first", P100, "high")) == card
    assert there(space) == spared | {held[other][1], "first"}


def test_one_pod_goes_where_only_cards_are_short(space: Space) -> None:
    """Each card has a pod of more than a half: what is left would do in sum, and on no card of its own."""
    for i in range(NODES * CARDS):
        space.create_and_locate(priority_pod(f"low{i}", HALF + 1, "low"))
    everybody = there(space)
    # A pod that may not preempt waits, though it was refused before one that other pods go for.
    for name, priority in (("next", "low"), ("meek", "never")):
        space.create(priority_pod(name, HALF + 1, priority))
        space.refused(name, "Insufficient GPU Memory in one device")
    space.create_and_locate(priority_pod("first", HALF + 1, "high"))
    (victim,) = everybody - there(space)
    space.wait(lambda: "Preempted: " in space.reasons(victim), "an event tells it on the victim")
    space.wait(lambda: "Preempting: " in space.reasons("first"), "and on the pod that it went for")
    space.create_and_locate(priority_pod("second", HALF + 1, "high"))
    assert len(everybody - there(space)) == 2
    assert {"first", "second"} == there(space) - everybody


def of_kind(name: str, kind: str, priority: str, **annotations: str) -> Json:
    """A pod that asks for a whole card, for a share of one, or for a share of two cards."""
    resources = {
        "whole": {"gpu_count": 1},
        "share": {"gpu_mem": HALF + 1},
        "small": {"gpu_mem": 1000},
        "split": {"gpu_mem": 2 * HALF + 2, "gpu_count": CARDS},
    }[kind]
    annotations |= {names.POLICY: "spread"}
    return workload(name, **resources, spec={"priorityClassName": priority}, annotations=annotations)


KINDS = [
    # A kind, how many pods of it fill both nodes, the kind that preempts, how many go for one pod of that.
    ("whole", 4, "share", 1),
    ("whole", 4, "split", 2),
    ("small", 4, "whole", 1),
    ("split", 2, "whole", 1),
    ("split", 2, "share", 1),
]


@pytest.mark.parametrize(("low", "count", "high", "victims"), KINDS)
def test_a_pod_of_high_priority_gets_a_card_that_pods_of_another_kind_hold(
    space: Space, low: str, count: int, high: str, victims: int
) -> None:
    """By kube-scheduler's sums nothing is short."""
    for i in range(count):
        space.create_and_locate(of_kind(f"low{i}", low, "low"))
    everybody = there(space)
    space.create_and_locate(of_kind("first", high, "high"))
    assert there(space) - everybody == {"first"}
    assert len(everybody - there(space)) == victims


@pytest.mark.parametrize(("low", "high"), [("whole", "share"), ("small", "whole")])
def test_a_gang_of_high_priority_gets_cards_that_pods_of_another_kind_hold(space: Space, low: str, high: str) -> None:
    for i in range(NODES * CARDS):
        space.create_and_locate(of_kind(f"low{i}", low, "low"))
    everybody = there(space)
    too_many = [of_kind(f"many{i}", high, "high", **{names.GROUP_NAME: "many", names.GROUP_NUM: "5"}) for i in range(5)]
    for pod in too_many:
        space.create(pod)
    space.wait(lambda: "waits for capacity for all its members" in space.reasons("many0"), "it waits")
    space.create_and_locate(of_kind("single", high, "high"))  # pods go for it, since the gang could not be complete
    assert len(everybody - there(space)) == 1
    space.delete("single", *(pod["metadata"]["name"] for pod in too_many))
    space.wait_for_deletion("single", *(pod["metadata"]["name"] for pod in too_many))
    space.create_and_locate(of_kind("again", low, "low"))
    everybody = there(space)
    for i in range(3):
        space.create(of_kind(f"g{i}", high, "high", **{names.GROUP_NAME: "g", names.GROUP_NUM: "3"}))
    assert len({space.placed(f"g{i}") for i in range(3)}) == 3
    assert there(space) - everybody == {"g0", "g1", "g2"}
    assert len(everybody - there(space)) == 3


@pytest.mark.parametrize(("failure", "ends"), [("kill", "meanwhile"), ("freeze", "afterwards")])
def test_an_extender_that_dies_while_the_victims_end(cluster: Cluster, space: Space, failure: str, ends: str) -> None:
    """The freed card goes to whom it was freed for, and nobody else goes."""
    held = fill(space, slow)
    everybody = there(space)
    for i in range(3):  # they wait for anything that becomes free
        space.create(priority_pod(f"next{i}", HALF, "low"))
    space.create(priority_pod("first", P100, "high"))
    space.wait(lambda: len(there(space)) == len(everybody) - 2, "two pods are ending")
    victims = everybody - there(space)
    (freed_card,) = (card for card, pods in held.items() if set(pods) == victims)
    space.wait(lambda: space.get("first")["status"].get("nominatedNodeName") == freed_card[0], "first is nominated")
    extender = cluster.process("extender")
    if failure == "kill":
        kill9(extender)
    else:
        extender.pause()
    if ends == "meanwhile":
        let_go(space, *victims)
        space.wait(lambda: len(space.pods()) == len(everybody) + 4 - 2, "the victims are gone")
    if failure == "kill":
        extender.restart()
    else:
        outlive_lease(cluster)
        extender.resume()
    cluster.parts.wait_ready("extender")
    let_go(space, *victims)
    assert space.placed("first") == freed_card
    assert there(space) == everybody - victims | {"first"}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thirty_preemptions_beside_an_extender_that_dies_at_any_moment(cluster: Cluster, space: Space) -> None:
    """Two cards are freed each time, whatever dies when: four pods go, and who is not meant gets nothing."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    draw = random.Random(seed)
    extender = cluster.process("extender")
    waited = []
    for number in range(15):
        held = fill(space, slow)
        everybody = there(space)
        for i in range(3):
            space.create(priority_pod(f"next{i}", HALF, "low"))
        over = threading.Event()
        ending = threading.Thread(target=end_by_and_by, args=(space, random.Random(draw.random()), over))
        ending.start()
        try:
            for i in range(2):
                space.create(priority_pod(f"high{i}", P100, "high"))
            time.sleep(draw.uniform(0, 2))
            failure = draw.choice(["kill", "freeze"])
            if failure == "kill":
                kill9(extender)
                time.sleep(draw.choice([0, 0, 5, 15]))
                extender.restart()
            else:
                extender.pause()
                time.sleep(draw.choice([1, 6, 15]))
                extender.resume()
            cluster.parts.wait_ready("extender")
            began = time.monotonic()
            cards = {space.placed(f"high{i}") for i in range(2)}
            waited.append(time.monotonic() - began)
            print(f"{number}: {failure}, placed {waited[-1]:.1f} s after the extender was back", flush=True)
            assert len(cards) == 2
            spared = {name for card in held.keys() - cards for name in held[card]}
            assert there(space) == spared | {"high0", "high1"}, everybody - there(space)
        finally:
            over.set()
            ending.join()
        let_go(space, *everybody)
        space.clear()
        space.wait(lambda: all(not used for _, used, _ in inspect(cluster).values()), "nothing is held any more")


def end_by_and_by(space: Space, draw: random.Random, over: threading.Event) -> None:
    """Who is to go has gone a while later, one after the other."""
    while not over.wait(0.2):
        ending = [pod["metadata"]["name"] for pod in space.pods() if pod["metadata"].get("deletionTimestamp")]
        if ending and draw.random() < 0.2:
            let_go(space, draw.choice(ending))
