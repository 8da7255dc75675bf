"""Everything at once: workloads come, grow and go while the parts are killed; and then all the records agree.

While it runs a watcher checks rule 1 on every event of every pod: the shares on a card never sum to more than the card.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.api.policies import DEFAULT_POLICY
from cardwise.kube import errors, paths
from deviceplugin.plugin.registration import SOCKET_PREFIX
from deviceplugin.sources.kubelet import Kubelet, KubeletUnavailable
from tests.build import P100
from tests.cluster import Cluster, versions
from tests.cluster.cards import TestCard
from tests.cluster.parts import says_ready
from tests.cluster.processes import wait_for
from tests.integration.conftest import spaces
from tests.integration.ruleone import FINISHED, RuleOne
from tests.integration.sharing import (
    Json,
    Space,
    assigned,
    cards_of,
    deployment,
    device_numbers,
    flags,
    inspect,
    kill9,
    node_and_card,
    probe,
    probed,
    workload,
)

pytestmark = [pytest.mark.cluster("nodes", last=True), pytest.mark.node]

NODES = ("n1", "n2")
CARDS = 4  # of each node
# Deployments by name: their requests, and the most replicas that a step may ask for; together far more than there is.
WORKLOADS: dict[str, tuple[dict[str, int | str], int]] = {
    "small": ({"gpu_mem": 1024}, 8),
    "quarter": ({"gpu_mem": 4069}, 6),
    "half": ({"gpu_mem": 8138}, 6),
    "most": ({"gpu_mem": 12_000}, 4),
    "split": ({"gpu_mem": 6000, "gpu_count": 2}, 3),
    "whole": ({"gpu_count": 1}, 2),
}
OFTEN = ("extender", "deviceplugin-n1", "deviceplugin-n2", "kubelet-n1", "kubelet-n2")
ONCE = ("kube-scheduler", "webhook")
# Seconds until every Deployment is ready. The ReplicaSet controller waits up to 300 s for events that it expects.
# After creations that failed while the webhook was killed, it was seen to do nothing for that long.
READY = 420.0
SILENCE = 1.5  # seconds without the events that a step waits for
FROZEN = (*OFTEN, *(f"{versions.runtime()}-{name}" for name in ("n1", "n2")))


@pytest.fixture(autouse=True, scope="module")
def many_cards(cluster: Cluster) -> Iterator[None]:
    """Of each node, and pods are spread over them."""
    with (
        cards_of(cluster, **dict.fromkeys(NODES, [TestCard()] * CARDS)),
        flags(cluster, "extender", f"--policy={DEFAULT_POLICY}"),
    ):
        yield


class Chaos:
    """One step after the other, chosen by a seeded generator of its own, whatever the steps before it met."""

    def __init__(self, space: Space, seed: int, steps: int) -> None:
        self._space = space
        self._seed = seed
        self._random = random.Random(seed)
        # Process that was killed or stands still -> the step before which it goes on, and how.
        self._due: dict[str, tuple[int, Callable[[], None]]] = {}
        self._kill_at = dict(zip(self._random.sample(range(steps // 4, steps), len(ONCE)), ONCE, strict=True))
        self.log: list[str] = []

    def keep(self) -> None:
        """A kubelet that comes up while its runtime stands still gives up."""
        for node in NODES:
            if f"kubelet-{node}" not in self._due:
                self._space.cluster.node(node).keep_kubelet()

    def step(self, number: int) -> int:
        """Returns how many events of pods come before the next."""
        self._random = random.Random(f"{self._seed}/{number}")
        pause = self._random.randint(1, 12)
        self._act(number)
        return pause

    def _act(self, number: int) -> None:
        self.keep()
        for name in [name for name, (due, _) in self._due.items() if due <= number]:
            self._start(name)
        if number in self._kill_at:
            self._kill(self._kill_at[number], number)
            return
        act: Callable[[int], None] = self._random.choices(
            (self._scale, self._delete, self._force_delete, self._kill_often, self._freeze, self._remove),
            (8, 4, 3, 5, 3, 1),
        )[0]
        act(number)

    def calm(self) -> None:
        """All processes run again."""
        for name in list(self._due):
            self._start(name)

    def _scale(self, number: int) -> None:
        name = self._random.choice(list(WORKLOADS))
        replicas = self._random.randint(0, WORKLOADS[name][1])
        self._log(number, f"scale {name} to {replicas}")
        self._space.kubectl_json("scale", "deployment", name, f"--replicas={replicas}")

    def _delete(self, number: int, *, force: bool = False) -> None:
        pods = sorted(pod["metadata"]["name"] for pod in self._space.pods())
        for name in self._random.sample(pods, min(len(pods), self._random.randint(1, 3))):
            self._log(number, f"delete {name}{' with grace 0' if force else ''}")
            try:
                self._space.cluster.api.delete(
                    paths.pods(self._space.name, name), {"gracePeriodSeconds": 0} if force else None
                )
            except errors.NotFound:
                continue

    def _force_delete(self, number: int) -> None:
        self._delete(number, force=True)

    def _kill_often(self, number: int) -> None:
        up = [name for name in OFTEN if name not in self._due]
        if up:
            self._kill(self._random.choice(up), number)

    def _kill(self, name: str, number: int) -> None:
        self._log(number, f"kill {name}")
        process = self._space.cluster.process(name)
        kill9(process)
        self._due[name] = number + self._random.randint(1, 3), process.restart

    def _freeze(self, number: int) -> None:
        up = [name for name in FROZEN if name not in self._due]
        if up:
            name = self._random.choice(up)
            self._log(number, f"freeze {name}")
            process = self._space.cluster.process(name)
            process.pause()
            self._due[name] = number + self._random.randint(1, 6), process.resume

    def _remove(self, number: int) -> None:
        node = self._random.choice(NODES)
        self._log(number, f"remove the device plugin's socket of {node}")
        for path in self._space.cluster.node(node).kubelet_dir.glob(f"device-plugins/{SOCKET_PREFIX}*.sock"):
            path.unlink(missing_ok=True)

    def _start(self, name: str) -> None:
        _, again = self._due.pop(name)
        again()

    def _log(self, number: int, event: str) -> None:
        self.log.append(f"step {number}: {event}")
        print(self.log[-1], flush=True)


def test_twenty_steps_of_chaos(space):
    chaos(space, 20, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_three_hundred_steps_of_chaos(space):
    chaos(space, 300, seed=random.SystemRandom().randrange(10**6))


def chaos(space: Space, steps: int, seed: int) -> None:
    cluster = space.cluster
    print(f"seed {seed}", flush=True)
    begin(space)
    with RuleOne(cluster) as watcher:
        monkey = Chaos(space, seed, steps)
        for number in range(steps):
            enough = watcher.events + monkey.step(number)
            # After a step that changes no pod, and while those who would change one stand still, none may come.
            wait_for(lambda enough=enough: bool(watcher.violations) or watcher.events >= enough, SILENCE)
            assert not watcher.violations, watcher.violations
        monkey.calm()
        for part in ("extender", "webhook"):
            cluster.parts.wait_ready(part)
        settle(space, monkey.keep)
        print(f"{watcher.events} events of pods")
        opens_its_cards(space)
        space.clear()
        space.wait(lambda: all(used == 0 for _, used, _ in inspect(cluster).values()), "every card is free")
    assert not watcher.failed, watcher.failed
    assert not watcher.violations, watcher.violations
    assert watcher.events > steps


def begin(space: Space) -> None:
    """One pod of each of the workloads."""
    for name, (requests, _) in WORKLOADS.items():
        space.cluster.apply([_in(space, deployment(name, 1, **requests))])


def settle(space: Space, keep: Callable[[], None]) -> float:
    """Waits until one pod of each workload is ready and all records agree; returns the seconds. `keep` is called at
    each look.
    """
    began = time.monotonic()
    for name in WORKLOADS:
        space.kubectl_json("scale", "deployment", name, "--replicas=1")

    def ready() -> bool:
        keep()
        return _ready(space)

    try:
        space.wait(ready, "every Deployment is ready", READY)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{_replica_sets(space)}") from None
    print(f"ready after {time.monotonic() - began:.1f} s")
    quiet: list[str] = ["never asked"]

    def agreed() -> bool:
        keep()
        quiet[:] = disagreements(space)
        return not quiet and _ready(space)  # by now the Deployments' statuses are not of before the last step

    try:
        space.wait(agreed, "all records agree")
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(quiet)) from None
    seconds = time.monotonic() - began
    dead = len(space.pods()) - len(_living(space))
    print(f"ready and agreed after {seconds:.1f} s; {dead} pods have failed meanwhile and hold nothing", flush=True)
    return seconds


def opens_its_cards(space: Space) -> None:
    """Each living pod opens the cards that its annotations name, and no other."""
    numbers = {node: device_numbers(space.cluster, node) for node in NODES}
    for pod in _living(space):
        if names.ASSIGNMENT not in pod["metadata"].get("annotations", {}):
            continue
        name, (node, cards) = pod["metadata"]["name"], node_and_card(pod)
        opened = space.inside(name, f"> /dev/termination-log; {probe(numbers[node])} cat /dev/termination-log")
        seen = [line for line in opened.splitlines() if line.startswith("opens")]
        assert seen == [f"opens {card}" for card in cards.split(",")], name
        if "," not in cards:
            assert opened.splitlines() == probed(numbers[node], cards), name


def _in(space: Space, manifest: Json) -> Json:
    return manifest | {"metadata": manifest["metadata"] | {"namespace": space.name}}


def _replica_sets(space: Space) -> str:
    """The status and the events of each ReplicaSet: what kube-controller-manager has done, and what it waits for."""
    lines = []
    for replica_set in space.kubectl_json("get", "replicasets")["items"]:
        name = replica_set["metadata"]["name"]
        lines.append(f"{name}: wants {replica_set['spec']['replicas']}, status {replica_set['status']}; ")
        lines.append(space.reasons(name)[-600:])
    return "\n".join(lines)


def _ready(space: Space) -> bool:
    deployments = space.cluster.api.get(f"/apis/apps/v1/namespaces/{space.name}/deployments")["items"]
    settled = all(
        deployment["status"].get("observedGeneration") == deployment["metadata"]["generation"]
        and deployment["status"].get("readyReplicas", 0)
        == deployment["status"].get("replicas", 0)
        == deployment["spec"]["replicas"]
        for deployment in deployments
    )
    of_them = [pod for pod in _living(space) if pod["metadata"].get("ownerReferences")]
    return settled and len(of_them) == sum(deployment["spec"]["replicas"] for deployment in deployments)


def _living(space: Space) -> list[Json]:
    """Without the pods that failed: a kubelet refuses pods while it waits for its device plugin, and they stay."""
    return [pod for pod in space.pods() if pod["status"].get("phase") not in FINISHED]


def disagreements(space: Space) -> list[str]:
    """Between annotations, the extender's ledger, ExtendedResources and what the kubelets know; a line each."""
    findings: list[str] = []
    pods = [pod for pod in space.cluster.api.get(paths.pods())["items"] if pod["status"].get("phase") not in FINISHED]
    bound = [pod for pod in pods if names.ASSIGNMENT in (pod["metadata"].get("annotations") or {})]
    by_card: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pod in bound:
        pod_name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        for share in assigned(pod).shares():
            by_card[pod["spec"]["nodeName"], share.index][pod_name] += share.mem
    ledger = inspect(space.cluster)
    if len(ledger) != len(NODES) * CARDS:
        findings.append(f"the ledger has {len(ledger)} cards")
    for card, (total, used, shown) in ledger.items():
        held = dict(by_card[card])
        if shown != held or used != sum(held.values()):
            findings.append(f"{card}: the ledger has {used} MiB, {shown}; the annotations have {held}")
        if used > total:
            findings.append(f"{card}: {used} of {total} MiB are held")
    for resource in space.cluster.api.get(paths.extendedresources())["items"]:
        status, card = resource["status"], (resource["spec"]["node"], resource["spec"]["index"])
        if status.get("reported") or status.get("health") != "Healthy":
            findings.append(f"ExtendedResource of {card}: {status}")
    for node in NODES:
        findings += _kubelet_disagrees(space.cluster, node, [p for p in bound if p["spec"]["nodeName"] == node])
    return findings


def _kubelet_disagrees(cluster: Cluster, node: str, pods: list[Json]) -> list[str]:
    kubelet = Kubelet(cluster.node(node).kubelet_dir)
    try:
        holders = kubelet.holders()
    except KubeletUnavailable as error:
        return [f"{node}: {error}"]
    finally:
        kubelet.close()
    findings = []
    if not says_ready(cluster.parts.metrics_port(f"deviceplugin-{node}")):
        findings.append(f"{node}: the device plugin is not ready")
    living = {(pod["metadata"]["namespace"], pod["metadata"]["name"]): pod["metadata"]["uid"] for pod in pods}
    listed = [(holder.namespace, holder.pod) for slot in holders.pod_resources.values() for holder in slot]
    if sorted(listed) != sorted(living):
        findings.append(f"{node}: PodResources lists {sorted(listed)}, bound are {sorted(living)}")
    # The checkpoint may still have ended pods: the kubelet cleans it up when it next admits one.
    known = [holder.pod_uid for slot in holders.checkpoint.values() for holder in slot]
    missing = [uid for uid in living.values() if known.count(uid) != 1]
    if missing:
        findings.append(f"{node}: the checkpoint lacks pods {missing}")
    grants = {path.name for path in (cluster.node(node).folder / "cardwise" / "grants").iterdir()}
    if grants != set(living.values()):
        findings.append(f"{node}: the device plugin has grants of {sorted(grants)}, bound are {living}")
    return findings


STUBBORN = "trap '' TERM; while :; do touch /out/first; sleep 0.1; done"
SUCCESSOR = "touch /out/second; trap 'exit 0' TERM; while :; do sleep 1; done"


class Succession:
    """A container that ignores TERM on the last free card of a node, and a successor that needs the whole card."""

    def __init__(self, space: Space, out: Path) -> None:
        self.space = space
        self._out = out
        out.mkdir()
        others = [f"other-{card}" for card in range(1, CARDS)]
        for name in others:
            space.create(workload(name, gpu_mem=P100, node="n1"))
        space.running(*others)
        space.create(self._full("first", STUBBORN, 15))
        space.running("first")
        space.wait(self.first.exists, "the first container works")

    @property
    def first(self) -> Path:
        """Touched again and again by the first container."""
        return self._out / "first"

    @property
    def second(self) -> Path:
        """Touched once by the successor, when it starts."""
        return self._out / "second"

    def force_delete(self) -> None:
        self.space.delete("first", grace=0)

    def succeed(self) -> None:
        self.space.create(self._full("second", SUCCESSOR, 1))

    def check(self) -> None:
        """The successor starts by itself, after the first container's end."""
        began = time.time()
        self.space.wait(self.second.exists, "the successor starts by itself")
        last, start = self.first.stat().st_mtime, self.second.stat().st_mtime
        print(f"after {last - began:.1f} s the first container ended, after {start - began:.1f} s the second started")
        assert start > last, "both containers ran at once"
        self.space.running("second")
        assert self.first.stat().st_mtime == last, "the first container came back"

    def _full(self, name: str, command: str, grace: int) -> Json:
        volume = {"volumes": [{"name": "out", "hostPath": {"path": str(self._out)}}]}
        pod = workload(name, gpu_mem=P100, node="n1", command=command, grace=grace, spec=volume)
        pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "out", "mountPath": "/out"}]
        return pod


@pytest.fixture
def succession(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Succession]:
    for space in spaces(cluster, request):
        yield Succession(space, cluster.state_dir / f"out-{space.name}")


def test_a_successor_starts_when_the_container_of_a_force_deleted_pod_is_gone(cluster, succession):
    """Also when all who know of the first pod are killed meanwhile."""
    succession.force_delete()
    killed = [cluster.process(part) for part in ("extender", "deviceplugin-n1", "kubelet-n1")]
    for process in killed:
        kill9(process)
    with cluster.node("n1").slots_listed():
        for process in killed:
            process.restart()
    succession.succeed()
    succession.check()


def test_a_container_that_outlives_its_pod_keeps_its_card(cluster, succession):
    space = succession.space
    # Nobody ends the container while the kubelet hangs; its pod object is gone at once.
    kubelet = cluster.process("kubelet-n1")
    kubelet.pause()
    try:
        succession.force_delete()
        kill9(cluster.process("extender"))  # it forgets what it knew of the pod
        cluster.process("extender").restart()
        cluster.parts.wait_ready("extender")

        def holders_of_card() -> list[str]:
            resources = cluster.api.get(paths.extendedresources())["items"]
            return [f"{h['namespace']}/{h['name']}" for r in resources for h in r["status"].get("reported", ())]

        cluster.wait(lambda: holders_of_card() == [f"{space.name}/first"], "the node reports the share as held")
        first = f"{space.name}/first"
        cluster.wait(lambda: any(first in pods for _, _, pods in inspect(cluster).values()), "the extender knows it")
        succession.succeed()
        # The successor was tried, and so was a pod that came after it and fits elsewhere; and the container lives on.
        space.refused("second", "Insufficient GPU Memory in one device")
        space.create_and_locate(workload("later", gpu_mem=1, node=NODES[1]))
        before = succession.first.stat().st_mtime
        cluster.wait(lambda: succession.first.stat().st_mtime > before, "the container goes on")
        assert not space.get("second")["spec"].get("nodeName"), "the successor was bound to a card in use"
        assert not succession.second.exists()
    finally:
        kubelet.resume()
    succession.check()
    cluster.wait(lambda: not holders_of_card(), "nothing is held any more")
