"""Rule 6: pods without GPU requests never fail because of Cardwise and never wait on it, whatever hangs or is down."""

import time
from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.cluster import Cluster
from tests.integration.conftest import spaces
from tests.integration.replicas import ready, webhooks
from tests.integration.ruleone import RuleOne
from tests.integration.sharing import Space, assigned, deployment, inspect, kill9, workload

pytestmark = [pytest.mark.cluster("sim", last=True)]

REPLICAS = 12
# Seconds: kube-controller-manager was seen to do nothing for 300 s after creations that failed (`test_chaos`).
ROLLOUT = 420.0


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes()
        yield space


def scheduled_after(space: Space, pod: dict) -> float:
    """Seconds from its creation, which is counted too, to a node. How many are good is in docs/measured.md.

    A pod that waited for what hangs would get no node before that goes on: a node is the proof, however late it comes.
    """
    began = time.monotonic()
    space.create(pod)
    name = pod["metadata"]["name"]
    space.placed(name)
    return time.monotonic() - began


def test_pods_without_gpu_are_scheduled_while_the_extender_hangs(space):
    extender = space.cluster.process("extender")
    extender.pause()
    try:
        waits = []
        for i in range(6):
            # A pod with a GPU request stands before each of them.
            space.create(workload(f"gpu-{i}", gpu_mem=100))
            waits.append(scheduled_after(space, workload(f"plain-{i}")))
            if i < 5:
                space.delete(f"gpu-{i}")
                space.wait_for_deletion(f"gpu-{i}")
        print("seconds:", [round(wait, 2) for wait in waits])
        space.refused("gpu-5")  # it was tried
        assert not space.get("gpu-5")["spec"].get("nodeName")
    finally:
        extender.resume()
    space.running("gpu-5")


def test_an_extender_whose_serving_process_hangs_is_replaced_and_binds_all_pods(space):
    space.cluster.process("extender").pause_children()
    gpus, plain = [f"gpu-{i}" for i in range(5)], [f"plain-{i}" for i in range(10)]
    for name in gpus:
        space.create(workload(name, gpu_mem=100))
    for name in plain:
        space.create(workload(name))
    space.running(*plain)
    space.running(*gpus)  # nobody had to wake it up


def test_pods_without_gpu_are_scheduled_behind_several_that_wait_for_an_extender_that_hangs(space):
    # kube-scheduler takes one pod at a time, so those in line before a pod are waited for, a timeout each.
    extender = space.cluster.process("extender")
    ahead = 3
    extender.pause()
    try:
        for i in range(ahead):
            space.create(workload(f"gpu-{i}", gpu_mem=100))
        waits = [scheduled_after(space, workload(f"plain-{i}")) for i in range(6)]
        print("seconds:", [round(wait, 2) for wait in waits])
    finally:
        extender.resume()
    space.running(*(f"gpu-{i}" for i in range(ahead)))


def test_pods_without_gpu_are_created_while_the_webhook_hangs(space):
    webhook = space.cluster.process("webhook")
    webhook.pause()
    try:
        waits = [scheduled_after(space, workload(f"plain-{i}")) for i in range(5)]
        print("seconds:", [round(wait, 2) for wait in waits])
        space.running(*(f"plain-{i}" for i in range(5)))
    finally:
        webhook.resume()
    space.create_and_locate(workload("gpu", gpu_mem=1024))


class Everything(RuleOne):
    """Besides rule 1: all pods of the namespace, as they were last, also those that are gone."""

    def __init__(self, space: Space) -> None:
        super().__init__(space.cluster)
        self.pods: dict[str, Json] = {}  # by UID
        self._namespace = space.name

    def on_event(self, kind: str, manifest: Json) -> None:
        super().on_event(kind, manifest)
        if manifest["metadata"]["namespace"] == self._namespace:
            self.pods[manifest["metadata"]["uid"]] = manifest

    def pods_of_app(self, app: str) -> list[Json]:
        return [pod for pod in list(self.pods.values()) if pod["metadata"]["labels"].get("app") == app]


def test_both_webhooks_die_in_the_middle_of_a_rollout(space):
    """A Deployment of shares goes on when they are back; one without GPUs beside it has been through by then."""
    with webhooks(space.cluster, 2, alone=True) as replicas, Everything(space) as seen:
        space.apply(rollout("shares", 1, gpu_mem=1024), rollout("plain", 1))
        for name in ("shares", "plain"):
            space.wait(lambda name=name: is_through(space, name), f"{name} runs")
        space.apply(rollout("shares", 2, gpu_mem=1024), rollout("plain", 2))
        space.wait(lambda: updated(space, "shares") > 1, "the rollout has begun")
        for process in replicas:
            kill9(process)
        killed = time.monotonic()
        try:
            space.apply(rollout("later", 1))
            space.wait(lambda: is_through(space, "plain") and is_through(space, "later"), "pods without GPUs come")
            print(f"without webhooks: 2 rollouts without GPUs in {time.monotonic() - killed:.1f} s")
            space.wait(lambda: "failed calling webhook" in failures(space), "the rollout of shares waits")
            stuck = space.kubectl_json("get", "deployment", "shares")["status"]
            assert stuck["readyReplicas"] >= REPLICAS - 1, "those of before run on"
            assert not is_through(space, "shares")
        finally:
            for process in replicas:
                process.restart()
        for process in replicas:
            ready(process)
        back = time.monotonic()
        space.wait(lambda: is_through(space, "shares"), "the rollout of shares goes on", ROLLOUT)
        print(f"{time.monotonic() - back:.1f} s after the webhooks the rollout is through")
        shares, plain = seen.pods_of_app("shares"), [*seen.pods_of_app("plain"), *seen.pods_of_app("later")]
        assert len(shares) >= 2 * REPLICAS
        # Nothing is half-written: pods of before, of the moment of the kill and of later are alike.
        assert all(spec_of(pod) == spec_of(shares[0]) for pod in shares)
        assert names.SHARE in shares[0]["spec"]["containers"][0]["resources"]["limits"]
        assert all(spec_of(pod) == spec_of(plain[0]) for pod in plain)
        assert all(set(pod["metadata"]["annotations"]) == {"version"} for pod in plain)
        living = [pod for pod in space.pods() if pod["metadata"]["labels"]["app"] == "shares"]
        assert len({frozenset(pod["metadata"]["annotations"]) for pod in living}) == 1
        held = sum(share.mem for pod in living for share in assigned(pod).shares())
        space.wait(
            lambda: (
                sum(used for (node, _), (_, used, _) in inspect(space.cluster).items() if node in space.own_nodes)
                == held
            ),
            "the ledger agrees",
        )
    assert (held, seen.failed, seen.violations) == (REPLICAS * 1024, "", [])


def rollout(name: str, version: int, **settings: object) -> Json:
    """A Deployment whose pods are replaced one by one."""
    manifest = deployment(name, REPLICAS, annotations={"version": str(version)}, **settings)
    manifest["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}
    return manifest


def updated(space: Space, name: str) -> int:
    """How many of its pods are of the last version."""
    manifest = space.kubectl_json("get", "deployment", name)
    if manifest["status"].get("observedGeneration") != manifest["metadata"]["generation"]:
        return 0
    return int(manifest["status"].get("updatedReplicas", 0))


def is_through(space: Space, name: str) -> bool:
    status = space.kubectl_json("get", "deployment", name)["status"]
    counts = {status.get(key) for key in ("replicas", "readyReplicas")}
    return updated(space, name) == REPLICAS and counts == {REPLICAS}


def failures(space: Space) -> str:
    """Messages of the events of all ReplicaSets."""
    sets = space.kubectl_json("get", "replicasets")["items"]
    return "".join(space.reasons(replica_set["metadata"]["name"]) for replica_set in sets)


def spec_of(pod: Json) -> Json:
    return {key: pod["spec"][key] for key in pod["spec"] if key != "nodeName"}
