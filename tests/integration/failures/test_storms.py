"""Storms of errors between our programs and the API server, and pauses of what they stand on, on real nodes.

All the while a watcher checks rule 1 on every event of every pod, and pods without GPU requests are created and bound.
Afterwards all records agree, as after the chaos.
"""

import itertools
import random
import threading
import time
from contextlib import suppress
from typing import Self

import pytest

from cardwise.kube import errors, paths
from tests.cluster.controlplane import APISERVER, ETCD
from tests.cluster.processes import PATIENCE
from tests.integration.failures.test_chaos import (
    NODES,
    WORKLOADS,
    begin,
    many_cards,  # noqa: F401 - a fixture
    opens_its_cards,
    settle,
)
from tests.integration.ruleone import RuleOne
from tests.integration.sharing import Space, inspect, workload
from tests.integration.storm import behind_a_storm

pytestmark = [pytest.mark.cluster("nodes", last=True), pytest.mark.node]

OURS = ("extender", "webhook", f"deviceplugin-{NODES[0]}")
PACE = 0.4  # seconds between two changes


class Changes:
    """Workloads are scaled and pods deleted, at a pace; and in between comes a pod without a GPU request."""

    def __init__(self, space: Space, seed: int) -> None:
        self.created = 0
        self.plain: list[str] = []
        self.refused: list[str] = []  # why a pod without a GPU request was
        self._space = space
        self._seed = seed
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failed = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._failed, self._failed

    def _run(self) -> None:
        acts = itertools.cycle((self._scale, self._delete, self._scale, self._plain))
        try:
            while not self._over.wait(PACE):
                next(acts)()
                self.created += 1
        except Exception as error:  # noqa: BLE001 - told by the test, which runs in another thread
            self._failed = repr(error)

    def _scale(self) -> None:
        name = self._random.choice(list(WORKLOADS))
        path = f"/apis/apps/v1/namespaces/{self._space.name}/deployments/{name}"
        replicas = self._random.randint(0, WORKLOADS[name][1])
        with suppress(errors.Unreachable, errors.ServerError, errors.Conflict):
            self._space.cluster.api.patch(path, {"spec": {"replicas": replicas}})

    def _delete(self) -> None:
        with suppress(errors.Unreachable, errors.ServerError, errors.NotFound):
            pods = sorted(pod["metadata"]["name"] for pod in self._space.pods())
            if pods:
                grace = self._random.choice((0, None, None))
                options = None if grace is None else {"gracePeriodSeconds": grace}
                self._space.cluster.api.delete(paths.pods(self._space.name, self._random.choice(pods)), options)

    def _plain(self) -> None:
        name = f"plain-{self._seed}-{len(self.plain)}"
        try:
            self._space.create(workload(name, spec={"restartPolicy": "Never"}, command="exit 0"))
        except errors.KubeError as error:
            self.refused.append(f"{name}: {error}")
        self.plain.append(name)


def storms(space: Space, count: int, seconds: float, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    cluster = space.cluster
    begin(space)
    with behind_a_storm(cluster, NODES, seed) as storm, RuleOne(cluster) as watcher:
        waits = []
        for number in range(count):
            with Changes(space, seed + number) as changes, storm.raging():
                time.sleep(seconds)  # the length of the fault
            assert changes.refused == []
            waits.append(settle(space, lambda: None))
            print(f"storm {number}: {changes.created} changes, {dict(storm.answers)}", flush=True)
            assert not watcher.violations, watcher.violations
        opens_its_cards(space)
        space.clear()
        space.wait(lambda: all(used == 0 for _, used, _ in inspect(cluster).values()), "every card is free")
    print(f"{count} storms of {seconds:.0f} s; all was well {max(waits):.1f} s after one at most")
    assert not watcher.failed, watcher.failed
    assert not watcher.violations, watcher.violations


def test_a_storm_of_500_503_and_429_doubles_and_loses_nothing(space: Space):
    storms(space, 1, 10, seed=1)


def stand_still(space: Space, name: str, count: int, seconds: float, seed: int) -> None:
    """The process and its workers, so often, while pods come and go; then all is as before."""
    print(f"seed {seed}", flush=True)
    cluster = space.cluster
    begin(space)
    settle(space, lambda: None)
    with RuleOne(cluster) as watcher:
        waits = []
        for number in range(count):
            with Changes(space, seed + number) as changes:
                cluster.process(name).pause()
                try:
                    time.sleep(seconds)  # the length of the fault
                finally:
                    cluster.process(name).resume()
            if name in OURS:
                assert changes.refused == [], "pods without a GPU request never fail because of Cardwise"
            waits.append(settle(space, lambda: None))
            print(f"{name}, pause {number}: {changes.created} changes", flush=True)
            assert not watcher.violations, watcher.violations
        opens_its_cards(space)
        space.clear()
        space.wait(lambda: all(used == 0 for _, used, _ in inspect(cluster).values()), "every card is free")
    print(f"{name}: {count} pauses of {seconds:.0f} s; all was well {max(waits):.1f} s after one at most")
    assert not watcher.failed, watcher.failed
    assert not watcher.violations, watcher.violations


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*OURS, APISERVER, ETCD])
def test_a_pause_of_half_a_minute(space: Space, name: str):
    stand_still(space, name, 1, 30, seed=random.SystemRandom().randrange(10**6))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_storms_of_a_minute(space: Space):
    storms(space, 5, 60, seed=random.SystemRandom().randrange(10**6))
