"""A tenant with `edit` in a namespace tries to get a card past Cardwise, another one, a bigger share or more than his
quota: docs/security.md has the list. On the real API server, scheduler and kubelet, with the chart's policies.
"""

import contextlib
import http.client
import json
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from itertools import count
from pathlib import Path

import msgspec
import pytest
import yaml

from cardwise.core.api import names
from cardwise.kube import errors, paths
from tests.build import P100, binding, container, pod
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE, children
from tests.integration.commands import cardwise
from tests.integration.security.attacks_on_cards import DRA, FORGED, OF_NVIDIA
from tests.integration.security.attacks_on_rules import ATTACKS_BY_AIM
from tests.integration.security.tenancy import Attack, By, Tenant, bound, told_by
from tests.integration.sharing import (
    Json,
    Space,
    assigned,
    deployment,
    device_numbers,
    flags,
    inspect,
    kill9,
    probe,
    probed,
    workload,
)
from tests.integration.since import since
from tests.runtime.http.attacking import HELLO, trickling

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node]

ATTACKS = tuple(attack for attacks in ATTACKS_BY_AIM.values() for attack in attacks)
SLOW_SELECTOR = [{"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["9E"]}]} for _ in range(256)]
EXAMPLE = Path(__file__).parents[3] / "examples" / "tenant-namespace.yaml"
NODE, OTHER = "n1", "n2"
RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
FORCED = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
STOLEN = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=99999M",
    "CARDWISE_MEM_LIMIT_MIB": "99999",
    "CARDWISE_MEM_FRACTION": "1",
    "ALIYUN_COM_GPU_MEM_IDX": "1",
    "ALIYUN_COM_GPU_MEM_CONTAINER": "99999",
}
TELL = "for n in $(env | grep -E 'ALIYUN|NVIDIA|CARDWISE|CUDA_MPS'); do echo $n >> /dev/termination-log; done;"
STUBBORN = "trap '' TERM; while :; do sleep 0.2; done"
# As PROBE, of device nodes that a volume brings.
MOUNTED = """
for n in /host/nvidia*; do
  if why=$( (exec 3<$n) 2>&1 ); then echo "opens $n"; else echo "refused $n ${why##*: }"; fi >> /dev/termination-log
done
"""


# What is refused in the guarded namespace, and by what: each judge learns of it by a watch of its own.
GUARDED = (
    (workload("probe", spec={"hostPID": True}), "PodSecurity"),
    (workload("probe", gpu_mem=64, annotations={names.ISOLATION: "none"}), "the advisory"),
    (workload("probe", gpu_mem="13Gi"), "GPUQuota"),
    (workload("probe", gpu_mem="9Gi"), "exceeded quota: cards"),
    (workload("probe", spec={"priorityClassName": "system-node-critical"}), "exceeded quota: critical"),
)


def guarding() -> list[Json]:
    """What administrators apply for each team, with a namespace's name to fill in."""
    return [manifest for manifest in yaml.safe_load_all(EXAMPLE.read_text()) if manifest]


@pytest.fixture(scope="module")
def tenant(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    """With the pods in his namespace that the attacks are about."""
    tenant = Tenant(cluster, "tenant", tmp_path_factory.mktemp("tenant"))
    for manifest in guarding():
        manifest["metadata"] |= (
            {"name": tenant.guarded.name} if manifest["kind"] == "Namespace" else {"namespace": tenant.guarded.name}
        )
        cluster.apply([manifest])
    cluster.api.create(tenant.path_of("configmaps"), {"metadata": {"name": "stolen"}, "data": STOLEN})
    create(tenant, workload("steady", gpu_mem=64, node=NODE))
    runtime = {"metadata": {"name": OF_NVIDIA}, "handler": "runc"}
    cluster.api.create(RUNTIME_CLASSES, runtime)
    create(tenant, workload("sharing", gpu_mem=64, node=NODE, spec={"runtimeClassName": OF_NVIDIA}))
    null = {"volumes": [{"name": "null", "hostPath": {"path": "/dev/null"}}]}
    create(tenant, workload("idle", node=NODE, spec=null))
    create(tenant, workload("ungated", gpu_mem=64, spec={"nodeSelector": {"nowhere": "1"}}))
    for name in ("gated", "gated-too"):
        gang = {names.GROUP_NAME: "held", names.GROUP_NUM: "3"}
        create(tenant, workload(name, whole_gpu=1, node=NODE, annotations=gang))
    tenant.space.running("steady", "sharing", "idle")
    tenant.space.wait(lambda: "held" in groups(tenant), "the gang has its PodGroup")
    for tried, says in GUARDED:
        refused = lambda tried=tried, says=says: says in tenant.guarded.rejected(tried)  # noqa: E731
        tenant.space.wait(refused, f"who guards the namespace says {says}")
    yield tenant
    for space in (tenant.space, tenant.guarded):
        space.clear()
    cluster.api.delete(f"{RUNTIME_CLASSES}/{OF_NVIDIA}")
    tenant.close()


def create(tenant: Tenant, pod: Json) -> str:
    """As the tenant; returns the UID."""
    return str(tenant.edit.create(tenant.path_of("pods"), pod)["metadata"]["uid"])


def groups(tenant: Tenant) -> list[str]:
    return [path["metadata"]["name"] for path in tenant.cluster.api.get(paths.podgroups(tenant.space.name))["items"]]


def ended(tenant: Tenant, *pods: str) -> None:
    space = tenant.space
    space.wait(lambda: all(space.phase(name) == "Succeeded" for name in pods), f"{', '.join(pods)} have looked")


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, marks=since(attack.since, "what is attacked"), id=attack.id)
        for attack in ATTACKS
        if attack.tries
    ],
)
def test_refused(tenant: Tenant, attack: Attack) -> None:
    for attempt in attack.tries:
        attempt.refused(tenant)


def test_each_attack_that_is_judged_later_has_its_judge() -> None:
    assert len({attack.id for attack in ATTACKS}) == len(ATTACKS)
    judged = {name.split("_")[1].upper() for name in globals() if re.match(r"test_t\d", name)}
    assert {attack.id for attack in ATTACKS if attack.late} == judged


def test_t04_environment_from_elsewhere_gives_a_pod_with_a_share_no_more(tenant: Tenant) -> None:
    numbers = device_numbers(tenant.cluster, NODE)
    stolen = [{"configMapRef": {"name": "stolen"}}]
    own = [{"name": "CARDWISE_MEM_LIMIT_MIB", "value": "99999"}, {"name": "ALIYUN_COM_GPU_MEM_DEV", "value": "1"}]
    script = ["sh", "-c", TELL + probe(numbers)]
    looking = container(gpu_mem=64) | {"envFrom": stolen, "env": own, "command": script}
    create(tenant, workload("stealing", [looking], node=NODE, spec={"restartPolicy": "Never"}))
    ended(tenant, "stealing")
    output = tenant.space.termination_message("stealing")
    (index,) = assigned(tenant.space.get("stealing")).indices()
    for line in (
        *probed(numbers, str(index)),
        f"ALIYUN_COM_GPU_MEM_IDX={index}",
        f"ALIYUN_COM_GPU_MEM_DEV={P100}",
        "ALIYUN_COM_GPU_MEM_CONTAINER=64",
        "NVIDIA_VISIBLE_DEVICES=void",
        "CARDWISE_MEM_LIMIT_MIB=64",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=64M",
    ):
        assert line in output, f"{line} is not in {output}"


def test_t05_environment_from_elsewhere_gives_a_pod_without_a_share_nothing(tenant: Tenant) -> None:
    numbers = device_numbers(tenant.cluster, NODE)
    looking = container() | {
        "envFrom": [{"configMapRef": {"name": "stolen"}}],
        "command": ["sh", "-c", probe(numbers)],
    }
    create(tenant, workload("wishing", [looking], node=NODE, spec={"restartPolicy": "Never"}))
    ended(tenant, "wishing")
    assert tenant.space.termination_message("wishing") == [
        f"refused {index} Operation not permitted" for index in numbers
    ]


def test_t07_an_ephemeral_container_opens_no_card(tenant: Tenant) -> None:
    numbers = device_numbers(tenant.cluster, NODE)
    debug = container("look") | {"command": ["sh", "-c", probe(numbers)], "targetContainerName": "main"}
    del debug["resources"]
    path = tenant.path_of("pods", "steady", "ephemeralcontainers")
    tenant.debugger.patch(path, {"spec": {"ephemeralContainers": [debug]}}, "strategic")

    def debug_output() -> list[str]:
        (state,) = tenant.space.get("steady")["status"].get("ephemeralContainerStatuses") or [{}]
        return str(state.get("state", {}).get("terminated", {}).get("message", "")).splitlines()

    tenant.space.wait(lambda: bool(debug_output()), "the ephemeral container has looked")
    assert debug_output() == [f"refused {index} Operation not permitted" for index in numbers]


def test_t08_a_device_node_of_its_own_opens_no_other_card(tenant: Tenant) -> None:
    numbers = device_numbers(tenant.cluster, NODE)
    tenant.space.inside("steady", probe(numbers))
    (index,) = assigned(tenant.space.get("steady")).indices()
    assert tenant.space.inside("steady", "cat /dev/termination-log").splitlines() == probed(numbers, str(index))


def test_t11_mounted_device_nodes_cannot_be_opened(tenant: Tenant) -> None:
    devices = tenant.cluster.node(NODE).folder / "dev"
    looking = container() | {
        "volumeMounts": [{"name": "host", "mountPath": "/host"}],
        "command": ["sh", "-c", MOUNTED],
    }
    volumes = [{"name": "host", "hostPath": {"path": str(devices)}}]
    create(tenant, workload("mounting", [looking], node=NODE, spec={"restartPolicy": "Never", "volumes": volumes}))
    ended(tenant, "mounting")
    assert tenant.space.termination_message("mounting") == [
        f"refused /host/nvidia{i} Operation not permitted" for i in (0, 1)
    ]


@since(34, "resource.k8s.io/v1")
def test_t16_a_claim_of_a_device_gets_no_card(tenant: Tenant) -> None:
    request = {"name": "card", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    claim = {"metadata": {"name": "card"}, "spec": {"devices": {"requests": [request]}}}
    tenant.edit.create(tenant.path_of("resourceclaims", base=DRA), claim)
    claims = [{"name": "card", "resourceClaimName": "card"}]
    looking = container() | {"resources": {"claims": [{"name": "card"}]}}
    create(tenant, workload("claiming", [looking], spec={"resourceClaims": claims}))
    tenant.space.wait(lambda: "gpu.nvidia.com" in condition(tenant, "claiming"), "the scheduler has nothing to give")
    assert not tenant.space.get("claiming")["spec"].get("nodeName")


def condition(tenant: Tenant, pod: str) -> str:
    """What the scheduler says of a pod that waits."""
    conditions = tenant.space.get(pod)["status"].get("conditions") or ()
    return " ".join(entry.get("message", "") for entry in conditions if entry["type"] == "PodScheduled")


def test_t18_a_forged_assignment_is_taken_out(tenant: Tenant) -> None:
    victim = json.dumps({"v": 1, "containers": {"0": [[1, "GPU-x", P100, 0, P100]]}})
    limits = {names.GPU_MEM: "64", names.SHARE: "7", names.FILTER_CALL_RESOURCE: "5", names.BIND_CALL_RESOURCE: "5"}
    asking = container() | {"resources": {"limits": limits}}
    create(tenant, workload("forged", [asking], node=NODE, annotations=FORGED | {names.ASSIGNMENT: victim}))
    tenant.space.running("forged")
    pod = tenant.space.get("forged")
    (share,) = assigned(pod).shares()
    assert (share.mem, share.whole, pod["metadata"]["annotations"][names.POD_MEM]) == (64, False, "64")
    assert share.uuid != "GPU-x"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {names.GPU_MEM: "64", names.SHARE: "1"}


@since(33, "the subresource resize")
def test_t20_other_subresources_take_no_annotations(tenant: Tenant) -> None:
    annotations = lambda: tenant.space.get("steady")["metadata"]["annotations"]  # noqa: E731
    tenant.space.marked("steady")
    before = annotations()
    other = {names.IDX: "7", names.ASSIGNMENT: "{}"}
    for sub in ("resize", "ephemeralcontainers"):
        tenant.debugger.patch(tenant.path_of("pods", "steady", sub), {"metadata": {"annotations": other}})
        assert annotations() == before


def test_t21_a_container_cannot_name_the_cards_of_another(tenant: Tenant) -> None:
    reference = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.DEVICES_OF}1']"}}
    spy = container("one", gpu_mem=64) | {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": reference}]}
    pod = workload("pair", [spy, container("two", whole_gpu=1)])
    stored = tenant.edit.create(tenant.path_of("pods"), pod, query={"dryRun": "All"})
    (entry,) = [e for e in stored["spec"]["containers"][0]["env"] if e["name"] == "NVIDIA_VISIBLE_DEVICES"]
    assert entry["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{names.DEVICES_OF}0']"


def test_t77_limits_of_the_driver_are_taken_out_beside_a_share(tenant: Tenant) -> None:
    """What comes by `envFrom` the node replaces (tests/deviceplugin/mps)."""
    raised = [{"name": f"NVIDIA_GPU_MEMORY_{end}", "value": "16276"} for end in ("REQUEST", "LIMIT")]
    beside = [container("main", gpu_mem=64) | {"env": raised}, container("beside") | {"env": raised}]
    pod = workload("raising", beside, init=[container("early") | {"env": raised}])
    spec = tenant.edit.create(tenant.path_of("pods"), pod, query={"dryRun": "All"})["spec"]
    for attack in (*spec["initContainers"], *spec["containers"]):
        assert not [entry for entry in attack["env"] if entry["name"].startswith("NVIDIA_GPU_MEMORY_")], attack["name"]


def test_t30_a_forced_deletion_frees_nothing_early(tenant: Tenant) -> None:
    space = tenant.space
    stubborn = [container(whole_gpu=2) | {"command": ["sh", "-c", STUBBORN]}]
    first = create(tenant, workload("twin", stubborn, node=OTHER, grace=30))
    space.running("twin")
    tenant.edit.delete(tenant.path_of("pods", "twin"), FORCED)
    second = create(tenant, workload("twin", whole_gpu=2, node=OTHER))
    space.running("twin")
    log = tenant.cluster.process(f"deviceplugin-{OTHER}").log.read_text().splitlines()
    document = [json.loads(line) for line in log if '"uid":"' in line]
    events = [(attack["event"], attack["uid"]) for attack in document if attack["event"] in ("granted", "freed")]
    assert events.index(("freed", first)) < events.index(("granted", second))
    space.delete("twin")


def test_t35_a_gang_that_is_not_whole_holds_nothing(tenant: Tenant) -> None:
    with Space(tenant.cluster, "neighbour") as neighbour:
        neighbour.create(workload("whole", whole_gpu=1, node=NODE))
        neighbour.running("whole")
        assert all("gated" not in pod for _, _, pods in inspect(tenant.cluster).values() for pod in pods)
        assert not tenant.space.get("gated")["spec"].get("nodeName")


def test_t64_no_gang_keeps_those_of_others_from_being_planned(tenant: Tenant) -> None:
    def gang(name: str, pods: list[Json]) -> None:
        annotations = {names.GROUP_NAME: name, names.GROUP_NUM: str(len(pods)), names.QUEUE_PRIORITY: "999999999"}
        for member in pods:
            member["metadata"]["annotations"] |= annotations
            create(tenant, member)

    gang("motley", [workload(f"motley-{i}", gpu_mem=64 + i) for i in range(17)])
    never = {"schedulingGates": [{"name": "tenant.example/never"}]}
    gang("barred", [workload(f"barred-{i}", gpu_mem=64, spec=never if i else None) for i in range(3)])
    with Space(tenant.cluster, "neighbour") as neighbour:
        for i in range(2):
            annotations = {names.GROUP_NAME: "fair", names.GROUP_NUM: "2"}
            neighbour.create(workload(f"fair-{i}", gpu_mem=64, node=NODE, annotations=annotations))
        neighbour.running("fair-0", "fair-1")

    def podgroups_text() -> str:
        return json.dumps(tenant.cluster.api.get(paths.podgroups(tenant.space.name)))

    tenant.space.wait(lambda: "17 different requests" in podgroups_text(), "the one says why")
    tenant.space.wait(lambda: "scheduling gate tenant.example/never" in podgroups_text(), "the other, too")
    held = [pod for _, _, pods in inspect(tenant.cluster).values() for pod in pods]
    assert not [pod for pod in held if "motley" in pod or "barred" in pod]


def test_t75_a_gang_that_waits_long_keeps_no_more_of_a_card_than_its_pods_ask_for(tenant: Tenant) -> None:
    with waiting_long(tenant, [workload(f"few-{i}", gpu_mem=1, node=NODE) for i in range(3)]) as neighbour:
        takes_all_but(neighbour, 3)


def test_t76_a_gang_that_waits_for_cpu_keeps_no_card(tenant: Tenant) -> None:
    cpu = tenant.cluster.api.get(paths.nodes(NODE))["status"]["capacity"]["cpu"]
    per_member = f"{int(cpu) * 400}m"  # two of three fit

    def busy(name: str) -> Json:
        pod = workload(name, gpu_mem=64, node=NODE)
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": per_member}
        return pod

    create(tenant, busy("busy"))
    tenant.space.running("busy")
    try:
        with waiting_long(tenant, [busy(f"few-{i}") for i in range(2)]) as neighbour:
            takes_all_but(neighbour, 0)
    finally:
        tenant.space.delete("busy")


@contextlib.contextmanager
def waiting_long(tenant: Tenant, members: list[Json]) -> Iterator[Space]:
    """A gang of these members, and two that have to wait for a neighbour's card, has cards reserved. Yields the
    neighbour's namespace.
    """
    members = [*members, *(workload(f"many-{i}", gpu_mem=P100, node=OTHER) for i in range(2))]
    annotations = {names.GROUP_NAME: "long", names.GROUP_NUM: str(len(members)), names.QUEUE_PRIORITY: "999999999"}
    with Space(tenant.cluster, "neighbour") as neighbour, flags(tenant.cluster, "extender", "--gang-reserve-seconds=0"):
        neighbour.create(workload("there", gpu_mem=P100, node=OTHER))
        neighbour.running("there")
        try:
            for member in members:
                member["metadata"]["annotations"] |= annotations
                create(tenant, member)
            tenant.space.wait(lambda: "does not fit as a whole" in tenant.space.reasons("few-0"), "the gang waits")
            late = (f"late-{i}" for i in count())
            tenant.space.wait(lambda: is_reserved(neighbour, next(late)), "what the neighbour leaves there is reserved")
            yield neighbour
        finally:
            tenant.space.delete(*(member["metadata"]["name"] for member in members))


def is_reserved(neighbour: Space, name: str) -> bool:
    """Whether a pod of this name on OTHER is refused, because all that is free there is reserved."""
    neighbour.create(workload(name, gpu_mem=64, node=OTHER))
    because: list[bool] = []

    def tried() -> bool:
        pod = neighbour.get(name)
        messages = [condition.get("message", "") for condition in pod["status"].get("conditions") or ()]
        because[:] = [any("reserved for a gang" in text for text in messages)]
        return because[0] or bool(pod["spec"].get("nodeName"))

    neighbour.wait(tried, f"{name} has a node, or is refused because of a gang")
    if not because[0]:
        neighbour.delete(name)
        neighbour.wait_for_deletion(name)
    return because[0]


def takes_all_but(neighbour: Space, mib: int) -> None:
    """All that the cards of NODE have, but for so many MiB on each, is given to pods that come after the gang."""
    cards = [(total, used) for (node, _), (total, used, _) in inspect(neighbour.cluster).items() if node == NODE]
    rest = [total - used - mib for total, used in cards]
    for i, mem in enumerate(sorted(rest, reverse=True)):
        neighbour.create(workload(f"rest-{i}", gpu_mem=mem, node=NODE))
        neighbour.running(f"rest-{i}")


def test_t37_the_extender_answers_kube_scheduler_alone(tenant: Tenant) -> None:
    parts = tenant.cluster.parts
    assert inspect(tenant.cluster), "with the certificate it answers"
    context = ssl.create_default_context(cafile=str(parts.tls_dir / "ca.crt"))
    body = json.dumps({"PodName": "steady", "PodNamespace": tenant.space.name, "PodUID": "x", "Node": NODE})
    for part, verb in (("extender", "filter"), ("extender", "inspect"), ("extender-bind", "bind")):
        request = urllib.request.Request(f"{parts.url(part)}{names.EXTENDER_PREFIX}/{verb}", body.encode())
        with pytest.raises((urllib.error.URLError, OSError)) as refused:
            urllib.request.urlopen(request, context=context, timeout=PATIENCE)
        assert not isinstance(refused.value, urllib.error.HTTPError), "it was let in"


def test_t65_what_is_bound_past_the_webhook_does_not_stay(tenant: Tenant) -> None:
    budgets = tenant.path_of("poddisruptionbudgets", base="/apis/policy/v1")
    budget = {"metadata": {"name": "mine"}, "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "mine"}}}}
    tenant.edit.create(budgets, budget)
    containers = [container("beside"), container("main", gpu_mem=P100 // 2)]
    pod = workload("past", containers, grace=300, spec={"schedulerName": "nobody"})
    pod["metadata"]["labels"] = {"app": "mine"}
    create(tenant, pod)
    webhook = tenant.cluster.process("webhook")
    kill9(webhook)
    try:
        bound(tenant, "past", as_debugger=True)
    finally:
        webhook.restart()
        tenant.cluster.parts.wait_ready("webhook")
    tenant.space.wait_for_deletion("past")
    query = {"fieldSelector": "reason=BoundWithoutExtender"}
    tenant.space.wait(
        lambda: [
            event["involvedObject"]["name"]
            for event in tenant.cluster.api.get(paths.events(tenant.space.name), query)["items"]
        ] == ["past"],
        "an event says why",
    )  # fmt: skip
    explained = cardwise(tenant.cluster, "explain", "past", "-n", tenant.space.name)
    assert explained.returncode == 0, explained.stderr
    assert f"pod {tenant.space.name}/past no longer exists. Its last events:\n" in explained.stdout
    assert " BoundWithoutExtender: deleted: " in explained.stdout
    assert "It got no GPU, because something other than Cardwise's extender had bound it. " in explained.stdout
    tenant.edit.delete(f"{budgets}/mine")


def test_t39_templates_get_no_further_than_pods(tenant: Tenant) -> None:
    workload = deployment(
        "many", 1, containers=[container() | {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]
    )
    tenant.edit.create(tenant.path_of("deployments", base="/apis/apps/v1"), workload)
    events = {"fieldSelector": "reason=FailedCreate"}

    def events_text() -> str:
        return json.dumps(tenant.cluster.api.get(paths.events(tenant.space.name), events)["items"])

    tenant.space.wait(lambda: told_by(By.ENVIRONMENT) in events_text(), "the ReplicaSet says why it makes no pods")
    assert "spec.containers[main].env" in events_text()
    assert not [pod for pod in tenant.space.pods() if pod["metadata"]["name"].startswith("many")]
    tenant.edit.delete(tenant.path_of("deployments", "many", base="/apis/apps/v1"))


def test_t58_containers_beside_a_share_tell_the_runtime_that_they_want_no_card(tenant: Tenant) -> None:
    stolen = {"envFrom": [{"configMapRef": {"name": "stolen"}}]}
    init = [container("early") | stolen, container("sidecar") | stolen | {"restartPolicy": "Always"}]
    pod = workload("beside", [container(gpu_mem=64), container("other") | stolen], init=init)
    spec = tenant.edit.create(tenant.path_of("pods"), pod, query={"dryRun": "All"})["spec"]
    beside = [entry for entry in (*spec["initContainers"], *spec["containers"]) if entry["name"] != "main"]
    assert {entry["name"] for entry in beside} >= {"early", "sidecar", "other"}
    for entry in beside:
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in entry["env"]


def test_t54_the_webhook_tells_strangers_nothing_of_quotas(tenant: Tenant) -> None:
    cluster, guarded = tenant.cluster, paths.pods(tenant.guarded.name)
    large = cluster.api.create(
        paths.pods(tenant.space.name), workload("large", gpu_mem="13Gi"), query={"dryRun": "All"}
    )
    review = review_of(tenant.guarded.name, large)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def stranger() -> str:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{cluster.parts.url('webhook')}/validate", review, headers)
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE) as answer:
            return str(json.load(answer)["response"]["status"]["message"])

    response = stranger()
    assert response.startswith("GPUQuota: ")
    assert "12288" not in response
    with flags(cluster, "webhook", f"--client-ca={cluster.control_plane.webhook_callers}"):
        with pytest.raises((urllib.error.URLError, OSError)) as refused:
            stranger()
        assert not isinstance(refused.value, urllib.error.HTTPError), "it was let in"
        with pytest.raises(errors.KubeError, match="used 0, hard 12288"):
            tenant.edit.create(guarded, workload("large", gpu_mem="13Gi"))


def test_t56_connections_that_say_nothing_keep_nobody_from_an_answer(tenant: Tenant) -> None:
    ports = tenant.cluster.parts.ports
    with contextlib.ExitStack() as attacks:
        for part in ("extender", "extender-bind", "webhook"):
            attacks.enter_context(trickling(ports[part], 100, b"", HELLO[:1], HELLO))
        create(tenant, workload("undisturbed", gpu_mem=64, node=NODE))
        tenant.space.running("undisturbed")
        assert inspect(tenant.cluster)


def test_t70_of_a_head_no_more_than_a_hundred_lines_are_read(tenant: Tenant) -> None:
    for line in (b"X:\r\n", b"X_Y:\r\n"):
        (connection,) = webhook_lines(tenant.cluster, 1)
        with contextlib.closing(connection):
            connection.sock.sendall(b"POST /mutate HTTP/1.1\r\nHost: x\r\n" + line * 5_000)
            assert connection.sock.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_t67_no_name_in_a_review_is_another_url_of_the_api_server(tenant: Tenant) -> None:
    """From sixteen addresses, since the webhook serves addresses in turns. What is sent where is for unit tests:
    tests/webhook/server/test_names.py.
    """
    cluster = tenant.cluster
    for number in range(20):  # of what a list of all pods would fill the webhook with
        notes = {"notes": "x" * 100_000}
        create(tenant, workload(f"fat{number}", gpu_mem=64, annotations=notes, spec={"nodeSelector": {"nowhere": "1"}}))
    before = resident_mib(cluster, "webhook")
    with asked_about(tenant, "?watch=true&x=", "/pods?limit=0&x=", "a/../b", addresses=16) as answers:
        fair = [f"fair{number}" for number in range(4)]
        for name in fair:
            create(tenant, workload(name, gpu_mem=64, node=NODE))
        tenant.space.running(*fair)
    assert answers
    wrong = [
        response
        for response in answers
        if b'"allowed":false' not in response or b"is not a name in Kubernetes" not in response
    ]
    assert not wrong, wrong[0]
    assert resident_mib(cluster, "webhook") - before < 64
    tenant.space.delete(*fair, *(f"fat{number}" for number in range(20)))


@contextlib.contextmanager
def asked_about(tenant: Tenant, *texts: str, addresses: int) -> Iterator[list[bytes]]:
    """From so many addresses of this machine, one after the other, reviews of a Binding that names each text, as its
    namespace or as its pod, and of a pod of a gang in such a namespace. Yields the answers so far.
    """
    cluster, gang = tenant.cluster, {names.GROUP_NAME: "asked", names.GROUP_NUM: "2"}
    pod = workload("asked", gpu_mem=64, annotations=gang)
    admitted = tenant.edit.create(tenant.path_of("pods"), pod, query={"dryRun": "All"})
    bodies = list[tuple[str, bytes]]()
    for text in texts:
        bodies.append(("/validate", review_of(text, admitted)))
        for namespace, name in ((text, "p"), ("default", text)):
            review = json.loads(review_of(namespace, binding(node=NODE)))
            review["request"] |= {"subResource": "binding", "name": name}
            bodies.append(("/validate/bindings", json.dumps(review).encode()))
    answers, over = list[bytes](), threading.Event()

    def send_until_over(line: http.client.HTTPSConnection) -> None:
        while not over.wait(0.02):  # what it costs the attacker is next to nothing
            for path, body in bodies:
                line.request("POST", path, body, {"Content-Type": "application/json"})
                answers.append(line.getresponse().read())

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(addresses) as pool:
        lines = [
            stack.enter_context(contextlib.closing(line))
            for number in range(addresses)
            for line in webhook_lines(cluster, 1, f"127.0.1.{number + 1}")
        ]
        loops = [pool.submit(send_until_over, line) for line in lines]
        try:
            yield answers
        finally:
            over.set()
        for loop in loops:
            loop.result()


def resident_mib(cluster: Cluster, part: str) -> float:
    """Memory of the part's processes."""
    main = cluster.process(part).pid
    sizes = [Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0] for pid in (main, *children(main))]
    return sum(map(int, sizes)) / 1024


def test_t79_what_takes_long_to_judge_is_not_judged_to_its_end(tenant: Tenant) -> None:
    """With many cards, classes and other resources each took from 5 s to more than a minute: the unit tests say of what
    (test_growth.py and test_resourceclasses.py of tests/webhook).
    """
    foreign = {f"vendor{i}.example/gpu-accelerator-{i}": "0" for i in range(8)}
    spec = {"containers": [{"name": "c", "resources": {"limits": dict.fromkeys(foreign, "1")}}]}
    (line,) = webhook_lines(tenant.cluster, 1)
    with contextlib.closing(line):
        for path, resource, reviewed in (
            ("/advise", "limitranges", {"limits": [{"max": foreign, "default": foreign}] * 400}),
            ("/advise", "pytorchjobs", {f"replica{i}": {"spec": spec} for i in range(1000)}),
            ("/validate", "resourceclasses", {"selector": SLOW_SELECTOR}),
        ):
            began = time.monotonic()
            line.request("POST", path, review_of_other(resource, reviewed), {"Content-Type": "application/json"})
            assert b'"allowed":true' in line.getresponse().read()
            assert time.monotonic() - began < 5, "the API server's limit for a pod that waits meanwhile"


def test_t80_reviews_at_a_path_of_others_are_not_read(tenant: Tenant) -> None:
    """How many threads an address may have is for unit tests: tests/runtime/http/test_threads.py."""
    review = review_of_other("resourceclasses", {"selector": SLOW_SELECTOR})
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(contextlib.closing(line)) for line in webhook_lines(tenant.cluster, 8)]
        for line in lines:
            line.request("POST", "/validate/bindings", review, {"Content-Type": "application/json"})
        assert {line.getresponse().status for line in lines} == {HTTPStatus.BAD_REQUEST}
    create(tenant, workload("prompt", gpu_mem=64, node=NODE))
    tenant.space.running("prompt")
    tenant.space.delete("prompt")


def review_of_other(resource: str, spec: Json) -> bytes:
    """Of an object that is no pod."""
    review = json.loads(review_of("default", {"metadata": {"name": "slow"}, "spec": spec}))
    review["request"]["resource"]["resource"] = resource
    return json.dumps(review).encode()


def test_t62_many_reviews_of_one_tenant_keep_no_other_from_an_answer(tenant: Tenant) -> None:
    """Asked by hand, by connections that stand already, as the API server's do: how much that takes at a time is its
    own matter. How few are answered before it is for a unit test, tests/runtime/http/test_httpserver.py: here each
    side is late as the machine will have it.
    """
    print(f"{answered_before(tenant.cluster, 60)} were answered before the other")


def test_t62_more_reviews_of_one_tenant_than_may_wait_keep_no_other_from_an_answer(tenant: Tenant) -> None:
    """All from one address, as the API server's are."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(contextlib.closing(line)) for line in webhook_lines(tenant.cluster, 401)]
        for line in lines[1:]:
            line.request("POST", "/mutate", large_review_of("many"), {"Content-Type": "application/json"})
        body = review_of("one", pod("small", gpu_mem=64))
        lines[0].request("POST", "/mutate", body, {"Content-Type": "application/json"})
        assert b'"allowed":true' in lines[0].getresponse().read()
        refused = sum(line.getresponse().status == HTTPStatus.SERVICE_UNAVAILABLE for line in lines[1:])
    print(f"{refused} of the others were refused")


def answered_before(cluster: Cluster, count: int) -> int:
    """So many connections ask for large reviews of one namespace until a small one of another has its answer. How many
    of the large were answered before it.
    """
    reviews = {"many": large_review_of("many"), "one": review_of("one", pod("small", gpu_mem=64))}
    answered: list[str] = []
    first, over = threading.Event(), threading.Event()

    def send_review(line: http.client.HTTPSConnection, namespace: str) -> None:
        line.request("POST", "/mutate", reviews[namespace], {"Content-Type": "application/json"})
        # Not decoded: sixty threads at that would keep the one from being sent, and its answer from being seen.
        answer = line.getresponse().read()
        # Sixty large reviews at a time may take longer than a review may. The small one of another tenant never does.
        assert b'"allowed":true' in answer or (namespace == "many" and b"did not finish this review" in answer)
        answered.append(namespace)
        first.set()

    def send_until_over(line: http.client.HTTPSConnection) -> None:
        while not over.is_set():
            send_review(line, "many")

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        lines = [stack.enter_context(contextlib.closing(line)) for line in webhook_lines(cluster, count + 1)]
        futures = [pool.submit(send_until_over, line) for line in lines[1:]]
        try:
            assert first.wait(PATIENCE), "the first of many is answered"
            send_review(lines[0], "one")
        finally:
            over.set()
        for future in futures:
            future.result()
    return answered.index("one")


def webhook_lines(cluster: Cluster, count: int, address: str = "") -> list[http.client.HTTPSConnection]:
    """Quickly: the webhook closes those that say nothing for some seconds. `address`: of our end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # a default one reads the machine's authorities
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host = cluster.parts.url("webhook").removeprefix("https://")
    source = (address, 0) if address else None
    options = {"context": context, "timeout": PATIENCE, "source_address": source}
    lines = [http.client.HTTPSConnection(host, **options) for _ in range(count)]
    for line in lines:
        line.connect()
    return lines


def large_review_of(namespace: str) -> bytes:
    env = [{"name": f"E{i}", "value": "x"} for i in range(15)]
    containers = [container(f"c{i}", gpu_mem=1) | {"env": env} for i in range(120)]
    return review_of(namespace, pod("large", containers=containers))


def review_of(namespace: str, manifest: Json) -> bytes:
    """Of a pod that is created."""
    request = {
        "uid": "1",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": namespace,
        "object": manifest,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def test_t59_a_pod_that_is_nested_too_deep_keeps_nobody_from_cards(tenant: Tenant) -> None:
    levels = 1500
    fields = msgspec.Raw(b'{"f:a":' * levels + b"{}" + b"}" * levels)
    entry = {"manager": "m", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": fields}
    create(tenant, workload("deep", gpu_mem=64, spec={"nodeSelector": {"nowhere": "1"}}))
    change = {"metadata": {"managedFields": [entry]}}
    tenant.edit.patch(tenant.path_of("pods", "deep"), change)
    listed = tenant.cluster.api.request("GET", tenant.path_of("pods"))
    assert b'{"f:a":' * levels in listed, "the API server takes it"
    with flags(tenant.cluster, "extender"):  # starts it anew: it lists
        create(tenant, workload("others", gpu_mem=64, node=NODE))
        tenant.space.running("others")
    tenant.edit.patch(tenant.path_of("pods", "deep"), change)
    create(tenant, workload("later", gpu_mem=64, node=NODE))
    tenant.space.running("later")
    tenant.space.delete("deep", "others", "later")
