"""Admission on the real kube-apiserver: the chart and the webhook process."""

import base64
import functools
import socket
import ssl
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cardwise.core.api import classes, names
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths
from cardwise.runtime.tls import certs, filesets
from tests import build
from tests.cluster import Cluster
from tests.cluster.processes import wait_for
from tests.integration.admission.api import Api, cards_without_node, wait_for_policies, with_env, with_volume

pytestmark = [pytest.mark.cluster("sim")]

PLUGIN = "system:serviceaccount:cardwise-system:cardwise-deviceplugin"


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Api]:
    """Without nodes, so that no pod is placed before a test binds it; the cards of n1 are known."""
    with cards_without_node(cluster) as api:
        wait_for_policies(api)
        yield api


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
            [FIELD, "more than the largest GPU has (16276)", "request at most 16276Mi", names.GPU_COUNT],
            id="above the largest card",
        ),
        pytest.param(build.pod(gpu_count=3), ["3 GPUs are more than any node has (2)"], id="more cards than a node"),
        pytest.param(
            build.pod(gpu_mem=1, annotations={names.POLICY: "best"}),
            [names.POLICY, "binpack, priced, spread, spread-by=LABEL"],
            id="policy",
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
    api.create(with_volume(pod, path), "--dry-run=server")


def test_a_running_pod_takes_annotations_of_others_and_the_policies_that_there_are(api: Api) -> None:
    api.running("steady")
    api.ok("annotate", "pod", "steady", "mine=1", f"{names.POLICY}=spread")
    unknown = api.refused("annotate", "pod", "steady", "--overwrite", f"{names.POLICY}=random")
    assert "write one of: binpack, priced, spread, spread-by=LABEL" in unknown
    api.ok("annotate", "pod", "steady", "--overwrite", f"{names.POLICY}=spread-by=topology.kubernetes.io/zone")
    for label in ("", "-zone", "a/b/c", "x" * 64, "a..b/zone"):
        api.refused("annotate", "pod", "steady", "--overwrite", f"{names.POLICY}=spread-by={label}")
    api.ok("delete", "pod", "steady", "--force", "--grace-period=0")


WRITTEN_BY_USERS = {
    names.POLICY: "spread",
    names.ONE_NODE: "true",
    names.DEFAULTS_OPT_OUT: "disabled",
    names.CLASS: classes.name_of_model("Tesla P100"),
    names.QUEUE_PRIORITY: "1",
    names.ISOLATION: "advisory",
    names.SM_PERCENT: "core",
    names.SHARE_AGENT: "never",
    names.FRAMEWORKS: "off",
    names.NO_DEFRAG: "true",
    names.SHARE_WITH: "namespace",
}


def test_annotations_of_ours_are_written_by_cardwise_but_for_those_of_users(api: Api) -> None:
    """The policy has a list of its own. What the webhook refuses does not come before it, so the values are good."""
    assert WRITTEN_BY_USERS.keys() == names.USER_ANNOTATIONS

    def create(annotations: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return api.run("create", "--dry-run=server", "-f", "-", stdin=annotated(annotations))

    # The class comes a moment after its first card.
    assert wait_for(lambda: create(WRITTEN_BY_USERS).returncode == 0), create(WRITTEN_BY_USERS).stderr
    ours = (
        names.ASSIGNMENT,
        names.LEADER_EPOCH,
        f"{names.GROUP}/new",
        f"{names.GPUSHARE_PREFIX}NEW",
        names.GPUSHARE_ALLOCATION,
    )
    for key in ours:
        assert f"metadata.annotations[{key}]: only Cardwise may write this annotation" in create({key: "x"}).stderr


def annotated(annotations: dict[str, str]) -> dict[str, Any]:
    pod = build.pod("annotated")
    pod["metadata"]["annotations"] = annotations
    return pod


def of_ours(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


# What quotas and limits call by a bare name, and our own resources.
TAKEN = (
    *("cpu", "memory", "storage", "ephemeral-storage", "pods", "services", "secrets", "configmaps"),
    *("persistentvolumeclaims", "replicationcontrollers", "resourcequotas"),
    *("services.loadbalancers", "services.nodeports", "hugepages-2mi", "requests.new", "limits.new"),
    *(resource.removeprefix(names.CLASS_PREFIX) for resource in names.OWN_RESOURCES),
)


def test_a_class_has_a_short_name_that_means_nothing_else(api: Api) -> None:
    def create(name: str) -> object:
        resource_class = of_ours("ResourceClass", name, {"selector": {"matchLabels": {"model": "new"}}})
        return api.cluster.api.create(paths.resourceclasses(), resource_class, query={"dryRun": "All"})

    for name in ("nvidia.new", "n" * 48):
        classes.check_name(name)
        create(name)
    for name, says in (
        ("n" * 49, "at most 48 characters"),
        *((name, "is reserved for another resource name") for name in TAKEN),
    ):
        with pytest.raises(InvalidRequest):
            classes.check_name(name)
        with pytest.raises(errors.Invalid, match=says):
            create(name)


def test_a_podgroup_has_a_name_that_a_label_takes(api: Api) -> None:
    def create(name: str) -> object:
        podgroup = of_ours("PodGroup", name, {"minMember": 2})
        return api.cluster.api.create(paths.podgroups("default"), podgroup, query={"dryRun": "All"})

    for name in ("slurp-2", "g" * 63):
        create(name)
    for name in ("a.b", "g" * 64):
        with pytest.raises(errors.Invalid, match="pods have the gang's name in a label"):
            create(name)


def test_the_old_resource_of_bindings_binds_pods_of_others_only(api: Api) -> None:
    api.create(build.pod("ours", gpu_mem=8138))
    api.create(build.pod("theirs"))
    # The API server waits a second for the webhook, and then it binds.
    bind = functools.partial(api.bind, "ours", legacy=True, flags=["--dry-run=server"])
    assert wait_for(lambda: "only the Cardwise extender may bind pods" in bind().stderr), bind().stderr
    assert api.bind("theirs", legacy=True).returncode == 0
    api.ok("delete", "pod", "ours", "theirs", "--force", "--grace-period=0")


def test_a_kubelet_shows_its_static_pods_whatever_they_name(api: Api) -> None:
    """They run all the same; without their mirrors nobody would see them. Without the mark, at least the volume is
    refused.
    """
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "static"}, "spec": {"unschedulable": True}}
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    try:
        owner = {"apiVersion": "v1", "kind": "Node", "name": "static", "uid": api.create(node)["metadata"]["uid"]}
        api.create(runtime | {"handler": "runc"})
        pod = build.pod("mirror", gpu_mem=8138, annotations={names.MIRROR: "hash", names.IDX: "0"})
        pod = with_volume(with_env(pod, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}), "/dev/nvidia0")
        pod["spec"] |= {"nodeName": "static", "runtimeClassName": "nvidia"}
        pod["metadata"]["ownerReferences"] = [owner | {"controller": True}]
        kubelet = ["--as=system:node:static", "--as-group=system:nodes"]
        create = functools.partial(api.run, "create", "--dry-run=server", "-f", "-", *kubelet, stdin=pod)
        assert wait_for(lambda: create().returncode == 0), create().stderr
        del pod["metadata"]["annotations"][names.MIRROR]
        assert "gives access to GPUs without Cardwise" in api.refused(
            "create", "--dry-run=server", "-f", "-", stdin=pod
        )
    finally:
        api.ok("delete", "node", "static", "--ignore-not-found")
        api.ok("delete", "runtimeclass", "nvidia", "--ignore-not-found")


def test_a_huge_plain_pod_stays_within_the_cost_limits_of_the_policies(api: Api) -> None:
    pod = build.pod("huge")
    env = [{"name": f"SOME_RATHER_LONG_NAME_{i}", "value": "x" * 60} for i in range(200)]
    pod["spec"]["containers"] = [build.container(f"c{i}") | {"env": env} for i in range(30)]
    pod["spec"]["volumes"] = [
        {"name": f"v{i}", "hostPath": {"path": f"/var/log/some/deep/path/{i}"}} for i in range(200)
    ]
    pod["metadata"]["annotations"] = {f"example.com/some-long-annotation-{i}": "y" * 50 for i in range(1000)}
    api.create(pod, "--dry-run=server")


def _plain(**spec: Any) -> Json:
    pod = build.pod("plain")
    pod["spec"] |= {"containers": [build.container("c")]} | spec
    return pod


FOREIGN = {f"example.com/r{i}": "1" for i in range(5_000)}


@pytest.mark.parametrize(
    "pod",
    [
        _plain(containers=[build.container("c") | {"resources": {"limits": FOREIGN}}]),
        _plain(containers=[build.container(f"c{i}") for i in range(10_000)]),
        _plain(schedulingGates=[{"name": f"example.com/g{i}"} for i in range(15_000)]),
        _plain(volumes=[{"name": f"v{i}", "emptyDir": {}} for i in range(15_000)]),
    ],
    ids=["limits", "containers", "gates", "volumes"],
)
def test_no_rule_of_ours_keeps_the_api_server_busy_with_thousands_of_anything(api: Api, pod: Json) -> None:
    """By loops it timed out."""
    client = api.cluster.api
    client.request("POST", paths.pods("default"), body=pod, query={"dryRun": "All"}, timeout=30)
    pod["metadata"]["annotations"] = {names.CLASS: "none"}
    with pytest.raises(errors.Invalid, match="too m"):
        client.request("POST", paths.pods("default"), body=pod, query={"dryRun": "All"}, timeout=30)


def test_many_mounts_and_variables_stay_within_the_cost_limits_of_the_policies(api: Api) -> None:
    void = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}

    def pod(containers: int, *, volumes: int = 0, env: int = 0, own: list[dict[str, str]] | None = None) -> Json:
        pod = build.pod("large")
        mounts = [{"name": f"v{i}", "mountPath": f"/mnt/some/path/{i}"} for i in range(volumes)]
        variables = [{"name": f"VARIABLE_{i}", "value": "x" * 20} for i in range(env)] + (own or [])
        pod["spec"]["containers"] = [
            build.container(f"c{i}") | {"volumeMounts": mounts, "env": variables} for i in range(containers)
        ]
        pod["spec"]["volumes"] = [{"name": f"v{i}", "hostPath": {"path": f"/data/logs/{i}"}} for i in range(volumes)]
        return pod

    for large in (
        pod(1, volumes=1000),
        pod(50, volumes=100),
        pod(50, env=1000),
        pod(300, env=100, own=[void]),
    ):
        api.create(large, "--dry-run=server")
    refused = api.refused("create", "--dry-run=server", "-f", "-", stdin=pod(1, env=1100, own=[void]))
    assert "env of container c0: more than 1024 variables are too many where NVIDIA_VISIBLE_DEVICES" in refused
    refused = api.refused("create", "--dry-run=server", "-f", "-", stdin=pod(1100, own=[void]))
    assert "more than 1024 containers are too many where NVIDIA_VISIBLE_DEVICES" in refused


def _hostpaths(count: int, path: str) -> list[Json]:
    return [{"name": f"{'v' * 50}-{i}", "hostPath": {"path": path}} for i in range(count)]


def _mounts(count: int, path: str) -> list[Json]:
    return [{"name": "e", "mountPath": path.format(i)} for i in range(count)]


def _foreign(count: int, domain: str = "example.com") -> Json:
    return {"limits": {f"{domain}/{'r' * 50}{i}": "1" for i in range(count)}}


EMPTY: Json = {"name": "e", "emptyDir": {}}
LARGEST = {
    "hostPaths": _plain(volumes=_hostpaths(1000, "/var/lib/" + "a/" * 28)),
    "long hostPaths": _plain(volumes=_hostpaths(16, "/a" * 2047)),
    "mounts": _plain(
        containers=[build.container("c") | {"volumeMounts": _mounts(512, "/m/{}/" + "/.." * 30)}],
        volumes=[EMPTY, *_hostpaths(999, "/var/log/a")],
    ),
    "mounts without dots": _plain(
        containers=[build.container("c") | {"volumeMounts": _mounts(5000, "/m/{}")}],
        volumes=[EMPTY, *_hostpaths(1, "/var/log/a")],
    ),
    **{
        f"limits of {domain}": _plain(containers=[build.container("c") | {"resources": _foreign(1600, domain)}])
        for domain in ("example.com", "aliyun.com", "cardwise.example", "gpu.example.com", "nvidia.com")
    },
    "limits of many containers": _plain(
        containers=[
            build.container(f"c{i}") | {"resources": {"limits": {"cpu": "1", "memory": "1Mi"}}} for i in range(2000)
        ]
    ),
}


@pytest.mark.parametrize("pod", LARGEST.values(), ids=LARGEST)
def test_the_largest_plain_pods_pass(api: Api, pod: Json) -> None:
    api.create(pod, "--dry-run=server")


TOO_LARGE = {
    "hostPaths": (_plain(volumes=_hostpaths(2000, "/a")), "spec.volumes: too many for a pod with a hostPath"),
    "long hostPaths": (_plain(volumes=_hostpaths(17, "/a" * 2047)), "spec.volumes: the hostPaths are too long"),
    "volumes": (
        _plain(volumes=[*_hostpaths(1, "/a"), *({"name": f"e{i}", "emptyDir": {}} for i in range(15_000))]),
        "spec.volumes: too many for a pod with a hostPath; write at most 1000",
    ),
    "mounts": (
        _plain(
            containers=[build.container("c") | {"volumeMounts": _mounts(5000, "/m/{}/..")}],
            volumes=[EMPTY, *_hostpaths(1, "/a")],
        ),
        "volumeMounts: too many for a pod with a hostPath",
    ),
    "limits": (
        _plain(containers=[build.container("c") | {"resources": _foreign(2500)}]),
        "spec.containers: the containers name 2500 different resources",
    ),
    "more limits": (
        _plain(containers=[build.container("c") | {"resources": _foreign(10_000)}]),
        "KiB, too much to check for GPU requests; reduce it below 512 KiB",
    ),
}


@pytest.mark.parametrize(("pod", "says"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_plain_pod_that_is_too_large_for_the_rules_is_refused_with_the_field(api: Api, pod: Json, says: str) -> None:
    """By a rule whose cost was over the API server's limit it was refused without one."""
    assert says in api.refused("create", "--dry-run=server", "-f", "-", stdin=pod)


def test_other_objects_that_are_too_large_for_the_rules_are_refused_with_the_field(api: Api) -> None:
    limits = [{"type": "Container", "max": {f"gpu.example.com/{'r' * 50}{i}": "1" for i in range(20_000)}}]
    limit_range = _limited("LimitRange", {"limits": limits})
    says = "KiB, too much to check for GPU requests"
    assert says in api.refused("create", "--dry-run=server", "-f", "-", stdin=limit_range)
    limits[0]["max"] = dict(list(limits[0]["max"].items())[:4_000])
    api.create(limit_range, "--dry-run=server")
    annotations = {f"example.com/a{i}": "" for i in range(22_000)}
    assert "metadata: too many annotations and labels for a Binding" in api.bind("free", annotations=annotations).stderr


def test_pods_of_a_runtime_class_cost_no_square_of_their_variables(api: Api) -> None:
    """20,000 variables took the API server five seconds."""
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
    env = [{"name": f"V{i}"} for i in range(20_000)]
    nvidia = build.container("gpu") | {"resources": {"limits": {"nvidia.com/gpu": "1"}}, "env": env}
    api.ok("create", "-f", "-", stdin=runtime_class | {"metadata": {"name": "nvidia"}})
    try:
        alone = _plain(runtimeClassName="nvidia", containers=[nvidia])
        assert wait_for(lambda: api.run("create", "--dry-run=server", "-f", "-", stdin=alone).returncode == 0)
        beside = _plain(runtimeClassName="nvidia", containers=[nvidia, build.container("c") | {"env": env}])
        refused = api.refused("create", "--dry-run=server", "-f", "-", stdin=beside)
        assert "spec.containers[c].env" in refused
        assert "keep env to at most 1024 variables" in refused
        beside = _plain(
            runtimeClassName="nvidia", containers=[nvidia, *(build.container(f"c{i}") for i in range(1100))]
        )
        refused = api.refused("create", "--dry-run=server", "-f", "-", stdin=beside)
        assert "spec.containers: more than 1024 are too many with this spec.runtimeClassName" in refused
    finally:
        api.ok("delete", "runtimeclass", "nvidia")


def test_pods_without_gpu_never_wait_for_the_webhook(api: Api) -> None:
    api.webhook.pause()
    try:
        api.create(build.pod("free"))  # the webhook's rules fail closed: had it been asked, this would be refused
        # As kube-scheduler binds: it is among the allowed users, so the hanging webhook is not asked.
        assert api.bind("free", user="system:kube-scheduler").returncode == 0
        # A scheduler that nobody has named there loses a second (tests/helm/test_webhooks.py holds its limit).
        api.create(build.pod("free-three"))
        assert api.bind("free-three").returncode == 0
    finally:
        api.webhook.resume()
    api.webhook.stop()
    try:
        api.create(build.pod("free-too"))
        assert "failed calling webhook" in api.refused("create", "-f", "-", stdin=build.pod("gpu", gpu_mem=1))
        # The policies hold without it.
        assert "NVIDIA_VISIBLE_DEVICES" in api.refused(
            "create", "-f", "-", stdin=with_env(build.pod("env"), {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
        )
        assert names.IDX in api.refused("annotate", "pod", "free-too", f"{names.IDX}=0")
    finally:
        api.webhook.restart()
        api.cluster.parts.wait_ready("webhook")
        gpu = build.pod("gpu", gpu_mem=1)
        assert wait_for(lambda: api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0)
        api.ok("delete", "pod", "free", "free-too", "free-three", "--ignore-not-found", "--force", "--grace-period=0")


def test_a_ca_of_somebody_else_is_followed(api: Api, tmp_path: Path) -> None:
    start_line = api.webhook.recorded
    assert start_line is not None
    external = api.cluster.process("webhook-of-cert-manager")
    gpu = build.pod("gpu", gpu_mem=1)

    def admitted() -> bool:
        hooks = api.cluster.api.get(paths.validatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION))["webhooks"]
        bundles = {base64.b64decode(hook["clientConfig"]["caBundle"]) for hook in hooks}
        known = all(authority in bundle for bundle in bundles)
        return known and served() and api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0

    def served() -> bool:
        context = ssl.create_default_context(cadata=authority.decode())
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 5) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1"),
            ):
                return True
        except ssl.SSLError:
            return False

    hook, *_ = api.cluster.api.get(paths.validatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION))["webhooks"]
    port = urlsplit(hook["clientConfig"]["url"]).port
    authority = _issue(tmp_path)
    api.webhook.stop()
    external.start([*start_line.command, f"--tls-dir={tmp_path}"], start_line.environment)
    try:
        external.wait_until(admitted, "its first CA")
        authority = _issue(tmp_path)
        while not admitted():  # with the former certificate, until the API server knows the CA of the next
            assert api.run("create", "--dry-run=server", "-f", "-", stdin=gpu).returncode == 0
    finally:
        external.stop()
        api.webhook.restart()
        api.cluster.parts.wait_ready("webhook")
    # The API server hears of each configuration by itself: of the two mutating ones by a quota.
    quota = _limited("ResourceQuota", {"hard": {"requests.aliyun.com/gpu-mem": "8Gi"}})
    for manifest in (gpu, quota):
        create = functools.partial(api.run, "create", "--dry-run=server", "-f", "-", stdin=manifest)
        assert wait_for(lambda create=create: create().returncode == 0), create().stderr


def _issue(directory: Path) -> bytes:
    """What cert-manager and the kubelet leave in a Secret volume. Returns the CA."""
    now = datetime.now(UTC)
    authority = certs.new_authority("not ours", now, timedelta(days=1))
    leaf = certs.new_leaf(authority, "w", ["127.0.0.1"], certs.KeyPurpose.SERVER, now=now, lifetime=timedelta(days=1))
    filesets.write_files(directory, {"ca.crt": authority.cert, "tls.crt": leaf.cert, "tls.key": leaf.key})
    return authority.cert


def _marked(kind: str, field: str, key: str, text: str) -> dict[str, Any]:
    """A pod or a Deployment that asks for no card, with one annotation or label."""
    pod = build.pod(containers=[{"name": "main", "image": "cardwise.local/busybox:1"}])
    pod["metadata"] = {"name": "marked", field: {key: text}}
    if kind == "Pod":
        return pod
    template = {"metadata": {"labels": {"app": "x"}}, "spec": pod["spec"]}
    template["metadata"].setdefault(field, {})[key] = text
    spec = {"selector": {"matchLabels": {"app": "x"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "marked"}, "spec": spec}


def _namespace(**metadata: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "marked", **metadata}}


def _limited(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": "marked"}, "spec": spec}


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (_marked("Pod", "annotations", "gpu-memory", "2000"), "did you mean the limit aliyun.com/gpu-mem?"),
        (_marked("Pod", "labels", "scheduling.k8s.io/group-num", "4"), "did you mean scheduling.k8s.io/group-pod-num?"),
        (_marked("Deployment", "annotations", "Cardwise.dev/policy", "spread"), "did you mean cardwise.dev/policy?"),
        (_marked("Pod", "annotations", "team", "gpu scheduling"), ""),
        (_limited("ResourceQuota", {"hard": {"requests.aliyun.com/gpumem": "8"}}), "requests.aliyun.com/gpu-mem?"),
        (_limited("ResourceQuota", {"hard": {"requests.aliyun.com/gpu-mem": "8192"}}), "counts shares only"),
        (_limited("ResourceQuota", {"hard": {"requests.cpu": "8", "pods": "9"}}), ""),
        (
            _limited("LimitRange", {"limits": [{"type": "Container", "max": {"aliyun.com/gpumem": "8"}}]}),
            "did you mean aliyun.com/gpu-mem?",
        ),
        (_namespace(labels={names.DEFAULTS_LABEL: "true"}), "'true' does not enable the defaults; write enabled"),
        (_namespace(annotations={names.DEFAULT_GPU_MEM: "2Gi"}), "has no effect without the label"),
        (_namespace(annotations={"Cardwise.dev/default-gpumem": "2Gi"}), f"did you mean {names.DEFAULT_GPU_MEM}?"),
        (_namespace(labels={"team": "cardwise"}), ""),
    ],
)
def test_what_nobody_reads_or_counts_is_told(api: Api, manifest: dict[str, Any], says: str) -> None:
    done = api.run("create", "--dry-run=server", "-f", "-", stdin=manifest)
    assert done.returncode == 0, done.stderr
    assert (says in done.stderr) if says else not done.stderr
