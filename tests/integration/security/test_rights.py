"""What roles and policies of the chart let each part do, as the real API server judges it; docs/security.md has it too.

That each part can do its work with them is what all other tests on clusters show: the parts run with these accounts.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest
import yaml

from cardwise.core.api import classes, names
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MAX_MIB
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.cluster import Cluster, binaries, processes, versions
from tests.cluster.cards import DEFAULT
from tests.cluster.parts import CHART, GIVEN
from tests.integration.security.writes_of_parts import DRY, EXCESS, MAY, Excess, World, of_ours
from tests.integration.sharing import Space, inspect, workload

pytestmark = [pytest.mark.cluster("sim")]

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ADMISSION = "admissionregistration.k8s.io"
OWN = names.NAMESPACE
HOOKS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")

AUTOMATIC = classes.name_of_model(DEFAULT[0].model)

# A right: verb, group, resource with its subresource, and where: "" for all namespaces, or "namespace/name".
Right = tuple[str, str, str, str]

RIGHTS: dict[str, list[Right]] = {
    "webhook": [
        ("list", "", "pods", ""),
        ("watch", "", "namespaces", ""),
        ("list", names.GROUP, "gpuquotas", ""),
        ("patch", ADMISSION, HOOKS[0], "/cardwise"),
        ("patch", ADMISSION, HOOKS[0], "/zz-cardwise"),
        ("get", "", "secrets", f"{OWN}/cardwise-webhook-tls"),
    ],
    "extender": [
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("delete", "", "pods", ""),
        ("patch", names.GROUP, "gpuquotas/status", ""),
        ("create", names.GROUP, "podgroups", ""),
        ("update", "coordination.k8s.io", "leases", f"{OWN}/{names.LEASE}"),
    ],
    "deviceplugin": [
        ("patch", "", "nodes/status", ""),
        ("patch", "", "pods", ""),
        ("create", names.GROUP, "extendedresources", ""),
        ("patch", names.GROUP, "extendedresources/status", ""),
    ],
    "mps": [
        ("list", "", "pods", ""),
        ("patch", names.GROUP, "extendedresources/status", ""),
        ("create", "", "events", ""),
    ],
}

NOBODY: list[Right] = [
    ("create", "", "pods", ""),
    ("create", "", "pods/exec", ""),
    ("list", "", "secrets", ""),
    ("get", "", "secrets", ""),
    ("get", "", "secrets", "kube-system/other"),
    ("get", "", "configmaps", "kube-system/other"),
    ("create", "", "serviceaccounts/token", ""),
    ("impersonate", "", "users", ""),
    ("delete", "", "nodes", ""),
    ("get", "", "nodes/proxy", ""),
    ("patch", "", "namespaces", ""),
    ("patch", "", "resourcequotas", ""),
    ("patch", names.GROUP, "gpuquotas", ""),
    ("update", names.GROUP, "gpuquotas", ""),
    ("update", "apiextensions.k8s.io", "customresourcedefinitions", ""),
    ("patch", ADMISSION, "validatingadmissionpolicies", ""),
    ("delete", ADMISSION, "validatingadmissionpolicies", ""),
    ("create", ADMISSION, HOOKS[0], ""),
    ("patch", ADMISSION, HOOKS[0], "/of-somebody-else"),
    ("delete", ADMISSION, HOOKS[1], "/cardwise"),
    ("bind", "rbac.authorization.k8s.io", "clusterroles", ""),
    ("update", "rbac.authorization.k8s.io", "clusterroles", ""),
    ("create", "rbac.authorization.k8s.io", "clusterrolebindings", ""),
    ("create", "apps", "daemonsets", ""),
]

MAY_NOT: dict[str, list[Right]] = {
    "webhook": [
        ("delete", "", "pods", ""),
        ("patch", "", "pods", ""),
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("patch", "", "nodes", ""),
        ("patch", names.GROUP, "extendedresources/status", ""),
        ("patch", names.GROUP, "resourceclasses", ""),
        ("update", "coordination.k8s.io", "leases", ""),
        ("get", "", "secrets", f"{OWN}/cardwise-extender-tls"),
    ],
    "extender": [
        ("update", "", "pods/status", ""),
        ("patch", "", "nodes/status", ""),
        ("patch", names.GROUP, "extendedresources", ""),
        ("update", "coordination.k8s.io", "leases", "kube-system/kube-scheduler"),
        ("patch", ADMISSION, HOOKS[0], "/cardwise"),
        ("get", "", "secrets", f"{OWN}/cardwise-webhook-tls"),
    ],
    "deviceplugin": [
        ("delete", "", "pods", ""),
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("patch", names.GROUP, "resourceclasses", ""),
        ("get", names.GROUP, "gpuquotas", ""),
        ("patch", names.GROUP, "gpuquotas/status", ""),
        ("get", "", "namespaces", ""),
        ("get", "", "secrets", f"{OWN}/cardwise-extender-tls"),
    ],
    "mps": [
        ("delete", "", "pods", ""),
        ("patch", "", "pods", ""),
        ("get", "", "nodes", ""),
        ("patch", "", "nodes", ""),
        ("patch", "", "nodes/status", ""),
        ("create", "", "pods/binding", ""),
        ("create", "", "pods/eviction", ""),
        ("create", names.GROUP, "extendedresources", ""),
        ("patch", names.GROUP, "extendedresources", ""),
    ],
}


def rendered(template: str, *settings: str) -> list[Json]:
    """A template of the chart with other settings than the test cluster's."""
    helm = str(binaries.helm(print) / "helm")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    chart = ["template", "cardwise", str(CHART), "-n", OWN, "--kube-version", versions.version(), *GIVEN]
    objects = yaml.safe_load_all(processes.run([helm, *chart, "-s", f"templates/{template}", *flags]))
    return [setting for setting in objects if setting]  # comments alone are a document too


@pytest.fixture(scope="module")
def accounts(cluster: Cluster) -> Iterator[Cluster]:
    """All parts' accounts, under the policies as people have them: the test cluster runs no MPS manager, and its device
    plugins no pods.
    """
    roles = rendered("mps/rbac.yaml")
    policies = [manifest for manifest in rendered("policies/deviceplugin.yaml") if manifest["kind"].endswith("Policy")]
    without_nodes = rendered("policies/deviceplugin.yaml", "deviceplugin.restrictToNode=false")
    cluster.apply([*roles, *policies])
    try:
        cluster.wait(lambda: allowed(cluster, "mps", RIGHTS["mps"][0]), "the new role is known")
        yield cluster
    finally:
        cluster.apply(without_nodes)
        cluster.kubectl_object("delete", stdin=roles)


@pytest.fixture(scope="module")
def world(accounts: Cluster, request: pytest.FixtureRequest) -> Iterator[World]:
    """The objects that the writes are about."""
    person = of_ours("ResourceClass", "of-a-person", {"selector": {"matchLabels": {"model": "Tesla-P100"}}})
    with Space(accounts, "rights") as space, ExitStack() as stack:
        api, (node, other) = accounts.api, space.nodes(2)
        api.create(paths.resourceclasses(), person)
        stack.callback(api.delete, paths.resourceclasses("of-a-person"))
        api.create(paths.pods(OWN), workload("replica", spec={"nodeSelector": {"no": "where"}}))
        stack.callback(api.delete, paths.pods(OWN, "replica"), {"gracePeriodSeconds": 0})
        space.create_and_locate(workload("steady", gpu_mem=64, node=node))
        space.create_and_locate(workload("there", gpu_mem=64, node=other))
        space.running("steady", "there")  # else a write of the status that they have not got yet changes nothing
        space.create(workload("waiting", gpu_mem=64, spec={"nodeSelector": {"no": "where"}}))
        gang = {names.GROUP_NAME: "automatic", names.GROUP_NUM: "3"}
        gates = [{"name": "other.dev/gate"}]
        space.create(workload("gated", whole_gpu=1, annotations=gang, spec={"schedulingGates": gates}))
        api.create(paths.podgroups(space.name), of_ours("PodGroup", "own", {"minMember": 2}))
        stack.callback(api.delete, paths.podgroups(space.name, "own"))
        space.wait(lambda: automatic(space), "the gang has its PodGroup and the cards their class")
        resources = {
            card["spec"]["node"]: card["metadata"]["name"] for card in api.get(paths.extendedresources())["items"]
        }
        with acting(accounts, "deviceplugin", node) as client:
            is_refused = lambda: refused(client, paths.nodes(other), {})  # noqa: E731
            space.wait(lambda: other in is_refused(), "the policy acts")
        yield World(api, space.name, node, other, resources[node], resources[other], AUTOMATIC, "of-a-person")


@pytest.fixture(scope="module")
def clients(accounts: Cluster, world: World) -> Iterator[Mapping[str, KubeClient]]:
    """Each part as it is on the node."""
    with ExitStack() as stack:
        yield {part: stack.enter_context(acting(accounts, part, world.node)) for part in MAY}


def automatic(space: Space) -> bool:
    api = space.cluster.api
    groups = [path["metadata"]["name"] for path in api.get(paths.podgroups(space.name))["items"]]
    known = [path["metadata"]["name"] for path in api.get(paths.resourceclasses())["items"]]
    return "automatic" in groups and AUTOMATIC in known


def excess_id(excess: object) -> str:
    return excess.id if isinstance(excess, Excess) else str(excess)


def user(part: str) -> str:
    return f"system:serviceaccount:{OWN}:cardwise-{part}"


def allowed(cluster: Cluster, part: str, right: Right) -> bool:
    verb, group, resource, scope = right
    namespace, _, name = scope.partition("/")
    resource, _, sub = resource.partition("/")
    review = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": sub,
        "namespace": namespace,
        "name": name,
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{OWN}", "system:authenticated"]
    spec = {"user": user(part), "groups": groups, "resourceAttributes": review}
    return bool(cluster.api.create(REVIEWS, {"spec": spec})["status"].get("allowed"))


@contextmanager
def impersonating(cluster: Cluster, account: str) -> Iterator[KubeClient]:
    client = cluster.client("admin")
    client._headers[""]["Impersonate-User"] = account
    try:
        yield client
    finally:
        client.close()


@contextmanager
def acting(cluster: Cluster, part: str, node: str) -> Iterator[KubeClient]:
    """The part's account as the API server sees it by the token of a pod on that node ("": of none)."""
    with impersonating(cluster, user(part)) as client:
        if node:
            client._headers[""]["Impersonate-Extra-authentication.kubernetes.io%2fnode-name"] = node
        yield client


def refused(client: KubeClient, path: str, change: object) -> str:
    """What a refused change is told; "" when it is not refused."""
    try:
        client.patch(path, change)
    except errors.KubeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", RIGHTS)
def test_each_part_has_what_it_needs(accounts: Cluster, part: str) -> None:
    assert [right for right in RIGHTS[part] if not allowed(accounts, part, right)] == []


@pytest.mark.parametrize("part", RIGHTS)
def test_no_part_has_more(accounts: Cluster, part: str) -> None:
    assert [right for right in (*NOBODY, *MAY_NOT[part]) if allowed(accounts, part, right)] == []


@pytest.mark.parametrize("part", MAY)
def test_each_part_writes_the_fields_that_are_its_work(
    clients: Mapping[str, KubeClient], world: World, part: str
) -> None:
    for write in MAY[part]:
        for act in write.acts:
            act(clients[part], world)


@pytest.mark.parametrize(
    ("part", "excess"), [(part, excess_write) for part in EXCESS for excess_write in EXCESS[part]], ids=excess_id
)
def test_no_part_writes_another(clients: Mapping[str, KubeClient], world: World, part: str, excess: Excess) -> None:
    with pytest.raises(errors.KubeError) as failure:
        excess.act(clients[part], world)
    message = str(failure.value)
    assert excess.says in message or (excess.also and f"ValidatingAdmissionPolicy '{excess.also}'" in message)


def test_kubernetes_itself_says_that_the_pods_of_a_vanished_node_have_failed(accounts: Cluster, world: World) -> None:
    """Its controller; nobody else may, and without it their shares would not end."""
    with impersonating(accounts, "system:serviceaccount:kube-system:pod-garbage-collector") as client:
        client._headers[""]["Impersonate-Group"] = "system:serviceaccounts:kube-system"
        client.patch(world.pod("steady", "status"), {"status": {"phase": "Failed"}}, query=DRY)


def test_a_part_of_no_node_writes_about_none(accounts: Cluster, world: World) -> None:
    with acting(accounts, "deviceplugin", "") as client:
        assert "the token contains no node" in refused(client, paths.nodes(world.node), {})


@pytest.fixture
def teams(accounts: Cluster) -> Iterator[Space]:
    """A team with a quota, whose pod on the second of two nodes was deleted by force; the first was taken over."""
    with Space(accounts, "reports") as space:
        _, honest = space.nodes(2)
        quota = of_ours("GPUQuota", "team", {"hard": [{"memoryMiB": 1000}]})
        accounts.api.create(paths.gpuquotas(space.name), quota)
        space.create_and_locate(workload("victim", gpu_mem=64, node=honest))
        space.running("victim")
        yield space


def card_of(space: Space, node: str) -> Json:
    resources = space.cluster.api.get(paths.extendedresources())["items"]
    return next(
        resource for resource in resources if resource["spec"]["node"] == node and resource["spec"]["index"] == 0
    )


def says(cluster: Cluster, node: str, card: Json, *held: Json) -> None:
    """By the token of the device plugin that runs on the node."""
    with acting(cluster, "deviceplugin", node) as client:
        path = paths.extendedresources(card["metadata"]["name"], "status")
        client.patch(path, {"status": {"reported": list(held)}})


def test_n02_n03_a_node_says_nothing_about_others(teams: Space) -> None:
    cluster, (liar, honest) = teams.cluster, teams.own_nodes
    uid = teams.get("victim")["metadata"]["uid"]
    card_name = card_of(teams, honest)
    size = card_name["spec"]["memoryMiB"]
    share = {"podUID": uid, "namespace": teams.name, "name": "victim", "memoryMiB": 64, "container": "0"}
    stranger = share | {"podUID": "never-there", "name": "never-there", "memoryMiB": 10**9}

    def used() -> int:
        status = cluster.api.get(paths.gpuquotas(teams.name, "team")).get("status") or {}
        return sum(entry["memoryMiB"] for entry in status.get("used") or ())

    def allocated(node: str) -> int:
        return int(card_of(teams, node)["status"].get("allocated", {}).get("memoryMiB", 0))

    teams.wait(lambda: (used(), allocated(honest)) == (64, 64), "the quota counts it")
    teams.delete("victim", grace=0)
    says(cluster, honest, card_name, share)
    terminating_uids = lambda: [entry["podUID"] for entry in card_of(teams, honest)["status"].get("terminating") or ()]  # noqa: E731
    teams.wait(lambda: terminating_uids() == [uid], "the extender has noted whose it was")
    # What the liar says takes room on its card alone.
    says(cluster, liar, card_of(teams, liar), share, stranger)
    teams.wait(lambda: allocated(liar) == size, "the extender has heard the lie")
    assert used() == 64
    with pytest.raises(errors.KubeError, match="GPUQuota"):
        cluster.api.create(paths.pods(teams.name), workload("large", gpu_mem=1001))
    # It has no words for what another node reports,
    with pytest.raises(errors.KubeError, match=r"podUID.*should match"):
        says(cluster, liar, card_of(teams, liar), stranger | {"podUID": f"{honest}/{uid}"})
    # its silence ends nothing,
    says(cluster, liar, card_of(teams, liar))
    teams.wait(lambda: allocated(liar) == 0, "the extender has heard the silence")
    # The ledger too, since statuses come later.
    assert (used(), allocated(honest), inspect(cluster)[honest, 0][1], terminating_uids()) == (64, 64, 64, [uid])
    # and its word keeps nothing alive.
    says(cluster, liar, card_of(teams, liar), share)
    teams.wait(lambda: allocated(liar) == 64, "the extender has heard the lie again")
    says(cluster, honest, card_name)
    teams.wait(
        lambda: (used(), allocated(honest), terminating_uids()) == (0, 0, []), "the share has ended with its containers"
    )
    assert allocated(liar) == 64


def test_n04_invented_models_keep_no_other_waiting(accounts: Cluster) -> None:
    api, count = accounts.api, 48

    def card(node: str, index: int, model: str) -> Json:
        spec = {"node": node, "index": index, "uuid": f"GPU-{node}-{index}", "model": model, "memoryMiB": 1024}
        return of_ours("ExtendedResource", f"gpu-{node}-{index}", spec)

    def class_names() -> set[str]:
        return {path["metadata"]["name"] for path in api.get(paths.resourceclasses())["items"]} & {*invented, real}

    invented, real = [f"nvidia.invented-{i:02}" for i in range(count)], "nvidia.tesla.t4"
    with Space(accounts, "invented") as space, ExitStack() as stack:
        liar, honest = space.nodes(2)
        client = stack.enter_context(acting(accounts, "deviceplugin", liar))
        for i in range(count):
            client.create(paths.extendedresources(), card(liar, 100 + i, f"Invented-{i:02}"))
            stack.callback(client.delete, paths.extendedresources(f"gpu-{liar}-{100 + i}"))
        api.create(paths.extendedresources(), card(honest, 100, "Tesla T4"))
        stack.callback(api.delete, paths.extendedresources(f"gpu-{honest}-100"))
        # How few of one node come before it is for a unit test: tests/extender/reporting/test_classcontroller.py.
        space.wait(lambda: len(class_names()) == count + 1, "each model has its class, the other node's too")
        stack.close()
        # Classes outlive their cards, so that a type that was scaled to zero can be asked for; an admin removes them.
        for name in class_names():
            api.delete(paths.resourceclasses(name))
        space.wait(lambda: not class_names(), "an admin removes what is invented no more")


def test_n05_a_card_has_no_more_than_any_card(accounts: Cluster) -> None:
    with Space(accounts, "huge") as space:
        (liar,) = space.nodes(1)
        spec = {"node": liar, "index": 0, "uuid": f"GPU-{liar}-0", "model": "Tesla T4", "memoryMiB": MAX_MIB + 1}
        with acting(accounts, "deviceplugin", liar) as client, pytest.raises(errors.Invalid, match="memoryMiB"):
            client.create(paths.extendedresources(), of_ours("ExtendedResource", f"gpu-{liar}-0", spec))


@contextmanager
def full_annotations(api: KubeClient, node: str) -> Iterator[None]:
    """The node's annotations are at the API's limit, 256 KiB in all, so that none can be added."""
    there = api.get(paths.nodes(node))["metadata"].get("annotations") or {}
    there.pop(names.REQUEUE, None)
    filler = "x" * (256 * 1024 - sum(len(key) + len(text) for key, text in there.items()) - len("filler"))
    api.patch(paths.nodes(node), {"metadata": {"annotations": {names.REQUEUE: None, "filler": filler}}})
    try:
        yield
    finally:
        api.patch(paths.nodes(node), {"metadata": {"annotations": {"filler": None}}})


def test_n06_nodes_that_cannot_be_changed_keep_no_pod_waiting(accounts: Cluster) -> None:
    api = accounts.api
    with Space(accounts, "full") as space, ExitStack() as stack:
        *full, good = space.nodes(3)
        full += [node["metadata"]["name"] for node in api.get(paths.nodes())["items"]]
        space.put_quota({"shares": 1})
        space.create_and_locate(workload("first", gpu_mem=64))
        space.create(workload("second", gpu_mem=64))
        space.wait(lambda: "GPUQuota" in space.reasons("second"), "second waits")
        for node in dict.fromkeys(full):
            if node != good:
                stack.enter_context(full_annotations(api, node))

        def touched() -> str:
            annotations = api.get(paths.nodes(good))["metadata"].get("annotations") or {}
            return str(annotations.get(names.REQUEUE, ""))

        before = touched()
        space.put_quota({"shares": 2})
        space.wait(lambda: touched() != before, "waiting pods are woken by the node that can be changed")
        space.placed("second")


def test_n07_a_card_is_not_larger_than_cards_need(accounts: Cluster) -> None:
    def fat(spec: Json, change: Json) -> Json:
        card = of_ours("ExtendedResource", spec["uuid"].lower(), spec | change.get("spec", {}))
        return card | {"metadata": card["metadata"] | change.get("metadata", {})}

    changes: list[tuple[str, Json]] = [
        ("metadata.labels", {"metadata": {"labels": {f"x{i}": "" for i in range(65)}}}),
        ("metadata.labels", {"metadata": {"labels": {f"x{i}": "" for i in range(60_000)}}}),
        ("metadata.finalizers", {"metadata": {"finalizers": [f"a.b/x{i}" for i in range(65)]}}),
        ("metadata", {"metadata": {"annotations": {"x": "x" * 33_000}}}),
        ("spec.properties", {"spec": {"properties": {"x" * 33_000: ""}}}),
        ("spec.properties", {"spec": {"properties": {"x" * 1_300_000: ""}}}),
        ("spec.properties", {"spec": {"properties": {f"x{i}": "x" * 1024 for i in range(40)}}}),
    ]
    with Space(accounts, "fat") as space:
        (liar,) = space.nodes(1)
        there, api = card_of(space, liar), accounts.api
        path = paths.extendedresources(there["metadata"]["name"])
        spec = {"node": liar, "index": 9, "uuid": f"GPU-{liar}-9", "model": "Tesla T4", "memoryMiB": 1024}
        message = "ValidatingAdmissionPolicy 'extendedresources.cardwise.dev'"
        for field, change in changes:
            # Of metadata a device plugin may write little, so here it is an administrator.
            with pytest.raises(errors.KubeError, match=f"(?s){message}.*{field}.*at most"):
                api.create(paths.extendedresources(), fat(spec, change))
            with pytest.raises(errors.KubeError, match=f"(?s){message}.*{field}.*at most"):
                api.patch(path, change)
        share = {"podUID": "x" * 36, "namespace": "x" * 63, "name": "x" * 253, "memoryMiB": 1}
        says(accounts, liar, there, *[share] * 512)  # as many as count
        with pytest.raises(errors.KubeError, match=f"{message}.*status.reported"):
            says(accounts, liar, there, *[share] * 1024)
        says(accounts, liar, there)
