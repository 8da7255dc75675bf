"""Numbers without a unit in aliyun.com/gpu-mem, on a real cluster: GiB in one namespace mib_space MiB in another."""

import json
from collections.abc import Iterator

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import P100, container
from tests.cluster import Cluster, CommandFailed
from tests.cluster.cards import TestCard
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, account, assigned, binding, inspect, workload

pytestmark = [pytest.mark.cluster("sim")]

KEY = f"requests.{names.GPU_MEM}"


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace where bare numbers count GiB, with a node of two cards of its own."""
    for space in spaces(cluster, request):
        space.nodes(1, [TestCard(memory_mib=P100)] * 2)
        counts_gib(space)
        yield space


@pytest.fixture
def bare(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """As `space`, without a node."""
    for space in spaces(cluster, request):
        counts_gib(space)
        yield space


@pytest.fixture
def mib_space(cluster: Cluster, space: Space, request: pytest.FixtureRequest) -> Iterator[Space]:
    """One where they count MiB."""
    yield from spaces(cluster, request)


def counts_gib(space: Space) -> None:
    space.kubectl_json("label", "namespace", space.name, f"{names.GPU_MEM_UNIT}=GiB")
    # Admission learns of labels by a watch.
    space.wait(lambda: mem(dry(space, workload("probe", gpu_mem=2))) == "2048", "the API server knows the label")


def dry(space: Space, pod: Json) -> Json:
    return space.cluster.api.create(paths.pods(space.name), pod, query={"dryRun": "All"})


def mem(pod: Json, index: int = 0) -> str:
    return str(pod["spec"]["containers"][index]["resources"]["limits"][names.GPU_MEM])


def pod_of(space: Space, **settings: object) -> Json:
    """A pod for the node of the space."""
    name = str(settings.pop("name"))
    return workload(name, node=settings.pop("node", None) or space.own_nodes[0], **settings)


def inspected(space: Space) -> dict[int, tuple[int, int]]:
    """Used MiB and the whole of each card of the space's node, as gpushare's own `kubectl inspect gpushare` adds them:
    from the node's allocatable and its pods' limits (gpushare-device-plugin `cmd/inspect/nodeinfo.go`).
    """
    (node,) = space.own_nodes
    has = space.cluster.api.get(paths.nodes(node))["status"]["allocatable"]
    cards = int(has[names.GPU_COUNT])
    used = dict.fromkeys(range(cards), 0)
    for pod in space.cluster.api.get(paths.pods(), {"fieldSelector": f"spec.nodeName={node}"})["items"]:
        limits = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
        total = sum(int(quantity.parse_amount(amount.get(names.GPU_MEM, "0")).number) for amount in limits)
        if total:
            used[int(pod["metadata"]["annotations"][names.IDX])] += total
    return {card: (mib, int(has[names.GPU_MEM]) // cards) for card, mib in used.items()}


def test_two_is_two_gib_there_and_beside_it_two_mib(space, mib_space):
    node = space.own_nodes[0]
    assert space.create_and_locate(pod_of(space, name="gib", gpu_mem=2)) == (node, "0")
    assert mib_space.create_and_locate(workload("mib", gpu_mem=2000, node=node)) == (node, "0")
    assert space.create_and_locate(pod_of(space, name="said", gpu_mem="1Gi")) == (node, "0")
    for of, name, mib in ((space, "gib", 2048), (mib_space, "mib", 2000), (space, "said", 1024)):
        pod = of.get(name)
        assert mem(pod) == pod["spec"]["containers"][0]["resources"]["requests"][names.GPU_MEM]
        assert assigned(pod).mem == mib
        annotations = pod["metadata"]["annotations"]
        assert annotations[names.LIMIT_MIB_OF + "0"] == annotations[names.POD_MEM] == str(mib)
        assert annotations[names.FRACTION_OF + "0"] == assignment.fraction(mib, P100)
    cards = inspect(space.cluster)
    assert cards[node, 0][1] == 2048 + 2000 + 1024
    assert inspected(space) == {0: (2048 + 2000 + 1024, P100), 1: (0, P100)}


def test_quotas_count_what_the_pods_get(space):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "cards"}, "spec": {"hard": {KEY: "5"}}}
    gpu_quota = {"apiVersion": names.API_VERSION, "kind": "GPUQuota", "metadata": {"name": "held"}}
    gpu_quota["spec"] = {"hard": [{"memoryMiB": "8Gi"}]}
    for manifest in (quota, quota, gpu_quota):  # applied again, it is the same
        space.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    stored = space.kubectl_json("get", "resourcequota", "cards")
    assert stored["spec"]["hard"] == {KEY: "5120"}
    space.kubectl_json("label", "resourcequota", "cards", "seen=again")
    space.wait(lambda: used(space) == {"hard": "5120", "used": "0"}, "Kubernetes counts")
    # The API server learns of it by a watch.
    space.wait(
        lambda: "exceeded quota: cards" in space.rejected(pod_of(space, name="much", gpu_mem=6)), "and admission"
    )
    space.create_and_locate(pod_of(space, name="first", gpu_mem=2))
    space.create_and_locate(pod_of(space, name="second", gpu_mem="2Gi"))
    space.wait(lambda: used(space)["used"] == "4096", "both are counted alike")
    rejection = space.rejected(pod_of(space, name="third", gpu_mem=2))
    assert "exceeded quota: cards" in rejection
    quota_status = lambda: space.cluster.api.get(paths.gpuquotas(space.name, "held")).get("status", {})  # noqa: E731
    space.wait(lambda: "4096" in json.dumps(quota_status()), "the GPUQuota counts MiB")
    with pytest.raises(
        CommandFailed, match=r"means GiB here, more than any GPU has; write a unit, as in 8138Mi or 8Gi"
    ):
        space.kubectl("apply", "-f", "-", stdin=json.dumps(quota | {"spec": {"hard": {KEY: "100G"}}}))


def used(space: Space) -> dict[str, str]:
    status = space.kubectl_json("get", "resourcequota", "cards")["status"]
    return {kind: status.get(kind, {}).get(KEY, "") for kind in ("hard", "used")}


def test_a_limit_range_gives_and_bounds_what_it_says(bare):
    """Kubernetes puts its default into pods before the webhook sees them, and that is stored MiB."""
    limits = [{"type": "Container", "max": {names.GPU_MEM: "4"}, "default": {names.GPU_MEM: "2"}}]
    manifest = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "bounds"}, "spec": {"limits": limits}}
    for _ in range(2):
        bare.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    bare.kubectl_json("label", "limitrange", "bounds", "seen=again")
    (stored_limit,) = bare.kubectl_json("get", "limitrange", "bounds")["spec"]["limits"]
    assert {stored_limit[kind][names.GPU_MEM] for kind in ("default", "defaultRequest")} == {"2048"}
    assert stored_limit["max"][names.GPU_MEM] == "4096"
    plain, three = workload("plain"), workload("three", gpu_mem=3)
    two_containers = workload("both", [container("said", gpu_mem=1), container("given")])
    bare.wait(
        lambda: names.GPU_MEM in dry(bare, plain)["spec"]["containers"][0]["resources"].get("limits", {}), "known"
    )
    assert mem(dry(bare, plain)) == "2048"
    assert mem(dry(bare, three)) == "3072"
    assert [mem(dry(bare, two_containers), i) for i in (0, 1)] == ["1024", "2048"]
    assert "4096" in bare.rejected(workload("five", gpu_mem=5))


def test_the_unit_is_said_by_those_who_may_change_the_rules(bare):
    """Else who may create or label namespaces would change what numbers in administrators' quotas mean."""
    role = f"{bare.name}-namespaces"
    kinds = ["namespaces", "namespaces/status", "namespaces/finalize"]
    rule = {"apiGroups": [""], "resources": kinds, "verbs": ["get", "create", "update", "patch"]}
    may = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": role}}
    rights = [account("user"), may | {"rules": [rule]}, binding(role, role, account=f"{bare.name}:user")]
    bare.kubectl_json("create", stdin=rights)
    as_user = f"--as=system:serviceaccount:{bare.name}:user"
    try:
        namespace: Json = {"apiVersion": "v1", "kind": "Namespace"}
        namespace["metadata"] = {"name": f"{bare.name}-own", "labels": {names.GPU_MEM_UNIT: "GiB"}}
        refused(bare, "create", as_user, "--dry-run=server", stdin=namespace)
        for sub in ("", "/status", "/finalize"):
            namespace = bare.cluster.api.get(paths.namespaces(bare.name))
            for labels in ({names.GPU_MEM_UNIT: "MiB"}, {}):
                namespace["metadata"]["labels"] = labels
                path = f"{paths.namespaces(bare.name)}{sub}"
                refused(bare, "replace", as_user, "--raw", path, stdin=namespace)
        bare.kubectl_json("annotate", "namespace", bare.name, as_user, "mine=yes")
    finally:
        bare.kubectl_json("delete", stdin=rights)


def refused(space: Space, *command: str, stdin: Json) -> None:
    says = "it changes the meaning of the numbers in this namespace's quotas"
    space.wait(lambda: says in space.cluster.verbs.run(*command, stdin=stdin).stderr, "the policy refuses")


def test_a_unit_that_is_none_is_refused(bare):
    for unit in ("gib", "GB", ""):
        with pytest.raises(errors.KubeError, match="is not a unit of gpu-mem; write MiB or GiB"):
            bare.cluster.api.patch(paths.namespaces(bare.name), {"metadata": {"labels": {names.GPU_MEM_UNIT: unit}}})
