"""The share agent, MPS and the frameworks' hook at admission on the real kube-apiserver, with its own judges: Pod
Security, LimitRanges, quotas and QoS classes.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from cardwise.core.api import mps, names, shareagent
from cardwise.core.values.decoded import Json
from tests import build
from tests.cluster import Cluster
from tests.cluster.processes import wait_for
from tests.integration.admission.api import Api, cards_without_node
from tests.integration.sharing import flags
from tests.integration.since import since

pytestmark = [pytest.mark.cluster("sim")]


IMAGE = "cardwise.local/cardwise:1"
DRY = "--dry-run=server"
RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Api]:
    """Without nodes; two cards of one are known, and it has no MPS manager."""
    with (
        flags(cluster, "webhook", f"--share-agent-image={IMAGE}", "--share-agent=always"),
        cards_without_node(cluster) as api,
    ):
        yield api


@pytest.fixture
def space(api: Api, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of its own, with the labels and annotations of the test's parameter."""
    name = "agent-" + "".join(c for c in request.node.originalname.lower() if c.isalnum())[-40:]
    metadata = {"name": name} | getattr(request, "param", {})
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    assert wait_for(lambda: api.run("get", "serviceaccount", "default", "-n", name).returncode == 0)
    yield name
    api.ok("delete", "namespace", name, "--wait=false")


def pod(
    space: str, name: str = "p", *, amounts: Json | None = None, annotations: Json | None = None, **requests: Any
) -> Json:
    """`amounts` are cpu and memory of its container, `annotations` its annotations."""
    pod = build.pod(name, namespace=space, annotations=annotations, **(requests or {"gpu_mem": 8138}))
    resources = pod["spec"]["containers"][0]["resources"]
    for kind, listed in (amounts or {}).items():
        resources[kind] = resources.get(kind, {}) | listed
    return pod


def agent(pod: Json) -> Json | None:
    init = pod["spec"].get("initContainers") or []
    return next((container for container in init if container["name"] == shareagent.CONTAINER_NAME), None)


def own(container: Json, kind: str) -> Json:
    """Its cpu and memory."""
    amounts = container["resources"].get(kind) or {}
    return {name: amount for name, amount in amounts.items() if name in ("cpu", "memory")}


def env(pod: Json) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}


def warnings(api: Api, manifest: Json) -> str:
    done = api.run("create", DRY, "-f", "-", stdin=manifest)
    assert done.returncode == 0, done.stderr
    return done.stderr


ONE = {"cpu": "1", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("amounts", "quality", "of_agent"),
    [
        ({}, "BestEffort", {}),
        ({"limits": ONE}, "Guaranteed", {"cpu": "50m", "memory": "64Mi"}),
        ({"requests": ONE}, "Burstable", {}),
        ({"limits": {"memory": "1Gi"}}, "Burstable", {"memory": "64Mi"}),
    ],
    ids=["BestEffort", "Guaranteed", "requests", "one limit"],
)
def test_the_agent_comes_and_the_qos_class_stays(api: Api, amounts: Json, quality: str, of_agent: Json) -> None:
    stored = api.create(pod("default", amounts=amounts), DRY)
    sidecar = agent(stored)
    assert sidecar is not None
    assert stored["status"]["qosClass"] == quality
    assert own(sidecar, "limits") == of_agent
    without = api.create(pod("default", amounts=amounts, annotations={names.SHARE_AGENT: "never"}), DRY)
    assert agent(without) is None
    assert without["status"]["qosClass"] == quality


def test_an_init_container_that_names_nothing_leaves_the_agent_its_amounts(api: Api) -> None:
    """A HorizontalPodAutoscaler counts what runs together, so it ignores the init container and needs the agent's."""
    manifest = pod("default", amounts={"requests": ONE, "limits": ONE})
    manifest["spec"]["initContainers"] = [build.container("unpack")]
    stored = api.create(manifest, DRY)
    sidecar = agent(stored)
    assert sidecar is not None
    assert own(sidecar, "requests") == own(sidecar, "limits") == {"cpu": "50m", "memory": "64Mi"}
    manifest["metadata"]["annotations"] = {names.SHARE_AGENT: "never"}
    assert stored["status"]["qosClass"] == api.create(manifest, DRY)["status"]["qosClass"] == "Burstable"


def limit_range(api: Api, space: str, *limits: Json) -> None:
    manifest = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l", "namespace": space}}
    api.create(manifest | {"spec": {"limits": list(limits)}})


def pod_with_limits(api: Api, manifest: Json, **amounts: str) -> Json:
    """The pod, dry, once the agent's limits are these: the webhook hears of LimitRanges by a watch."""
    stored: Json = {}

    def limits_are_known() -> bool:
        done = api.run("create", "-o", "json", DRY, "-f", "-", stdin=manifest)
        stored.clear()
        stored.update(json.loads(done.stdout) if done.returncode == 0 else {})
        of_agent = agent(stored) if stored else None
        return of_agent is not None and own(of_agent, "limits") == amounts

    assert wait_for(limits_are_known), api.run("create", DRY, "-f", "-", stdin=manifest).stderr or stored
    return stored


def test_the_minimum_of_a_limit_range_is_kept_to(api: Api, space: str) -> None:
    limit_range(api, space, {"type": "Container", "min": {"cpu": "100m", "memory": "100Mi"}})
    stored = pod_with_limits(api, pod(space, amounts={"limits": ONE}), cpu="100m", memory="100Mi")
    assert stored["status"]["qosClass"] == "Guaranteed"
    api.create(pod(space, amounts={"limits": ONE}))


def test_what_a_limit_range_gives_all_containers_the_agent_has_its_own_of(api: Api, space: str) -> None:
    limit_range(api, space, {"type": "Container", "default": ONE, "defaultRequest": ONE, "min": {"cpu": "60m"}})
    stored = pod_with_limits(api, pod(space), cpu="60m", memory="64Mi")
    assert own(stored["spec"]["containers"][0], "limits") == ONE
    assert stored["status"]["qosClass"] == "Guaranteed"


@since(34, "`spec.resources`")
def test_what_a_limit_range_gives_the_agent_stays_where_the_pod_as_a_whole_names_amounts(api: Api, space: str) -> None:
    limit_range(api, space, {"type": "Container", "default": ONE, "defaultRequest": ONE, "min": {"cpu": "60m"}})
    pod_with_limits(api, pod(space), cpu="60m", memory="64Mi")
    whole = pod(space)
    whole["spec"]["resources"] = {"limits": {"cpu": "4", "memory": "4Gi"}}
    sidecar = agent(api.create(whole, DRY))
    assert sidecar is not None
    assert own(sidecar, "limits") == ONE


def test_a_pod_that_a_limit_range_has_no_more_room_for_runs_without_it(api: Api, space: str) -> None:
    limit_range(api, space, {"type": "Pod", "max": {"cpu": "1", "memory": "2Gi"}})
    full = pod(space, amounts={"limits": ONE}, annotations={names.FRAMEWORKS: "on"})
    left_out = "the share agent is not injected, because a LimitRange allows a pod 1 of cpu at most"
    create_dry = functools.partial(api.run, "create", DRY, "-f", "-", stdin=full)
    assert wait_for(lambda: left_out in create_dry().stderr), create_dry().stderr
    created = api.create(full)
    assert agent(created) is None
    assert mounts(created) == []
    small = pod(space, "small", amounts={"limits": ONE | {"cpu": "950m"}})
    assert agent(api.create(small, DRY)) is not None


def mounts(pod: Json) -> list[Json]:
    all_mounts = pod["spec"]["containers"][0].get("volumeMounts") or []
    return [mount for mount in all_mounts if mount["name"] == shareagent.VOLUME_NAME]


def test_a_quota_counts_the_agent_and_refuses_no_pod_for_it(api: Api, space: str) -> None:
    hard = {"requests.cpu": "2", "limits.cpu": "2", "requests.memory": "4Gi", "limits.memory": "4Gi"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": space}}
    api.create(quota | {"spec": {"hard": hard}})
    # The API server learns of it by a watch.
    assert wait_for(lambda: "must specify" in api.run("create", DRY, "-f", "-", stdin=pod(space)).stderr)
    api.create(pod(space, amounts={"limits": ONE}))
    used = api.get("resourcequota", "q", "-n", space)["status"]["used"]
    assert used == {
        "requests.cpu": "1050m", "limits.cpu": "1050m", "requests.memory": "1088Mi", "limits.memory": "1088Mi",
    }  # fmt: skip


def test_a_manifest_that_is_applied_again_changes_nothing(api: Api, space: str) -> None:
    manifest = pod(space, amounts={"limits": ONE}, annotations={names.FRAMEWORKS: "on"})
    assert api.kubectl("apply", "-f", "-", stdin=manifest).returncode == 0
    before = api.get("pod", "p", "-n", space)
    assert "unchanged" in api.kubectl("apply", "-f", "-", stdin=manifest).stdout
    assert api.get("pod", "p", "-n", space)["spec"] == before["spec"]
    api.ok("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)
    assert api.get("pod", "p", "-n", space)["spec"] == before["spec"]


def test_the_limits_of_mps_pass_the_policies_and_no_others(api: Api) -> None:
    shared = pod("default", gpu_mem=8138, gpu_core=25)
    created = env(api.create(shared, DRY))
    assert created[mps.LIMIT_ENV] == "0=8138M"
    assert created[mps.PERCENT_ENV] == "25"
    shared["spec"]["containers"][0]["env"] = [{"name": mps.LIMIT_ENV, "value": "0=100G"}]
    assert env(api.create(shared, DRY))[mps.LIMIT_ENV] == "0=8138M"
    assert f"{mps.LIMIT_ENV} replaced" in warnings(api, shared)
    plain = build.pod("plain")
    for limit in ("0=8138M", "0=100G"):
        plain["spec"]["containers"][0]["env"] = [{"name": mps.LIMIT_ENV, "value": limit}]
        assert "CUDA_MPS_*" in api.refused("create", DRY, "-f", "-", stdin=plain)


DEFAULTS = {
    "labels": {names.DEFAULTS_LABEL: "enabled"},
    "annotations": {names.ISOLATION: "mps", names.FRAMEWORKS: "torch,jax", names.DEFAULT_GPU_MEM: "512"},
}


@pytest.mark.parametrize("space", [DEFAULTS], indirect=True, ids=["defaults"])
def test_the_defaults_of_a_namespace(api: Api, space: str) -> None:
    stored: Json = {}

    def known() -> bool:
        stored.update(api.create(pod(space), DRY))
        return bool(stored["metadata"]["annotations"].get(names.ISOLATION) == "mps")

    assert wait_for(known), stored["metadata"]["annotations"]
    assert env(stored)["CARDWISE_FRAMEWORKS"] == "torch,jax"
    assert env(stored)["PYTHONPATH"] == "/run/cardwise/python"
    assert agent(stored) is not None, "the hook brings it along"
    plain = api.create(build.pod("plain", namespace=space), DRY)
    assert env(plain)["CARDWISE_FRAMEWORKS"] == "torch,jax"
    for key, bad in ((names.ISOLATION, "on"), (names.FRAMEWORKS, "pytorch")):
        error = api.refused("annotate", "namespace", space, "--overwrite", f"{key}={bad}")
        assert f"namespace {space}: metadata.annotations[{key}]: '{bad}' is no" in error
