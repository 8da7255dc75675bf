"""Rule 1 and a quota, watched; pods that are created without end; leaders that stand still."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import container
from tests.cluster.processes import PATIENCE
from tests.cluster.simnodes import RUN_SECONDS
from tests.integration.replicas import Pair
from tests.integration.ruleone import RuleOne
from tests.integration.sharing import Space, node_and_card, workload

LIMIT = 60  # shares of the namespace
SIZES = (1024, 2048, 4069, 8138)  # MiB


class Rules(RuleOne):
    """Besides rule 1: a pod keeps its node and its cards, and the namespace never holds more than its quota."""

    def __init__(self, space: Space) -> None:
        super().__init__(space.cluster)
        self.granted: dict[str, float] = {}  # when a pod was first seen to hold a share, by name
        self.began: dict[str, float] = {}  # when the first share was, by the leader's epoch
        self.shares_by_epoch: Counter[str] = Counter()  # shares by the leader's epoch
        self._namespace = space.name
        self._places: dict[str, tuple[str, ...]] = {}

    def on_event(self, kind: str, manifest: Json) -> None:
        super().on_event(kind, manifest)
        metadata = manifest["metadata"]
        if metadata["namespace"] != self._namespace or not manifest["spec"].get("nodeName"):
            return
        place = (*node_and_card(manifest), metadata.get("annotations", {}).get(names.ASSIGNMENT, ""))
        before = self._places.setdefault(metadata["uid"], place)
        if before != place:
            self.violations.append(f"{metadata['name']} was at {before} and is at {place}")
        if metadata["uid"] in self.held and metadata["name"] not in self.granted:
            self.granted[metadata["name"]] = time.monotonic()
            epoch = metadata["annotations"].get(names.LEADER_EPOCH, "")
            self.began.setdefault(epoch, time.monotonic())
            self.shares_by_epoch[epoch] += 1
        if len(self.held) > LIMIT:
            self.violations.append(f"{len(self.held)} shares are held of {LIMIT}")

    def grants_since(self, moment: float) -> int:
        return sum(at > moment for at in list(self.granted.values()))


class Load:
    """Pods that run for a second, at `rate` a second where the machine can; every fifth asks for no card."""

    def __init__(
        self,
        space: Space,
        rate: float,
        *,
        sizes: Sequence[int] = SIZES,
        dry: bool = False,
        enough: Callable[[int], bool] = lambda created: False,
    ) -> None:
        """`enough`: of so many pods, for now. `dry`: they are admitted and not stored."""
        self.created: dict[str, float] = {}  # when the answer came, by name
        self.failed: list[str] = []
        self._space = space
        self._sizes = sizes
        self._query = {"dryRun": "All"} if dry else None
        self._is_enough = enough
        self._over = threading.Event()
        self._pause = 8 / rate
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(8)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, thread: int) -> None:
        draw, number, due = random.Random(thread), 0, time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._pause, time.monotonic() - 1.0)
            if self._is_enough(len(self.created)):
                continue
            number += 1
            plain = number % 5 == 0
            name = f"{'plain' if plain else 'share'}-{thread}-{number}"
            containers = [container()] if plain else [container(gpu_mem=draw.choice(self._sizes))]
            pod = workload(name, containers, annotations={RUN_SECONDS: "1"})
            try:
                self._space.cluster.api.create(paths.pods(self._space.name), pod, query=self._query, timeout=PATIENCE)
            except errors.KubeError as error:
                self.failed.append(f"{name}: {error}")
            else:
                self.created[name] = time.monotonic()


def freezes(space: Space, pair: Pair, count: int) -> None:
    """The leader stands still so often until the other gives cards away, and then goes on where it was."""
    with (
        Rules(space) as rules,
        Load(space, 12, sizes=(8138, 12_000), enough=lambda created: created > 2 * len(rules.granted) + 40) as load,
    ):
        for number in range(count):
            leader = pair.leader()
            other = pair.other(leader)
            before = time.monotonic()
            space.wait(lambda since=before: rules.grants_since(since) > 2, "the leader gives cards away")
            leader.pause()
            try:
                space.wait(lambda name=other.name: pair.leads(name), "the other leads")
                # By its epoch: of what the first has given the news may come only now.
                space.wait(lambda: rules.shares_by_epoch[pair.epoch()] > 2, "the other gives cards away")
            finally:
                leader.resume()
            space.wait(lambda name=leader.name: pair.stands_by(name), "who stood still knows that it is over")
            assert rules.violations == [], f"at try {number}"
        load.stop()
        print(f"{count} times a leader stood still, {len(rules.granted)} grants, {len(rules.violations)} double")
        # All at once: kubectl asks for one after the other, and there may be thousands.
        space.cluster.api.delete(paths.pods(space.name), {"gracePeriodSeconds": 1}, timeout=PATIENCE)
    assert not rules.failed
    assert rules.violations == []
