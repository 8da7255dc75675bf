"""Admission on the real kube-apiserver: the rendered chart, the real webhook process, and kubectl as a user has it."""

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cardwise.core import names, request
from cardwise.core.assignment import Assignment, encode
from tests import build
from tests.cluster import binaries

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
EXTENDER = "system:serviceaccount:cardwise-system:cardwise-extender"
PLUGIN = "system:serviceaccount:cardwise-system:cardwise-deviceplugin"
ASSIGNED = encode(Assignment({"0": build.shares(8138, 1)}), assume_time_ns=1)


class Kubectl:
    """kubectl with the admin's rights."""

    def __init__(self, kubeconfig: Path) -> None:
        self._command = [str(binaries.kube(print) / "kubectl"), "--kubeconfig", str(kubeconfig)]

    def run(self, *args: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        return subprocess.run([*self._command, *args], input=text, capture_output=True, text=True, check=False)

    def ok(self, *args: str, stdin: Any = None) -> str:
        done = self.run(*args, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout


class Webhook:
    """The real process, with the rights of its ServiceAccount."""

    def __init__(self, kubeconfig: Path, port: int, health: int, log: Path) -> None:
        self._command = [
            sys.executable, "-m", "webhook", f"--kubeconfig={kubeconfig}", f"--bind=127.0.0.1:{port}",
            f"--metrics-bind=127.0.0.1:{health}", "--log-format=text",
        ]  # fmt: skip
        self._health = health
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        assert _wait_for(self._ready), self._log.read_text()[-3000:]

    def pause(self) -> None:
        """It hangs: gunicorn's master and its worker."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Api:
    """What the tests speak to."""

    def __init__(self, kubectl: Kubectl, webhook: Webhook) -> None:
        self.run = kubectl.run
        self.ok = kubectl.ok
        self.webhook = webhook

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
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """`$CARDWISE_TEST_KUBECONFIG` names a control plane to use instead of one of our own."""
    state = tmp_path_factory.mktemp("admission")
    with _control_plane(state / "cluster") as admin:
        port, health = _free_port(), _free_port()
        kubectl = Kubectl(admin)
        _install(kubectl, f"https://127.0.0.1:{port}")
        webhook = Webhook(_kubeconfig(kubectl, admin, state), port, health, state / "webhook.log")
        webhook.start()
        try:
            _wait_for_policies(kubectl)
            yield Api(kubectl, webhook)
        finally:
            webhook.stop()


@contextlib.contextmanager
def _control_plane(state: Path) -> Iterator[Path]:
    given = os.environ.get("CARDWISE_TEST_KUBECONFIG")
    if given:
        yield Path(given)
        return
    command = [sys.executable, "-m", "tests.cluster"]
    flags = ["--state-dir", str(state)]
    subprocess.run([*command, "up", "--no-parts", "--nodes", "0", *flags], cwd=ROOT, check=True)
    try:
        shown = subprocess.run([*command, "env", *flags], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        found = re.search(r"KUBECONFIG=(\S+)", shown)
        assert found, shown
        yield Path(found[1].strip("'\""))
    finally:
        subprocess.run([*command, "down", *flags], cwd=ROOT, check=True)


def _kubeconfig(kubectl: Kubectl, admin: Path, state: Path) -> Path:
    """The admin's, with a token of the webhook's ServiceAccount in place of the admin's certificate."""
    token = kubectl.ok("create", "token", "cardwise-webhook", "-n", names.NAMESPACE).strip()
    config = yaml.safe_load(admin.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    path = state / "webhook.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def _install(kubectl: Kubectl, url: str) -> None:
    values = [f"webhook.url={url}", "namespace.create=true", "webhook.enabled=false"]
    sets = [flag for value in values for flag in ("--set", value)]
    command = [str(binaries.helm(print) / "helm"), "template", "cardwise", str(ROOT / "helm/cardwise")]
    manifest = subprocess.run(
        [*command, "--include-crds", "--kube-version", binaries.KUBERNETES, *sets],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    kubectl.ok("apply", "-f", "-", stdin=manifest)
    assert _wait_for(lambda: kubectl.run("get", "serviceaccount", "default").returncode == 0)
    kubectl.ok("wait", "--for=condition=Established", "crd/extendedresources.cardwise.dev")
    cards = []
    for index in range(2):
        uuid = f"GPU-n1-{index}"
        spec = {"node": "n1", "index": index, "uuid": uuid, "model": "Tesla P100", "memoryMiB": build.P100}
        metadata = {"name": names.extended_resource_name(uuid), "labels": {names.NODE_LABEL: "n1"}}
        cards.append({"apiVersion": names.API_VERSION, "kind": "ExtendedResource", "metadata": metadata, "spec": spec})
    kubectl.ok("apply", "-f", "-", stdin={"apiVersion": "v1", "kind": "List", "items": cards})


def _free_port() -> int:
    """Below the range of outgoing connections, which would take it."""
    while True:
        port = random.randint(15_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _wait_for(ready: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.1)
    return False


def _wait_for_policies(api: Kubectl) -> None:
    """The API server reads policies and CA bundles by watches; the last of them to act is known by its refusal."""
    probes = [
        build.pod("probe", annotations={names.IDX: "0"}),
        _with_env(build.pod("probe"), {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}),
        _with_volume(build.pod("probe"), "/dev/nvidia0"),
        _with_node(build.pod("probe", gpu_mem=1)),
    ]
    for probe in probes:
        refused = functools.partial(_denies, api, probe)
        assert _wait_for(refused), api.run("create", "--dry-run=server", "-f", "-", stdin=probe)


def _denies(api: Kubectl, pod: dict[str, Any]) -> bool:
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
        pytest.param(build.pod(gpu_mem="0"), [FIELD, "write at least 1"], id="zero"),
        pytest.param(build.pod(gpu_mem="0.5"), [FIELD, "whole number"], id="fraction"),
        pytest.param(build.pod(gpu_mem="1025Ki"), [FIELD, "write 1 or 2"], id="fraction of a MiB"),
        pytest.param(build.pod(gpu_mem="lots"), ["quantities must match"], id="unparsable"),
        pytest.param(
            _requests(build.pod(gpu_mem=2), gpu_mem="1"),
            ["differs from the limit", "limits only"],
            id="request below limit",
        ),
        pytest.param(
            build.pod(gpu_mem=20000),
            [FIELD, "more than the largest card has (16276)", "ask for at most 16276", names.GPU_COUNT],
            id="above the largest card",
        ),
        pytest.param(build.pod(gpu_count=3), ["3 cards are more than any node has (2)"], id="more cards than a node"),
        pytest.param(build.pod(gpu_mem=9, gpu_count=2), ["write 8 or 10"], id="not divisible"),
        pytest.param(
            build.pod(init=[build.container("i", gpu_mem=1)]),
            ["ordinary init container", "restartPolicy: Always"],
            id="init",
        ),
        pytest.param(_with_node(build.pod(gpu_mem=1)), ["spec.nodeName", "nodeAffinity"], id="nodeName"),
        pytest.param(
            build.pod(gpu_mem=1, annotations={names.POLICY: "best"}), [names.POLICY, "binpack, spread"], id="policy"
        ),
        pytest.param(
            build.pod(gpu_mem=1) | {"metadata": {"name": "x", "annotations": {f"{names.GPU_COUNT_OF}0": "x"}}},
            [names.GPU_COUNT_OF],
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
    ("amount", "mib"),
    [("8138", 8138), ("8Gi", 8192), ("8192Mi", 8192), ("0.5Gi", 512), ("8000", 8000), ("8k", 8000), ("1e3", 1000)],
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
    assert split["metadata"]["annotations"][f"{names.GPU_COUNT_OF}0"] == "2"
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
    api.ok("annotate", "pod", "steady", "--overwrite", f"{names.ASSIGNED}=true", f"--as={PLUGIN}")
    api.ok("delete", "pod", "steady", "--force", "--grace-period=0")


def test_ephemeral_containers_open_no_cards(api: Api) -> None:
    api.running("debugged")
    path = ("--raw", "/api/v1/namespaces/default/pods/debugged/ephemeralcontainers")
    for entry in (
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"},
    ):
        pod = api.get("pod", "debugged")
        pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "x", "env": [entry]}]
        error = api.refused("replace", *path, "-f", "-", stdin=pod)
        assert "spec.ephemeralContainers[debug].env" in error
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "x", "env": [{"name": "A", "value": "1"}]}]
    api.ok("replace", *path, "-f", "-", stdin=pod)
    api.ok("delete", "pod", "debugged", "--force", "--grace-period=0")


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
    assert _wait_for(lambda: api.run("get", "serviceaccount", "default", "-n", team).returncode == 0)
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
        api.webhook.start()
        gpu = build.pod("gpu", gpu_mem=1)
        assert _wait_for(lambda: api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0)
        api.ok("delete", "pod", "free", "free-too", "--force", "--grace-period=0")
