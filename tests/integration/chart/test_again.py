"""The chart installed once more: after an installation with MPS, and without Helm's releases.

What one installation leaves on the nodes and in the cluster, the next one must not believe for ever. Before that: what
`advise` and `idle` read of the first one's managers, through the API server.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cardwise.core.api import mps, names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.build import P100
from tests.cluster import Cluster, partsimage, processes, versions
from tests.cluster.chart import CHART, WAITS
from tests.cluster.images import IDLE
from tests.integration import commands
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, deployment, workload
from tests.integration.simulateduse import boot_seconds, simulate_use, wait_within_minute

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.in_order]

SYSTEM = names.NAMESPACE
VALUES: Json = {
    "webhook": {"shareAgent": "never", "replicas": 1},
    "extender": {"replicas": 1},
    "mps": {"enabled": True, "extraArgs": ["--probe-timeout=20s"]},
}
WITHOUT_MPS: Json = {
    "mps": {"enabled": False, "extraArgs": []},
    "scheduler": {"mode": "own", "replicas": 1, "image": partsimage.SCHEDULER},
}
# On nodes, the parts and what the chart names them.
PARTS = ("deployment/cardwise-webhook", "deployment/cardwise-extender", "daemonset/cardwise-deviceplugin")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With MPS, by an installation of today's chart."""
    yield from started(SpecOf(nodes=1, chart=True, values=VALUES))


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Space:
    return Space(cluster, "team")


def mps_of_cards(cluster: Cluster) -> dict[str, dict[str, Any] | None]:
    """`status.mps` of each card, by UUID."""
    resources = cluster.api.get(paths.extendedresources())["items"]
    return {resource["spec"]["uuid"]: (resource.get("status") or {}).get("mps") for resource in resources}


def wait_for_mps(space: Space) -> None:
    def ready() -> bool:
        statuses = mps_of_cards(space.cluster).values()
        return bool(statuses) and all(status is not None and status["state"] == "Ready" for status in statuses)

    space.wait(ready, "the cards are ready")


def printed(cluster: Cluster, *words: str) -> Json:
    completed = commands.cardwise(cluster, *words, "-o", "json")
    assert completed.returncode == 0, completed.stderr
    return dict(json.loads(completed.stdout))


USED = (1000, 2000, 3000)  # MiB of each pod of `web`
GRANTED, SLEEPER = 4000, 2000  # MiB of a pod of `web`, and of `sleeper`
EXACT = 4.0  # seconds: samples are taken each second, timestamps are whole seconds, and commands take time


def test_advise_and_idle_print_the_numbers_of_the_simulated_use(cluster: Cluster, space: Space) -> None:
    wait_for_mps(space)
    wait_within_minute()
    space.kubectl_json("create", stdin=deployment("web", len(USED), gpu_mem=GRANTED, command=IDLE))
    space.create(workload("sleeper", gpu_mem=SLEEPER, command=IDLE))
    space.wait(lambda: len(space.pods()) == len(USED) + 1, "all pods are there")
    pods = sorted(pod["metadata"]["name"] for pod in space.pods())
    space.running(*pods)
    web = [name for name in pods if name != "sleeper"]
    wait_within_minute()
    used = {name: (mib, True) for name, mib in zip(web, USED, strict=True)} | {"sleeper": (500, False)}
    began = simulate_use(space, "n1", used)
    time.sleep(2.5)  # at least two samples
    stopped = simulate_use(space, "n1", used | {web[0]: (USED[0], False)})
    time.sleep(EXACT + 1)

    idle = printed(cluster, "idle", "-n", space.name, "--for", f"{EXACT:g}s")
    now = boot_seconds()
    assert (idle["unknown"], idle["undecided"]) == ([], []), idle
    assert [(pod["name"], pod["workload"], pod["grantedMiB"]) for pod in idle["pods"]] == [
        ("sleeper", "Pod/sleeper", SLEEPER),
        (web[0], "Deployment/web", GRANTED),
    ]
    sleeper, stopped_pod = (pod["idleSeconds"] for pod in idle["pods"])
    assert sleeper > now - began - EXACT, "it has not computed since its start"
    assert abs(stopped_pod - (now - stopped)) < EXACT, (stopped_pod, now - stopped)

    wait_within_minute()
    advice = printed(cluster, "advise", "-n", space.name, "deploy/web")
    (container,) = advice["containers"]
    minutes = int(boot_seconds() // 60) - int(began // 60) + 1
    # Before its process is there a pod uses 0 MiB, for as many minutes as the pods took to start.
    unused = container["knownMinutes"] - minutes * len(USED)
    assert 0 <= unused <= 3 * len(USED), container
    peaks = sorted([0] * unused + [*USED] * minutes)
    recommended = math.ceil(max(USED) * 1.15 / 64) * 64
    expected = {
        "pods": len(USED),
        "requestedMiB": GRANTED,
        "p50MiB": peaks[math.ceil(0.5 * len(peaks)) - 1],
        "p99MiB": peaks[math.ceil(0.99 * len(peaks)) - 1],
        "peakMiB": max(USED),
        "recommendedMiB": recommended,
    }
    assert {key: container[key] for key in expected} == expected
    granted: Counter[str] = Counter()
    for name in pods:
        for share in assigned(space.get(name)).shares():
            granted[share.uuid] += share.mem
    fitting_now = sum((P100 - granted[uuid]) // GRANTED for uuid in mps_of_cards(cluster))
    # All pods have the new size, so it does not matter where they go.
    fitting_then = (P100 - SLEEPER) // recommended + P100 // recommended - len(USED)
    assert [effect["morePods"] for effect in advice["effects"]] == [fitting_then - fitting_now]
    simulate_use(space, "n1", {})
    space.clear()


def test_without_mps_the_cards_that_an_installation_with_it_left_open_take_pods(cluster: Cluster, space: Space) -> None:
    wait_for_mps(space)
    space.create(workload("held", gpu_mem=8138, command=IDLE))
    space.running("held")
    ((share,),) = assigned(space.get("held")).containers.values()
    cluster.chart.helm("uninstall", "cardwise", *WAITS)
    assert mps_of_cards(cluster) == {}
    archive = cluster.state_dir / "images" / "scheduler.tar"
    partsimage.write_scheduler(archive, cluster.bin_dir)
    cluster.node("n1").load_image(archive)
    cluster.chart.upgrade(WITHOUT_MPS, "--install")

    def as_left() -> bool:
        """The card of the pod is closed still, and its daemon serves the pod; the other is open."""
        statuses = mps_of_cards(cluster)
        closed = statuses.pop(share.uuid, None) or {}
        return closed.get("reason") == mps.CLOSED_BY_FORMER_MANAGER and list(statuses.values()) == [None]

    space.wait(as_left, "the cards are as the earlier installation left them")
    space.create(workload("prefers", gpu_mem=8000, command=IDLE, annotations={names.ISOLATION: "advisory"}))
    space.running("prefers")
    ((other,),) = assigned(space.get("prefers")).containers.values()
    assert other.uuid != share.uuid
    output = commands.cardwise(cluster, "doctor", "--no-probe").stdout
    assert "without MPS, Down: the GPU is closed to programs without MPS" in output
    space.delete("held", "prefers", grace=1)
    space.wait_for_deletion("held", "prefers")


def test_what_is_rendered_without_hooks_is_applied_and_applied_again_with_another_image(
    cluster: Cluster, space: Space
) -> None:
    """As docs/install.md says; kubectl would run the hooks of an uninstallation at once."""
    cluster.chart.helm("uninstall", "cardwise", *WAITS)
    cluster.node("n1").tag_image(f"{partsimage.NAME}:{partsimage.TAG}", f"{partsimage.NAME}:second")
    flags = [
        f"--values={cluster.state_dir / 'values.yaml'}",
        f"--kube-version={versions.version()}",
        "--no-hooks",
        "--set=namespace.create=true",
    ]
    certificates = set()
    for tag in (partsimage.TAG, "second"):
        file = cluster.state_dir / "rendered.yaml"
        file.write_text(cluster.chart.helm("template", "cardwise", str(CHART), *flags, f"--set=image.tag={tag}"))
        cluster.kubectl("apply", "--server-side", "-f", str(file))
        for part in PARTS:
            cluster.kubectl("rollout", "status", part, "-n", SYSTEM, f"--timeout={processes.PATIENCE:.0f}s")
        query = {"labelSelector": "app.kubernetes.io/component=deviceplugin"}
        (plugin,) = cluster.api.get(paths.pods(SYSTEM), query)["items"]
        assert plugin["spec"]["containers"][0]["image"] == f"{partsimage.NAME}:{tag}"
        assert cluster.api.get(f"/apis/batch/v1/namespaces/{SYSTEM}/jobs")["items"] == [], "no hook has run"
        certificates.add(cluster.api.get(paths.secrets(SYSTEM, "cardwise-extender-tls"))["metadata"]["uid"])
        space.wait(lambda: mps_of_cards(cluster), "the cards are known")
        space.create(workload(f"applied-{tag}", gpu_mem=100, command=IDLE))
        space.running(f"applied-{tag}")
    assert len(certificates) == 1, "nothing of an uninstallation has run"
