"""What tests of gangs say over and over: members, who is bound, what the PodGroup says; and a hard time for many."""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE, wait_for
from tests.cluster.simnodes import RUN_SECONDS
from tests.integration.ruleone import Follower, RuleOne
from tests.integration.sharing import Space, inspect, kill9, outlive_lease, workload


def member(name: str, gang: str, minimum: int | None, **settings: Any) -> Json:
    """A pod as users write it."""
    annotations = {names.GROUP_NAME: gang} | ({names.GROUP_NUM: str(minimum)} if minimum else {})
    cpu = settings.pop("cpu", "")
    pod = workload(name, annotations=annotations | settings.pop("annotations", {}), **settings)
    if cpu:
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}
    return pod


def create_at_once(space: Space, pods: list[Json]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(space.create, pods))


def bound(space: Space, prefix: str = "") -> dict[str, str]:
    """Node by pod."""
    pods = {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in space.pods()}
    return {name: node for name, node in pods.items() if node and name.startswith(prefix)}


def groups(space: Space) -> dict[str, Json]:
    """Statuses of the PodGroups."""
    podgroups = space.cluster.api.get(paths.podgroups(space.name))["items"]
    return {podgroup["metadata"]["name"]: podgroup.get("status", {}) for podgroup in podgroups}


def phase(space: Space, gang: str) -> str:
    return str(groups(space).get(gang, {}).get("phase", ""))


def waits(space: Space, gang: str) -> None:
    """The gang does not fit: it says so, and each member was tried before a pod that fits; and nothing is held."""
    space.wait(lambda: phase(space, gang) == "Waiting", f"{gang} waits")
    for pod in space.pods():
        if pod["metadata"]["name"].startswith(f"{gang}-"):
            space.refused(pod["metadata"]["name"])
    space.create_and_locate(workload("fits", gpu_mem=1))
    assert bound(space, f"{gang}-") == {}
    assert groups(space)[gang]["phase"] in ("Waiting", "Reserved")
    space.delete("fits")
    space.wait_for_deletion("fits")
    space.wait(lambda: not groups(space)[gang]["reserved"], f"{gang} holds nothing")


# What members of many gangs ask for, and how many cards that takes at most.
ASKS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"gpu_mem": P100}, 1),
    ({"gpu_mem": P100 // 2}, 1),
    ({"gpu_mem": P100 // 2 + 1}, 1),
    ({"gpu_mem": 3000}, 1),
    ({"gpu_count": 1}, 1),
    ({"gpu_mem": 8000, "gpu_count": 2}, 2),
    ({"cpu": "2"}, 0),
)


def mixed(draw: random.Random, sizes: dict[str, int], cards: int, seconds: tuple[int, int]) -> list[Json]:
    """The members of gangs in any order, which run for so long. Each gang fits by itself, many do not."""
    pods = []
    for gang, size in sizes.items():
        room = cards - 1
        for i in range(size):
            ask, takes = draw.choice(ASKS)
            if takes > room:
                ask, takes = {"gpu_mem": 100}, 0
            room -= takes
            runs = {RUN_SECONDS: str(draw.randint(*seconds))}
            pods.append(member(f"{gang}-{i}", gang, size, annotations=runs, **ask))
    draw.shuffle(pods)
    return pods


class Story(NamedTuple):
    """How a gang was bound. `early`: cards that were not free yet for all of it when its first member was bound."""

    gang: str
    began: float
    whole: float
    early: list[tuple[str, str]]


class Bindings(RuleOne):
    """How gangs of a namespace are bound, by the API server's own events."""

    def __init__(self, space: Space, sizes: dict[str, int]) -> None:
        super().__init__(space.cluster)
        self.stories: list[Story] = []
        self._namespace = space.name
        self._sizes = sizes
        self._shares: dict[str, dict[str, dict[tuple[str, str], int]]] = {gang: {} for gang in sizes}
        self._began: dict[str, tuple[float, Counter[tuple[str, str]]]] = {}

    def on_event(self, kind: str, manifest: Json) -> None:
        """The pod is so now."""
        name, gang = manifest["metadata"]["name"], (manifest["metadata"].get("labels") or {}).get(names.GANG, "")
        ours = manifest["metadata"]["namespace"] == self._namespace and gang in self._shares
        news = ours and manifest["spec"].get("nodeName") and name not in self._shares[gang]
        if news and gang not in self._began:
            self._began[gang] = time.monotonic(), self._used()
        super().on_event(kind, manifest)
        if news:
            shares = self._shares[gang]
            shares[name] = self.held.get(manifest["metadata"]["uid"], {})
            if len(shares) == self._sizes[gang]:
                began, used = self._began[gang]
                for share in shares.values():
                    used.update(share)
                early = [card for card, mib in used.items() if mib > self.totals[card]]
                self.stories.append(Story(gang, began, time.monotonic(), early))

    def _used(self) -> Counter[tuple[str, str]]:
        used: Counter[tuple[str, str]] = Counter()
        for shares in self.held.values():
            used.update(shares)
        return used


class Holds(Follower):
    """PodGroups that hold cards in a phase in which nothing may be held."""

    def __init__(self, space: Space) -> None:
        super().__init__(space.cluster, paths.podgroups(space.name))

    def on_event(self, kind: str, manifest: Json) -> None:
        """The PodGroup is so now."""
        status = manifest.get("status") or {}
        if kind != "DELETED" and status.get("reserved") and status["phase"] in ("Pending", "Waiting", "Running"):
            self.violations.append(
                f"{manifest['metadata']['name']} is {status['phase']} and holds {status['reserved']}"
            )


@contextmanager
def extender_in_trouble(
    cluster: Cluster, draw: random.Random, goes_on: Callable[[threading.Event], bool]
) -> Iterator[list[tuple[float, float]]]:
    """Kills or stops it each time that `goes_on` lets it. Yields when nobody led; whole only after the end."""
    over, outages = threading.Event(), []
    extender = cluster.process("extender")

    def torment() -> None:
        while goes_on(over):
            began = time.monotonic()
            if draw.random() < 0.5:
                kill9(extender)
                extender.restart()
            else:
                extender.pause()
                outlive_lease(cluster)
                extender.resume()
            renewed = _renewal(cluster)
            cluster.parts.wait_ready("extender")
            assert wait_for(lambda renewed=renewed: _renewal(cluster) != renewed), "the extender does not come back"
            outages.append((began, time.monotonic()))

    with ThreadPoolExecutor(1) as pool:
        tormented = pool.submit(torment)
        try:
            yield outages
        finally:
            over.set()
        tormented.result()


def _renewal(cluster: Cluster) -> str:
    lease = cluster.api.get(paths.leases(names.NAMESPACE, names.LEASE))["spec"]
    return f"{lease.get('holderIdentity')} {lease.get('renewTime')}"


def stretches(story: Story, outages: list[tuple[float, float]]) -> list[float]:
    """The seconds with a leader, one after the other, in which the gang was bound in part."""
    findings, since = [], story.began
    for start, end in outages:
        if end > since and start < story.whole:
            findings.append(max(0.0, start - since))
            since = end
    return [*findings, max(0.0, story.whole - since)]


def many_gangs(
    space: Space,
    *,
    cards: int,
    gangs: int,
    largest: int,
    arrive: float,
    seed: int,
    limit: float = PATIENCE,
    half: float = math.inf,
    every: float = 0,
) -> None:
    """Mixed sizes in random order, pods that end at random, and an extender that is killed or stopped all the time.

    Seconds: in `arrive` the pods come, in `limit` all have run, `half` a gang may be bound in part under one leader,
    `every` one leads; if that is 0, until there were some more events of pods, however long that takes. kube-scheduler
    tries a pod again after up to 10 s, which may be another leader's time.
    """
    print(f"seed {seed}", flush=True)
    draw = random.Random(seed)
    sizes = {f"g{k}": draw.randint(2, largest) for k in range(gangs)}
    pods = mixed(draw, sizes, cards, (2, 6) if gangs < 20 else (10, 30))
    began, trouble = time.monotonic(), random.Random(seed)

    def goes_on(over: threading.Event) -> bool:
        if every:
            return not over.wait(every)
        enough = bindings.events + trouble.randint(20, 40)
        wait_for(lambda: over.is_set() or bindings.events >= enough)
        return not over.is_set()

    with (
        Bindings(space, sizes) as bindings,
        Holds(space) as holds,
        extender_in_trouble(space.cluster, trouble, goes_on) as outages,
    ):
        for pod in pods:
            space.create(pod)
            time.sleep(draw.uniform(0, 2 * arrive / len(pods)))
        space.wait(lambda: len(bindings.stories) == gangs, "every gang has run", limit)
    took = time.monotonic() - began
    assert outages, "no extender died: this shows nothing"
    assert not bindings.failed
    assert not holds.failed
    assert bindings.violations == []
    assert holds.violations == []
    halves = []
    for story in bindings.stories:
        led = stretches(story, outages)
        # Who takes over plans the rest anew, and may well use what has become free meanwhile.
        assert len(led) != 1 or not story.early, story
        halves.append((max(led), story.whole - story.began, story.gang, len(led) - 1))
    halves.sort(reverse=True)
    print(f"{gangs} gangs of {len(pods)} pods ran in {took:.0f} s, {len(outages)} times without an extender; while")
    print(f"{sum(times > 0 for *_, times in halves)} were bound. For longest were bound in part,")
    for longest, whole, gang, times in halves[:5]:
        print(
            f"  {gang} of {sizes[gang]}: {longest:.1f} s with one leader, {whole:.1f} s in all, {times} times without"
        )
    assert halves[0][0] < half
    space.wait(lambda: all(group["phase"] == "Running" for group in groups(space).values()), "all are known to run")
    space.wait(lambda: all(not used for _, used, _ in inspect(space.cluster).values()), "nothing is held any more")
