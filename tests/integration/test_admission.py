"""Admission on the real kube-apiserver: the chart and the webhook process."""

import base64
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.assignment import Assignment, encode
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.tls import certs, filesets
from tests import build
from tests.cluster import Cluster, binaries, processes, versions
from tests.cluster.parts import CHART, GIVEN
from tests.cluster.processes import wait_for

pytestmark = [pytest.mark.cluster("sim"), pytest.mark.timeout(180)]

EXTENDER = "system:serviceaccount:cardwise-system:cardwise-extender"
PLUGIN = "system:serviceaccount:cardwise-system:cardwise-deviceplugin"
ASSIGNED = encode(Assignment({"0": build.shares(8138, 1)}), assume_time_ns=1)


class Api:
    """What people say to the API server with the admin's rights, the warnings that they see, and the webhook's process.
    The words are kubectl's; where it is not about kubectl itself, it is not started (tests/cluster/verbs.py).
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.webhook = cluster.process("webhook")
        self.run = cluster.verbs.run

    def kubectl(self, *args: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        environment = os.environ | self.cluster.environment()
        return subprocess.run(
            ["kubectl", *args], input=text, capture_output=True, text=True, check=False, env=environment
        )

    def ok(self, *args: str, stdin: Any = None) -> str:
        done = self.run(*args, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *args: str, stdin: Any = None) -> str:
        """Stderr of a call that must be refused."""
        done = self.run(*args, stdin=stdin)
        assert done.returncode != 0, f"was not refused: {done.stdout}"
        return done.stderr

    def create(self, obj: dict[str, Any], *flags: str) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.ok("create", "-o", "json", "-f", "-", *flags, stdin=obj))
        return made

    def get(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ok("get", "-o", "json", *args))
        return found

    def bind(
        self, pod: str, *, user: str = "", annotations: dict[str, str] | None = None, legacy: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """A Binding to n1, by the admin or as `user`; `legacy` by the old resource `bindings`."""
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod, "annotations": annotations or {}},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
        }
        path = "/api/v1/namespaces/default/" + ("bindings" if legacy else f"pods/{pod}/binding")
        impersonated = [f"--as={user}"] if user else []
        return self.run("create", "--raw", path, "-f", "-", *impersonated, stdin=binding)

    def running(self, name: str) -> dict[str, Any]:
        """A pod that the extender has bound to card 1 of n1."""
        self.create(build.pod(name, gpu_mem=8138))
        assert self.bind(name, user=EXTENDER, annotations=ASSIGNED).returncode == 0
        return self.get("pod", name)


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Api]:
    """Without nodes, so that no pod is placed before a test binds it; the cards of n1 are known."""
    with cards_without_node(cluster) as api:
        _wait_for_policies(api)
        yield api


@contextmanager
def cards_without_node(cluster: Cluster) -> Iterator[Api]:
    """The webhook knows two cards of n1, a node that is not there. Nothing stays in the namespace `default`."""
    client, api = cluster.api, Api(cluster)
    for index in range(2):
        client.create(paths.extendedresources(), _card("n1", index))
    cluster.wait(functools.partial(_denies, api, build.pod("probe", gpu_count=3)), "the webhook knows the cards")
    try:
        yield api
    finally:
        client.delete(paths.pods("default"), {"gracePeriodSeconds": 0})
        for index in range(2):
            client.delete(paths.extendedresources(_card("n1", index)["metadata"]["name"]))


def _card(node: str, index: int) -> dict[str, Any]:
    uuid = f"GPU-{node}-{index}"
    spec = {"node": node, "index": index, "uuid": uuid, "model": "Tesla P100", "memoryMiB": build.P100}
    metadata = {"name": names.extended_resource_name(uuid), "labels": {names.NODE_LABEL: node}}
    return {"apiVersion": names.API_VERSION, "kind": "ExtendedResource", "metadata": metadata, "spec": spec}


def _wait_for_policies(api: Api) -> None:
    """The API server reads policies and CA bundles by watches; the last of them to act is known by its refusal."""
    probes = [
        build.pod("probe", annotations={names.IDX: "0"}),
        _with_env(build.pod("probe"), {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}),
        _with_volume(build.pod("probe"), "/dev/nvidia0"),
        _with_node(build.pod("probe", gpu_mem=1)),
    ]
    for probe in probes:
        refused = functools.partial(_denies, api, probe)
        assert wait_for(refused, 60), api.run("create", "--dry-run=server", "-f", "-", stdin=probe)


def _denies(api: Api, pod: dict[str, Any]) -> bool:
    return "denied" in api.run("create", "--dry-run=server", "-f", "-", stdin=pod).stderr


def _with_env(pod: dict[str, Any], *entries: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["containers"][0]["env"] = list(entries)
    return pod


def _with_volume(pod: dict[str, Any], path: str) -> dict[str, Any]:
    pod["spec"]["volumes"] = [{"name": "v", "hostPath": {"path": path}}]
    return pod


def _with_node(pod: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["nodeName"] = "n1"
    return pod


def _requests(pod: dict[str, Any], **amounts: str) -> dict[str, Any]:
    pod["spec"]["containers"][0]["resources"]["requests"] = {names.GPU_MEM: amounts["gpu_mem"]}
    return pod


FIELD = f"spec.containers[0].resources.limits[{names.GPU_MEM}]"


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        pytest.param(build.pod(gpu_mem="-1"), [FIELD, "-1"], id="negative"),
        pytest.param(build.pod(gpu_mem="lots"), ["quantities must match"], id="unparsable"),
        pytest.param(
            _requests(build.pod(gpu_mem=2), gpu_mem="1"),
            ["differs from the limit", "limits only"],
            id="request below limit",
        ),
        pytest.param(
            build.pod(gpu_mem=20000),
            [FIELD, "more than the largest card has (16276)", "ask for at most 16276Mi", names.GPU_COUNT],
            id="above the largest card",
        ),
        pytest.param(build.pod(gpu_count=3), ["3 cards are more than any node has (2)"], id="more cards than a node"),
        pytest.param(_with_node(build.pod(gpu_mem=1)), ["spec.nodeName", "nodeAffinity"], id="nodeName"),
        pytest.param(
            build.pod(gpu_mem=1, annotations={names.POLICY: "best"}),
            [names.POLICY, "binpack, fgd, priced, spread"],
            id="policy",
        ),
        pytest.param(
            build.pod(gpu_mem=1, share=1) | {"metadata": {"name": "x", "annotations": {names.GPU_COUNTS: "main=x"}}},
            [names.GPU_COUNTS],
            id="forged split count",
        ),
        pytest.param(
            _with_env(build.pod(), {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}),
            ["spec.containers[main].env", "NVIDIA_VISIBLE_DEVICES", names.GPU_MEM],
            id="cards by environment",
        ),
        pytest.param(
            _with_env(build.pod(), {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}),
            ["CUDA_MPS_*"],
            id="MPS by environment",
        ),
        pytest.param(
            _with_env(
                build.pod(),
                json.loads(
                    '{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": '
                    '{"fieldPath": "metadata.annotations[\'cardwise.dev/devices.0\']"}}}'
                ),
            ),
            ["NVIDIA_VISIBLE_DEVICES"],
            id="cards by reference without a share",
        ),
        pytest.param(
            _with_volume(build.pod(), "/dev/nvidia0"), ["spec.volumes[v].hostPath.path", names.GPU_MEM], id="hostPath"
        ),
        pytest.param(_with_volume(build.pod(), "//dev/./nvidiactl"), ["hostPath"], id="hostPath in disguise"),
        pytest.param(_with_volume(build.pod(), "/var/run/cdi"), ["hostPath"], id="hostPath of CDI"),
        *(
            pytest.param(
                _with_volume(build.pod(gpu_mem=1), path),
                ["spec.volumes[v].hostPath.path", path, "mount only what the pod needs below it"],
                id=f"hostPath {path} of a GPU pod",
            )
            for path in ("/", "/dev", "//dev/.", "/run", "/var/lib/", "/etc", "/proc/driver")
        ),
        pytest.param(build.pod(annotations={names.IDX: "0"}), [names.IDX, "leave it out"], id="our annotation, no GPU"),
        pytest.param(
            build.pod(annotations={names.ASSIGNMENT: "{}"}), [names.ASSIGNMENT, "leave it out"], id="assignment, no GPU"
        ),
    ],
)
def test_bad_pods_are_refused_with_what_to_write_instead(api: Api, pod: dict[str, Any], says: list[str]) -> None:
    pod["metadata"]["name"] = "bad"
    error = api.refused("create", "-f", "-", stdin=pod)
    assert all(text in error for text in says), error
    assert "Traceback" not in error
    assert api.run("get", "pod", "bad").returncode != 0, "left behind"


@pytest.mark.parametrize(
    ("pod", "path"),
    [(build.pod(), "/dev"), (build.pod(), "/"), (build.pod(gpu_mem=1), "/dev/shm"), (build.pod(gpu_mem=1), "/data")],
)
def test_host_paths_beside_cards_may_be_mounted(api: Api, pod: dict[str, Any], path: str) -> None:
    api.create(_with_volume(pod, path), "--dry-run=server")


@pytest.mark.parametrize(
    ("amount", "mib"),
    [("8Gi", 8192), ("8k", 8000), ("1e3", 1000)],  # the API server spells the last two in its own way
)
def test_amounts_become_mib(api: Api, amount: str, mib: int) -> None:
    pod = api.create(build.pod("amount", gpu_mem=amount), "--dry-run=server")
    asked = request.parse_mutated(pod)
    assert asked is not None
    assert asked.mem == mib
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"][names.SHARE] == resources["requests"][names.SHARE] == "1"
    assert resources["limits"][names.GPU_MEM] == resources["requests"][names.GPU_MEM]


def test_counts_move_to_where_no_node_capacity_is_used_up(api: Api) -> None:
    split = api.create(build.pod("split", gpu_mem="16Gi", gpu_count=2), "--dry-run=server")
    assert split["metadata"]["annotations"][names.GPU_COUNTS] == "main=2"
    assert names.GPU_COUNT not in split["spec"]["containers"][0]["resources"]["requests"]
    whole = api.create(build.pod("whole", gpu_count=2), "--dry-run=server")
    assert whole["spec"]["containers"][0]["resources"]["limits"] == {names.WHOLE_GPU: "2", names.SHARE: "1"}


def test_what_users_may_not_write_is_taken_out_with_a_warning(api: Api) -> None:
    pod = build.pod("norm", annotations={names.IDX: "0", names.POLICY: "spread"})
    pod["spec"]["containers"] = [build.container("a", gpu_mem="1Gi", share=7), build.container("b", share=1)]
    _with_env(
        pod, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "CUDA_MPS_LOG_DIRECTORY", "value": "/x"}
    )
    done = api.run("create", "-o", "json", "--dry-run=server", "-f", "-", stdin=pod)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert names.IDX not in made["metadata"]["annotations"]
    assert made["metadata"]["annotations"][names.POLICY] == "spread"
    first, second = made["spec"]["containers"]
    assert first["resources"]["limits"][names.SHARE] == "1"
    assert not second["resources"].get("limits")
    env = {entry["name"]: entry for entry in first["env"]}
    assert "CUDA_MPS_LOG_DIRECTORY" not in env
    assert names.DEVICES_OF in env["NVIDIA_VISIBLE_DEVICES"]["valueFrom"]["fieldRef"]["fieldPath"]
    for text in ("NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_LOG_DIRECTORY", names.IDX, "spec.containers[1]"):
        assert text in done.stderr


def test_native_sidecars_get_shares_and_environment(api: Api) -> None:
    sidecar = build.container("s", gpu_mem=64) | {"restartPolicy": "Always"}
    pod = api.create(build.pod("side", init=[sidecar], gpu_mem=64), "--dry-run=server")
    asked = request.parse_mutated(pod)
    assert asked is not None
    assert [container.key for container in asked.containers] == ["init-0", "0"]
    env = {entry["name"]: entry for entry in pod["spec"]["initContainers"][0]["env"]}
    assert f"{names.FRACTION_OF}init-0" in json.dumps(env[names.ENV_FRACTION])


def test_a_copy_of_a_running_pod_is_created_and_placed_anew(api: Api) -> None:
    copy = api.running("original")
    assert copy["spec"]["nodeName"] == "n1"
    copy["metadata"]["name"] = "copied"
    made = api.create(copy)
    assert "nodeName" not in made["spec"]
    assert names.ASSIGNMENT not in made["metadata"].get("annotations", {})
    assert api.bind("copied", user=EXTENDER, annotations=ASSIGNED).returncode == 0
    api.ok("delete", "pod", "copied", "original", "--force", "--grace-period=0")


def test_a_restored_pod_keeps_its_name(api: Api) -> None:
    backup = api.running("restored")
    api.ok("delete", "pod", "restored", "--force", "--grace-period=0")
    assert "nodeName" not in api.create(backup)["spec"]
    api.ok("delete", "pod", "restored", "--force", "--grace-period=0")


def test_a_user_passes_nothing_by_calling_a_pod_a_mirror(api: Api) -> None:
    mirror = {"kubernetes.io/config.mirror": "x", "kubernetes.io/config.source": "file"}
    forged = build.pod("forged", containers=[{"name": "main", "image": "x"}], annotations=ASSIGNED | mirror)
    forged["spec"]["nodeName"] = "n1"
    assert "only Cardwise writes this annotation" in api.refused("create", "-f", "-", stdin=forged)
    share = build.pod("shares", gpu_mem="8Gi", annotations=mirror)
    share["spec"]["nodeName"] = "n1"
    assert "spec.nodeName" in api.refused("create", "-f", "-", stdin=share)


def test_annotations_of_a_running_pod_belong_to_us(api: Api) -> None:
    api.running("steady")
    change = {names.IDX: "0", names.ASSIGNED: "true", names.ASSIGNMENT: "{}", "cardwise.dev/devices.0": "GPU-x"}
    for key, value in change.items():
        error = api.refused("annotate", "pod", "steady", "--overwrite", f"{key}={value}")
        assert key in error
        assert "leave it as it is" in error
        assert "leave it as it is" in api.refused("annotate", "pod", "steady", f"{key}-")
    patch = json.dumps({"metadata": {"annotations": {names.IDX: "0"}}})
    assert names.IDX in api.refused("patch", "pod", "steady", "--subresource=status", "--type=merge", "-p", patch)
    api.ok("annotate", "pod", "steady", "mine=1", f"{names.POLICY}=spread")
    unknown = api.refused("annotate", "pod", "steady", "--overwrite", f"{names.POLICY}=random")
    assert "write binpack or fgd or priced or spread" in unknown
    api.ok("annotate", "pod", "steady", "--overwrite", f"{names.ASSIGNED}=true", f"--as={PLUGIN}")
    assert names.IDX in api.refused("annotate", "pod", "steady", "--overwrite", f"{names.IDX}=0", f"--as={PLUGIN}")
    assert names.ASSIGNED in api.refused("annotate", "pod", "steady", f"{names.ASSIGNED}-", f"--as={PLUGIN}")
    api.ok("delete", "pod", "steady", "--force", "--grace-period=0")


def test_ephemeral_containers_open_no_cards(api: Api) -> None:
    api.running("debugged")
    path = ("--raw", "/api/v1/namespaces/default/pods/debugged/ephemeralcontainers")
    pod = api.get("pod", "debugged")
    del pod["metadata"]["resourceVersion"]  # its status is still being written
    for entry in (
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"},
    ):
        pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "x", "env": [entry]}]
        error = api.refused("replace", *path, "-f", "-", stdin=pod)
        assert "spec.ephemeralContainers[debug].env" in error
    source = {"name": "debug", "image": "x", "envFrom": [{"configMapRef": {"name": "c"}}]}
    pod["spec"]["ephemeralContainers"] = [source]
    error = api.refused("replace", *path, "-f", "-", stdin=pod)
    assert "spec.ephemeralContainers[debug].envFrom" in error
    assert "name the variables one by one" in error
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "x", "env": [{"name": "A", "value": "1"}]}]
    api.ok("replace", *path, "-f", "-", stdin=pod)
    api.create(build.pod("undebugged"))
    api.cluster.api.patch(
        paths.pods("default", "undebugged", "ephemeralcontainers"), {"spec": {"ephemeralContainers": [source]}}
    )
    api.ok("delete", "pod", "debugged", "undebugged", "--force", "--grace-period=0")


def test_only_the_extender_binds_our_pods(api: Api) -> None:
    api.create(build.pod("ours", gpu_mem=8138))
    api.create(build.pod("theirs"))
    error = api.bind("ours")
    assert "only the Cardwise extender binds pods" in error.stderr
    error = api.bind("theirs", annotations={names.IDX: "0"})
    assert "leave it out of the Binding" in error.stderr
    error = api.bind("ours", legacy=True)
    assert "only the Cardwise extender binds pods" in error.stderr
    assert api.bind("theirs").returncode == 0
    assert api.bind("ours", user=EXTENDER, annotations=ASSIGNED).returncode == 0
    api.ok("delete", "pod", "ours", "theirs", "--force", "--grace-period=0")


def test_namespaces_give_defaults_to_plain_pods(api: Api) -> None:
    annotations = {names.DEFAULT_GPU_MEM: "2Gi", names.POLICY: "spread"}
    team = f"team-{os.getpid()}"
    metadata = {"name": team, "labels": {names.DEFAULTS_LABEL: "enabled"}, "annotations": annotations}
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    assert wait_for(lambda: api.run("get", "serviceaccount", "default", "-n", team).returncode == 0, 60)
    plain = api.create(build.pod("plain", namespace=team), "--dry-run=server")
    asked = request.parse_mutated(plain)
    assert asked is not None
    assert (asked.mem, asked.policy) == (2048, "spread")
    own = api.create(
        build.pod("own", namespace=team, gpu_mem=1, annotations={names.POLICY: "binpack"}), "--dry-run=server"
    )
    asked = request.parse_mutated(own)
    assert asked is not None
    assert (asked.mem, asked.policy) == (1, "binpack")
    debug = api.create(_with_node(build.pod("debug", namespace=team)), "--dry-run=server")  # kubectl debug node/n1
    assert request.parse(debug) is None
    opted_out = {names.DEFAULTS_OPT_OUT: "disabled"}
    out = api.create(build.pod("out", namespace=team, annotations=opted_out), "--dry-run=server")
    assert request.parse(out) is None
    api.ok("delete", "namespace", team, "--wait=false")


def test_bad_defaults_name_the_namespace(api: Api) -> None:
    metadata: dict[str, Any] = {"name": "odd", "labels": {names.DEFAULTS_LABEL: "enabled"}}
    metadata["annotations"] = {names.DEFAULT_GPU_MEM: "much"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    error = api.refused("create", "-f", "-", stdin=namespace)
    assert f"namespace odd: metadata.annotations[{names.DEFAULT_GPU_MEM}]" in error


def test_quotas_count_mib(api: Api) -> None:
    key = f"requests.{names.GPU_MEM}"
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {key: "64Gi", "pods": "9"}},
    }
    made = api.create(quota)
    assert made["spec"]["hard"] == {key: "65536", "pods": "9"}
    api.ok("patch", "resourcequota", "q", "--type=merge", "-p", json.dumps({"spec": {"hard": {key: "1Gi"}}}))
    assert api.get("resourcequota", "q")["spec"]["hard"][key] == "1024"
    error = api.refused(
        "patch", "resourcequota", "q", "--type=merge", "-p", json.dumps({"spec": {"hard": {key: "1025Ki"}}})
    )
    assert f"spec.hard[{key}]" in error
    api.ok("delete", "resourcequota", "q")
    limits = {"type": "Container", "max": {names.GPU_MEM: "8Gi"}, "min": {names.GPU_MEM: "512Mi"}}
    made = api.create(
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}, "spec": {"limits": [limits]}},
        "--dry-run=server",
    )
    assert made["spec"]["limits"][0]["max"][names.GPU_MEM] == "8192"
    assert made["spec"]["limits"][0]["min"][names.GPU_MEM] == "512"


def test_a_huge_plain_pod_stays_within_the_cost_limits_of_the_policies(api: Api) -> None:
    pod = build.pod("huge")
    env = [{"name": f"SOME_RATHER_LONG_NAME_{i}", "value": "x" * 60} for i in range(200)]
    pod["spec"]["containers"] = [build.container(f"c{i}") | {"env": env} for i in range(30)]
    pod["spec"]["volumes"] = [
        {"name": f"v{i}", "hostPath": {"path": f"/var/log/some/deep/path/{i}"}} for i in range(200)
    ]
    pod["metadata"]["annotations"] = {f"example.com/some-long-annotation-{i}": "y" * 50 for i in range(1000)}
    api.create(pod, "--dry-run=server")


def test_pods_without_gpu_never_wait_for_the_webhook(api: Api) -> None:
    api.webhook.pause()
    try:
        done = api.run("create", "-f", "-", "--request-timeout=4s", stdin=build.pod("free"))
        assert done.returncode == 0, done.stderr
        # As kube-scheduler binds: it is among the allowed users, so the hanging webhook is not asked.
        assert api.bind("free", user="system:kube-scheduler").returncode == 0
        # A scheduler that nobody has named there loses a second.
        api.create(build.pod("free-three"))
        began = time.monotonic()
        assert api.bind("free-three").returncode == 0
        assert time.monotonic() - began < 3
    finally:
        api.webhook.resume()
    api.webhook.stop()
    try:
        api.create(build.pod("free-too"))
        assert "failed calling webhook" in api.refused("create", "-f", "-", stdin=build.pod("gpu", gpu_mem=1))
        # The policies hold without it.
        assert "NVIDIA_VISIBLE_DEVICES" in api.refused(
            "create", "-f", "-", stdin=_with_env(build.pod("env"), {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
        )
        assert names.IDX in api.refused("annotate", "pod", "free-too", f"{names.IDX}=0")
    finally:
        api.webhook.restart()
        api.cluster.parts.wait_ready("webhook", 60)
        gpu = build.pod("gpu", gpu_mem=1)
        assert wait_for(lambda: api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0, 60)
        api.ok("delete", "pod", "free", "free-too", "free-three", "--ignore-not-found", "--force", "--grace-period=0")


def test_a_ca_of_somebody_else_is_followed(api: Api, tmp_path: Path) -> None:
    noted = api.webhook.noted
    assert noted is not None
    external = api.cluster.process("webhook-of-cert-manager")
    gpu = build.pod("gpu", gpu_mem=1)

    def admitted() -> bool:
        hooks = api.cluster.api.get(paths.validatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION))["webhooks"]
        bundles = {base64.b64decode(hook["clientConfig"]["caBundle"]) for hook in hooks}
        return bundles == {authority} and api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0

    authority = _issue(tmp_path)
    api.webhook.stop()
    external.start([*noted.command, f"--tls-dir={tmp_path}"], noted.environment)
    try:
        external.wait_until(admitted, "its first CA", 60)
        authority = _issue(tmp_path)
        external.wait_until(admitted, "the renewed CA", 60)
    finally:
        external.stop()
        api.webhook.restart()
        api.cluster.parts.wait_ready("webhook", 60)
    assert wait_for(lambda: api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0, 60)


def _issue(directory: Path) -> bytes:
    """What cert-manager and the kubelet leave in a Secret volume. Returns the CA."""
    now = datetime.now(UTC)
    authority = certs.new_authority("not ours", now, timedelta(days=1))
    leaf = certs.new_leaf(authority, "w", ["127.0.0.1"], certs.Use.SERVER, now=now, lifetime=timedelta(days=1))
    filesets.write(directory, {"ca.crt": authority.cert, "tls.crt": leaf.cert, "tls.key": leaf.key})
    return authority.cert


@pytest.fixture
def restricted(api: Api) -> Iterator[Cluster]:
    """With nodes n1 and n2, under the policy as people have it: the test cluster's device plugins are no pods."""
    helm = str(binaries.helm(print) / "helm")
    chart = ["template", "cardwise", str(CHART), "-n", names.NAMESPACE, "--kube-version", versions.version(), *GIVEN]
    chart += ["-s", "templates/policies/deviceplugin.yaml"]
    policy = processes.run([helm, *chart])
    cluster = api.cluster
    for node in ("n1", "n2"):
        cluster.api.create(paths.nodes(), {"metadata": {"name": node}})
    cluster.api.create(paths.extendedresources(), _card("n2", 0))
    cluster.apply(policy)
    try:
        other = plugin_of(cluster, "n1")
        cluster.wait(lambda: "n2" in _told(other.patch, paths.nodes("n2"), {}), "the policy acts")
        yield cluster
    finally:
        cluster.apply(processes.run([helm, *chart, "--set", "deviceplugin.restrictToNode=false"]))
        cluster.ask("delete", "node/n1", "node/n2", "extendedresource/gpu-n2-0")


def plugin_of(cluster: Cluster, node: str) -> KubeClient:
    """The device plugin's account as the API server sees it by the token of a pod on that node ("": of no pod)."""
    client = KubeClient.load(cluster.kubeconfig)
    client._headers[""]["Impersonate-User"] = PLUGIN
    if node:
        client._headers[""]["Impersonate-Extra-authentication.kubernetes.io%2fnode-name"] = node
    return client


def _told(call: Callable[..., object], *args: object) -> str:
    """What a refused call is told; "" when it is not refused."""
    try:
        call(*args)
    except errors.KubeError as error:
        return str(error)
    return ""


def test_a_device_plugin_writes_what_is_about_its_own_node(api: Api, restricted: Cluster) -> None:
    api.running("here")
    api.create(build.pod("there", gpu_mem=1))
    capacity = {"status": {"capacity": {names.GPU_MEM: "1"}}}
    changed = {"metadata": {"annotations": {names.NODE_CHANGED: "1"}}}
    mark = {"metadata": {"annotations": {names.ASSIGNED: "true"}}}
    sick = {"status": {"health": "Unhealthy"}}
    own = [
        (paths.nodes("n1", "status"), capacity),
        (paths.nodes("n1"), changed),
        (paths.extendedresources("gpu-n1-0"), {"spec": {"model": "x"}}),
        (paths.extendedresources("gpu-n1-0", "status"), sick),
        (paths.pods("default", "here"), mark),
    ]
    others = [
        (paths.nodes("n2", "status"), capacity),
        (paths.nodes("n2"), changed),
        (paths.extendedresources("gpu-n2-0"), {"spec": {"model": "x"}}),
        (paths.extendedresources("gpu-n2-0", "status"), sick),
        (paths.extendedresources("gpu-n2-0"), {"spec": {"node": "n1"}}),
        (paths.extendedresources("gpu-n1-0"), {"spec": {"node": "n2"}}),
        (paths.pods("default", "there"), mark),
    ]
    plugin, nobody = plugin_of(restricted, "n1"), plugin_of(restricted, "")
    for path, change in own:
        assert "the token names no node" in _told(nobody.patch, path, change)
        assert _told(plugin.patch, path, change) == ""
    for path, change in others:
        assert "the device plugin of node n1 may not write" in _told(plugin.patch, path, change)
    assert "may not write" in _told(plugin.create, paths.extendedresources(), _card("n2", 1))
    assert "may not write" in _told(plugin.delete, paths.extendedresources("gpu-n2-0"))
    plugin.create(paths.extendedresources(), _card("n1", 2))
    plugin.delete(paths.extendedresources("gpu-n1-2"))
    api.ok("annotate", "node", "n2", "mine=1")  # others are none of its business
    api.ok("delete", "pod", "here", "there", "--force", "--grace-period=0")
    plugin.close()
    nobody.close()
