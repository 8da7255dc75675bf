"""The whole of Cardwise on a real card: plain pods of a real Kubernetes, and what their containers get of the card.

Each test runs twice: with our parts as processes, and by the chart, in pods that get the driver by NVIDIA's runtime.

Needs what real nodes of the tests need (tests/cluster): root, its programs, and Debian's runc, CNI and busybox.
"""

import contextlib
import json
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cardwise.core.api import mps, names, policies
from cardwise.core.values.decoded import Json
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.simulated import SimulatedGpus
from cardwise.kube import paths
from tests.cluster import Cluster, partsimage, toolkit
from tests.cluster.chart import RELEASE, WAITS, merged
from tests.cluster.images import IDLE
from tests.integration.conftest import SpecOf, spaces, started
from tests.integration.sharing import Space, assigned, workload
from tests.realcard.doublecard import MEMORY, DoubleCard
from tests.realcard.machine import DOUBLE_LIBRARY, KEEP, PROGRAM
from tests.realcard.tenant import DOUBLE_ENV
from tests.realcard.test_frameworks import PROGRAMS, PYTHON, SHARE, skip_without
from tests.realcard.test_mps import OUT_OF_MEMORY

IMAGE = f"{partsimage.NAME}:{partsimage.TAG}"  # ours, which the node has for the agent; it has a Python
KERNEL_DRIVER = 615  # the first that limits a container's memory itself
CONTEXT = 640  # MiB that CUDA's own context takes of a limit, at most
TENANT = "/tenant/tenant.py"


SHARES = {"small": 2048, "medium": 4096, "large": 12_288}  # MiB, of three tenants
# Starts a program without the limit that its container is given; our image has no shell.
WITHOUT_LIMIT = f"import os, sys; del os.environ[{mps.LIMIT_ENV!r}]; os.execvp(sys.argv[1], sys.argv[1:])"
TRIED = 24_576  # MiB that a tenant asks for who may have 2048

MANAGER = ["--no-exclusive"] if KEEP else []
PARTS: dict[str, Json] = {
    "processes": {"mps": True, "part_args": {"mps": ["--stop-daemons=always", *MANAGER]}},
    "pods": {
        "chart": True,
        "values": {
            "mps": {"stopDaemons": "always", "extraArgs": MANAGER},
            "webhook": {"shareAgentImage": partsimage.AGENT},
        },
    },
}
REAL_NODES = {"simulatedGPUs": "", "runtimeClass": toolkit.RUNTIME_CLASS}


def spec_of(parts: str, folder: Path, *, real: bool) -> SpecOf:
    """Of a cluster of one node, which has this machine's cards, or one of the double's size."""
    settings = dict(PARTS[parts])
    if real:
        settings = merged(settings, {"values": {"nodes": REAL_NODES}} if "chart" in settings else {})
    else:
        settings["cards"] = folder / "cards.yaml"
        settings["cards"].write_text(f"default: [{{model: double of an H200, memoryMiB: {MEMORY}}}]")
    return SpecOf(policy=policies.DEFAULT_POLICY, nodes=1, real_cards=real, agent=True, **settings)


@pytest.fixture(scope="module", params=PARTS)
def node(
    gpus: NvmlGpus,
    double: DoubleCard | None,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Cluster, NvmlGpus | SimulatedGpus]]:
    """A cluster of one node, which has this machine's cards, and these; our parts as processes, then by the chart."""
    for cluster in started(spec_of(request.param, tmp_path_factory.mktemp("cards"), real=double is None)):
        inventory = cluster.node("n1").folder / "cards.yaml"
        with double.serving(inventory) if double is not None else contextlib.nullcontext(gpus) as cards:
            yield cluster, cards
            if cluster.has_parts:
                cluster.process("mps-n1").stop()  # its daemons with it
            else:
                cluster.chart.helm("uninstall", RELEASE, *WAITS)
            cluster.wait(lambda: cards.processes(cards.cards()[0].uuid) == [], "nothing is left on the card")


@pytest.fixture(scope="module")
def cluster(node: tuple[Cluster, NvmlGpus | SimulatedGpus]) -> Cluster:
    return node[0]


@pytest.fixture(scope="module")
def cards(node: tuple[Cluster, NvmlGpus | SimulatedGpus]) -> NvmlGpus | SimulatedGpus:
    """Those of the node."""
    return node[1]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """With the tenants' program."""
    for new_space in spaces(cluster, request):
        programs = {file.name: file.read_text() for file in (PROGRAM, DOUBLE_LIBRARY)}
        cluster.api.create(
            f"{paths.namespaces(new_space.name)}/configmaps", {"metadata": {"name": "tenant"}, "data": programs}
        )
        yield new_space


@pytest.fixture
def measure(cluster: Cluster, measured: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """As `measured`, and where our parts are."""
    place = "processes" if cluster.has_parts else "pods"
    return lambda label, amount: measured(f"{label}; our parts are {place}", amount)


def tenant(name: str, mib: int, *arguments: object, **settings: Json) -> Json:
    """A pod with such a share that runs the tenants' program. Its input stays open, so it stays until it is deleted."""
    pod = workload(name, gpu_mem=mib, **settings)
    (main,) = pod["spec"]["containers"]
    main |= {"image": IMAGE, "imagePullPolicy": "Never", "stdin": True}
    main["command"] = ["python3", TENANT, *map(str, arguments)]
    main["volumeMounts"] = [{"name": "tenant", "mountPath": str(Path(TENANT).parent)}]
    pod["spec"] |= {"restartPolicy": "Never", "volumes": [{"name": "tenant", "configMap": {"name": "tenant"}}]}
    if address := os.environ.get(DOUBLE_ENV):  # the double's socket
        main["env"] = [{"name": DOUBLE_ENV, "value": address}]
        main["volumeMounts"].append({"name": "double", "mountPath": str(Path(address).parent)})
        pod["spec"]["volumes"].append({"name": "double", "hostPath": {"path": str(Path(address).parent)}})
    return pod


def tenant_lines(space: Space, name: str) -> list[Json]:
    """The lines that the tenant has told by now."""
    output = space.kubectl("logs", name, "-c", "main", check=False)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def heard(space: Space, name: str) -> Json:
    """Its first line."""
    space.wait(lambda: tenant_lines(space, name), f"{name} says something")
    return tenant_lines(space, name)[0]


def test_pods_see_the_card_only_with_a_share(space, cards):
    card = cards.cards()[0]
    space.create(workload("share", gpu_mem=SHARE, command=IDLE))
    space.create(workload("plain", command=IDLE))
    space.running("share", "plain")
    ((share,),) = assigned(space.get("share")).containers.values()
    assert (share.uuid, share.mem) == (card.uuid, SHARE)
    seen = space.inside("share", "ls /dev; env").split()
    assert Path(card.devices[0].container).name in seen
    fraction = next(word for word in seen if word.startswith(f"{names.ENV_FRACTION}=")).partition("=")[2]
    assert float(fraction) == pytest.approx(SHARE / card.memory, abs=1e-4)
    assert f"{mps.LIMIT_ENV}=0={SHARE}M" in seen
    assert not [word for word in space.inside("plain", "ls /dev").split() if word.startswith("nvidia")]


def test_a_pod_gets_its_share_and_not_more(space, measure):
    began = time.monotonic()
    space.create(tenant("fills", SHARE, "fill"))
    answer = heard(space, "fills")
    assert answer["error"] == OUT_OF_MEMORY
    assert SHARE - CONTEXT <= answer["allocated"] <= SHARE
    measure(f"a plain pod of {SHARE} MiB, in a container of containerd", f"{answer['allocated']} MiB allocated")
    measure("from creating the pod to having filled its share", f"{time.monotonic() - began:.1f} s")


def test_three_pods_compute_at_the_same_time(space, cards, measure):
    pods = [f"works-{number}" for number in range(3)]
    began = time.monotonic()
    for name in pods:
        space.create(tenant(name, SHARE, "busy", 8))
    for name in pods:
        assert heard(space, name) == {"ready": True}
    measure("three pods of one card, from creating them to computing", f"{time.monotonic() - began:.1f} s")
    listed = cards.processes(cards.cards()[0].uuid)
    assert len(listed) >= len(pods)
    # One ends with the others at work: they notice nothing, and its share is another's.
    space.delete(pods[0], grace=10)
    space.wait_for_deletion(pods[0])
    space.create(tenant("next", SHARE, "see"))
    assert heard(space, "next")["total"] > 0
    for name in pods[1:]:
        assert tenant_lines(space, name) == [{"ready": True}], "still at work"
        assert space.phase(name) == "Running"


@pytest.mark.skipif(not KEEP, reason="a card in the exclusive mode takes no process beside MPS")
def test_the_audit_tells_the_pod_that_holds_more(space):
    """Without MPS nothing holds a process to its share; by its container's cgroup it is found."""
    off = {names.ISOLATION: "none"}
    space.create(tenant("keeps", 2048, "hold", 2048, annotations=off))
    space.create(tenant("greedy", 2048, "hold", 4096, annotations=off))
    for name in ("keeps", "greedy"):
        assert heard(space, name)["error"] == 0
    space.wait(lambda: "MemoryOverrun" in space.reasons("greedy"), "its pod is told")
    assert "MemoryOverrun" not in space.reasons("keeps")


def test_a_hostile_tenant_among_three_is_reported_and_its_fault_reaches_the_others(space, measure):
    """In this order, since after the fault there is nobody left to be taken from."""
    for name in ("medium", "large"):
        space.create(tenant(name, SHARES[name], "busy", 8))
    for name in ("medium", "large"):
        assert heard(space, name) == {"ready": True}
    greedy = tenant("small", SHARES["small"], "take", "plain", TRIED)
    (main,) = greedy["spec"]["containers"]
    main["command"] = ["python3", "-c", WITHOUT_LIMIT, *main["command"]]
    space.create(greedy)
    allocated = heard(space, "small")["allocated"]
    space.wait(lambda: "MemoryOverrun" in space.reasons("small"), "its pod is told")
    assert "MemoryOverrun" not in space.reasons("medium") + space.reasons("large")
    measure(f"a pod of {SHARES['small']} MiB that removes its limit", f"{allocated} MiB; MemoryOverrun")
    space.delete("small", grace=1)
    space.wait_for_deletion("small")
    space.create(tenant("faulty", SHARES["small"], "crash"))
    assert heard(space, "faulty")["error"]
    for name in ("medium", "large"):
        space.wait(lambda name=name: tenant_lines(space, name)[1:], f"{name} meets the fault")
        measure(f"a fault beside a pod of {SHARES[name]} MiB", f"CUDA error {tenant_lines(space, name)[1]['error']}")


def test_the_tiers_are_shown_and_a_demand_that_nobody_meets_waits(space, cards, measure):
    card = cards.cards()[0]
    driver = card.properties["driver"]
    tiers = space.cluster.api.get(paths.extendedresources(card.uuid.lower()))["status"]["isolation"]
    measure(f"driver {driver}: isolation of memory, of compute", f"{tiers['memory']}, {tiers['compute']}")
    if int(driver.partition(".")[0]) < KERNEL_DRIVER:
        space.create(workload("demands", gpu_mem=SHARE, command=IDLE, annotations={names.ISOLATION: "kernel"}))
        space.refused("demands")
        measure("a pod that demands kernel there waits", space.reasons("demands").splitlines()[-1])


def test_torch_in_a_pod_keeps_to_its_share(space, measure):
    """The folders of the Python that has it are mounted; what it may have, it reads where every container does."""
    skip_without("torch")
    command = [PYTHON, "-c", "import torch; print(torch.__path__[0])"]
    packages = str(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout).parent)
    pod = tenant("torch", SHARE)
    (main,) = pod["spec"]["containers"]
    code = f"import sys; sys.path += sys.argv[1:]\n{textwrap.dedent(PROGRAMS['torch'])}"
    folders = {"packages": packages, "objects": "/usr/lib/x86_64-linux-gnu"}
    main["command"] = ["python3", "-c", code, packages]
    main["env"] = [{"name": "LD_LIBRARY_PATH", "value": folders["objects"]}]
    for name, folder in folders.items():
        main["volumeMounts"].append({"name": name, "mountPath": folder, "readOnly": True})
        pod["spec"]["volumes"].append({"name": name, "hostPath": {"path": os.path.realpath(folder)}})
    space.create(pod)
    answer = heard(space, "torch")
    assert answer["result"] == 1000.0
    assert 0.85 * SHARE <= answer["mib"] <= SHARE
    measure(f"torch in a pod of {SHARE} MiB", f"{answer['mib']} MiB")
