"""What the chart runs: with options that the parts have, no more rights than they need, and never half-configured."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import deviceplugin.__main__ as deviceplugin_part
import extender.__main__ as extender_part
import mps.__main__ as mps_part
import webhook.__main__ as webhook_part
from cardwise.core.api import gpunodes, mps, names, policies, schedulerconfig
from cardwise.core.values.decoded import Json
from cardwise.kube.pods import nodeconstraints
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints
from deviceplugin.grants.mpswait import HasManager
from tests.helm.rendering import ALL, CHART, OFF, OTHER, Objects, Render, documents, get_object, template, text

EVERYTHING = (
    *ALL,
    "nodes.gpus=GPU-1",
    "nodes.simulatedGPUs=/srv/cards/a.yaml",
    "webhook.runtimeClass=nvidia",
    "extender.maxClients=9",
    "deviceplugin.devices[0].kind=rdma",
)
COMMANDS: dict[str, click.Command] = {
    "cardwise-webhook": webhook_part.main,
    "cardwise-extender": extender_part.main,
    "cardwise-deviceplugin": deviceplugin_part.main,
    "cardwise-mps": mps_part.main,
}
LONGEST_ROOT = mps.MAX_PIPE_LENGTH - len(
    str(mps.card_daemon_folder("/", "GPU-9f3b5c2a-1111-2222-3333-444455556666") / mps.PIPE_FOLDER)
)
KIND_OF = {"webhook": "Deployment", "extender": "Deployment", "deviceplugin": "DaemonSet", "mps": "DaemonSet"}


def workloads(objects: Objects) -> dict[str, Json]:
    """Pod specs by name."""
    specs = {}
    for manifest in objects:
        if manifest["kind"] == "Pod":
            specs[manifest["metadata"]["name"]] = manifest["spec"]
        elif manifest["kind"] in ("Deployment", "DaemonSet", "Job"):
            specs[manifest["metadata"]["name"]] = manifest["spec"]["template"]["spec"]
    return specs


def container(render: Render, part: str, *sets: str) -> Json:
    spec = get_object(render(*sets), KIND_OF[part], f"cardwise-{part}")["spec"]["template"]["spec"]
    (only_container,) = spec["containers"]
    return dict(only_container)


def parsed_options(render: Render, part: str, *sets: str) -> dict[str, Any]:
    """What the part makes of the arguments that the chart gives it."""
    command, manifest = COMMANDS[f"cardwise-{part}"], container(render, part, *sets)
    assert manifest["command"] == [f"cardwise-{part}"]
    context = command.make_context(part, ["--node-name=n1"] * (part in ("deviceplugin", "mps")) + manifest["args"])
    return context.params


@pytest.mark.parametrize("part", COMMANDS)
def test_every_argument_is_an_option_of_the_part(render: Render, part: str) -> None:
    part = part.removeprefix("cardwise-")
    known = {name for option in COMMANDS[f"cardwise-{part}"].params for name in (*option.opts, *option.secondary_opts)}
    used = {argument.partition("=")[0] for argument in container(render, part, *EVERYTHING)["args"]}
    assert used <= known


def test_values_reach_the_parts(render: Render) -> None:
    options = parsed_options(render, "webhook", *OTHER)
    assert options["namespace"] == "gpu"
    assert options["exempt_namespaces"] == ("quiet", "gpu")
    assert options["gang_schedulers"] == ("one", "two", "cardwise-scheduler")
    assert options["scheduler"] == "cardwise-scheduler"
    assert options["isolation"] == "mps"
    assert options["share_agent_image"] == "cardwise:0.1.0"
    options = parsed_options(render, "webhook")
    assert (options["scheduler"], options["exempt_namespaces"]) == ("", ("kube-system", "cardwise-system"))
    assert options["tolerated_taints"] == ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},)
    several = parsed_options(render, "webhook", "webhook.toleratedTaints={a.b/c:NoExecute,sku=gpu:NoSchedule}")
    assert [taint["key"] for taint in several["tolerated_taints"]] == ["a.b/c", "sku"]
    assert parsed_options(render, "webhook", "webhook.toleratedTaints=null")["tolerated_taints"] == ()
    options = parsed_options(render, "extender", *OTHER)
    assert (options["namespace"], options["tls_hosts"]) == ("gpu", ("10.0.0.7",))
    assert (options["policy"], options["headroom"]) == ("spread", 0)
    options = parsed_options(render, "extender")
    assert options["max_gang_permit_seconds"] == 300.0
    assert parsed_options(render, "extender", "policies.podGroupTimeoutSeconds=90")["max_gang_permit_seconds"] == 90.0
    for part in ("extender", "webhook"):
        assert parsed_options(render, part, "extender.headroomMiB=512")["headroom"] == 512
        assert parsed_options(render, part, "extender.headroomMiB=1000000")["headroom"] == 1_000_000
        assert parsed_options(render, part, "extender.headroomMiB=auto")["headroom"] is None
    options = container(render, "mps", *OTHER)["args"]
    assert "--audit=evict" in options
    options = parsed_options(render, "deviceplugin", *OTHER)
    assert (str(options["kubelet_dir"]), str(options["cdi_dir"])) == ("/var/lib/kubelet", "/var/run/cdi")


def test_what_the_webhook_is_told_is_what_its_configurations_say(render: Render) -> None:
    objects = render(*OTHER)
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        rendered = text(get_object(objects, kind, "cardwise")).replace("''", "'")
        assert "!(request.namespace in ['quiet', 'gpu'])" in rendered
        assert "schedulerName in ['one', 'two', 'cardwise-scheduler']" in rendered
    binding = text(get_object(objects, "ValidatingWebhookConfiguration", "cardwise"))
    assert "system:serviceaccount:gpu:cardwise-scheduler" in binding


def test_each_part_is_ready_before_it_is_asked_and_asks_for_what_it_needs(render: Render) -> None:
    for name, spec in workloads(render(*ALL)).items():
        if name in ("cardwise-test", "cardwise-cleanup"):
            continue
        (manifest,) = spec["containers"]
        assert {"livenessProbe", "readinessProbe", "startupProbe"} <= manifest.keys(), name
        assert manifest["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert spec["priorityClassName"].startswith("system-"), name
        assert ":latest" not in manifest["image"]
        assert ":" in manifest["image"]


def test_only_the_mps_manager_is_privileged(render: Render) -> None:
    for name, spec in workloads(render(*ALL)).items():
        (manifest,) = spec["containers"]
        security = manifest["securityContext"]
        if name == "cardwise-mps":
            assert security["privileged"]
            assert spec["hostPID"]
            continue
        assert not spec.keys() & {"hostPID", "hostIPC", "hostNetwork"}, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert security["readOnlyRootFilesystem"], name
        if name == "cardwise-deviceplugin":
            continue
        assert spec["securityContext"]["runAsNonRoot"], name
        assert not [volume for volume in spec.get("volumes", ()) if "hostPath" in volume], name


def test_a_device_plugin_is_privileged_where_it_must_be(render: Render) -> None:
    for settings in (["deviceplugin.privileged=true"], EVERYTHING):
        security = container(render, "deviceplugin", *settings)["securityContext"]
        assert security["privileged"]
        assert "allowPrivilegeEscalation" not in security, "Kubernetes refuses both together"


def test_nobody_but_the_extender_gets_the_authority_s_key(render: Render) -> None:
    for name, spec in workloads(render(*ALL)).items():
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                keys = {projection["key"] for projection in volume["secret"]["items"]}
                assert keys == {"ca.crt", "client.crt", "client.key"}, name


def test_a_drain_takes_one_replica_at_a_time(render: Render) -> None:
    objects = render(*ALL)
    for part in ("webhook", "extender", "scheduler"):
        budget = get_object(objects, "PodDisruptionBudget", f"cardwise-{part}")["spec"]
        deployment = get_object(objects, "Deployment", f"cardwise-{part}")["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"] == deployment["selector"]
        assert deployment["replicas"] == 2
        assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        apart = deployment["template"]["spec"]["affinity"]["podAntiAffinity"]
        (term,) = apart["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["podAffinityTerm"]["labelSelector"] == deployment["selector"]


def test_our_own_scheduler_asks_as_the_code_says(render: Render) -> None:
    config = yaml.safe_load(get_object(render(*ALL), "ConfigMap", "cardwise-scheduler")["data"]["config.yaml"])
    folder, host = "/etc/cardwise/extender-tls", f"https://cardwise-extender.{names.NAMESPACE}.svc"
    assert config["extenders"] == schedulerconfig.extender_stanzas(
        filter_url=f"{host}:12345",
        bind_url=f"{host}:12346",
        ca_file=f"{folder}/ca.crt",
        cert_file=f"{folder}/client.crt",
        key_file=f"{folder}/client.key",
    )
    assert config["profiles"] == [{"schedulerName": "cardwise-scheduler"}]
    (renamed,) = get_object(render(*ALL, "scheduler.name=gpus"), "Deployment", names.SCHEDULER)["metadata"][
        "annotations"
    ].items()
    assert renamed == (names.SCHEDULER_NAME, "gpus"), "by which the command line knows it"


def test_network_policies_let_in_only_who_is_named(render: Render) -> None:
    cidrs = {"scheduler": "10.0.0.1/32", "apiServer": "10.0.0.2/32", "metrics": "10.0.0.3/32"}
    sets = [f"networkPolicies.sources.{source}[0].ipBlock.cidr={cidr}" for source, cidr in cidrs.items()]
    objects = render(*ALL, *sets)
    wanted = {"extender": {"scheduler": {12345, 12346}}, "webhook": {"apiServer": {8443}}}
    for part in KIND_OF:
        policy = get_object(objects, "NetworkPolicy", f"cardwise-{part}")["spec"]
        ports_by_source = {
            peer["ipBlock"]["cidr"]: {port["port"] for port in rule["ports"]}
            for rule in policy["ingress"]
            for peer in rule["from"]
        }
        ports = wanted.get(part, {}) | {"metrics": {9400}}
        assert ports_by_source == {cidrs[source]: numbers for source, numbers in ports.items()}


@pytest.mark.parametrize("source", ["apiServer", "scheduler"])
def test_a_policy_without_names_lets_everybody_in(render: Render, source: str) -> None:
    """An API server on the nodes' network, where no podSelector finds it, must reach the webhook by default."""
    objects = render(*ALL, "networkPolicies.sources.metrics[0].ipBlock.cidr=10.0.0.3/32")
    part, ports = {"apiServer": ("webhook", {8443}), "scheduler": ("extender", {12345, 12346})}[source]
    rules = get_object(objects, "NetworkPolicy", f"cardwise-{part}")["spec"]["ingress"]
    assert [{port["port"] for port in rule["ports"]} for rule in rules if "from" not in rule] == [ports]


def test_on_the_node_s_network_the_webhook_has_ports_of_the_node_and_no_policy(render: Render) -> None:
    ports = {"https": 10443, "metrics": 10444}
    objects = render(*ALL, "webhook.hostNetwork=true", "webhook.port=10443", "webhook.metricsPort=10444")
    deployment = get_object(objects, "Deployment", "cardwise-webhook")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    spec = deployment["template"]["spec"]
    assert spec["hostNetwork"] is True
    (manifest,) = spec["containers"]
    assert {port["name"]: port["containerPort"] for port in manifest["ports"]} == ports
    assert {"--bind=:10443", "--metrics-bind=:10444"} <= set(manifest["args"])
    (service,) = get_object(objects, "Service", "cardwise-webhook")["spec"]["ports"]
    assert service["targetPort"] == "https"
    policies = [manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "NetworkPolicy"]
    assert "cardwise-extender" in policies
    assert "cardwise-webhook" not in policies


def test_services_and_network_policies_know_the_pods_and_their_ports(render: Render) -> None:
    objects = render(*ALL)
    for part, kind in KIND_OF.items():
        workload = get_object(objects, kind, f"cardwise-{part}")["spec"]
        labels = workload["template"]["metadata"]["labels"].items()
        assert workload["selector"]["matchLabels"].items() <= labels
        open_ports = {port["containerPort"] for port in workload["template"]["spec"]["containers"][0]["ports"]}
        policy = get_object(objects, "NetworkPolicy", f"cardwise-{part}")["spec"]
        assert policy["podSelector"] == workload["selector"]
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == open_ports
        assert not any("from" in rule for rule in policy["ingress"])
    for part in ("webhook", "extender"):
        service = get_object(objects, "Service", f"cardwise-{part}")["spec"]
        workload = get_object(objects, "Deployment", f"cardwise-{part}")["spec"]
        assert workload["selector"]["matchLabels"].items() <= service["selector"].items()
        ports = {port["name"] for port in workload["template"]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= ports


def test_kinds_are_upgraded_and_kept(render: Render) -> None:
    def kinds(*sets: str) -> list[Json]:
        return [manifest for manifest in render(*sets) if manifest["kind"] == "CustomResourceDefinition"]

    assert len(kinds()) == 4
    assert all(manifest["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for manifest in kinds())
    assert not any(manifest["metadata"].get("annotations") for manifest in kinds(*OTHER))
    assert kinds(*OFF) == []
    assert not (CHART / "crds").exists(), "Helm would install these once and never upgrade them"


def test_placement_policies_of_the_schema_are_those_of_the_code(helm: str) -> None:
    error_text = template(helm, "extender.policy=worst").stderr
    assert re.findall(r"'(\w+)'", error_text.partition("must be one of")[2]) == list(policies.CARD_POLICIES)


WRONG = {  # values, and what Helm says of them
    "webhook.replicas=0": "/webhook/replicas",
    "webhook.replica=3": "'replica' not allowed",
    "extender.headroomMiB=1Gi": "/extender/headroomMiB",
    "extender.service.clusterIP=extender": "/extender/service/clusterIP",
    "extender.policy=best-fit": "/extender/policy",
    "image.repository=cardwise:1.0": "/image/repository",
    "image.pullSecrets={registry}": "/image/pullSecrets/0",
    "nodes.kubeletDir=var/lib/kubelet": "/nodes/kubeletDir",
    "nodes.kubeletDir=/var/lib/kubelet/": "/nodes/kubeletDir",
    "nodes.criSocket=unix:///run/containerd/containerd.sock": "/nodes/criSocket",
    "nodes.gpus=all": "/nodes/gpus",
    "nodes.gpus=0": "/nodes/gpus': got number, want string",
    "nodes.simulatedGPUs=cards.yaml": "/nodes/simulatedGPUs",
    "deviceplugin.gpuAccess=CDI": "/deviceplugin/gpuAccess",
    "deviceplugin.devices[0]=rdma": "/deviceplugin/devices/0",
    "deviceplugin.devices[0].pci.vendor=15b3": "missing property 'kind'",
    "mps.audit=always": "/mps/audit",
    "scheduler.name=My Scheduler": "/scheduler/name",
    "webhook.extraArgs={log-level=debug}": "/webhook/extraArgs/0",
    "tests.namespace=Default": "/tests/namespace",
    "Webhook.replicas=3": "'Webhook' not allowed",
    "webhook.resources.request.cpu=1": "/webhook/resources",
    "extender.resources.limits.memory=2GB": "/extender/resources/limits/memory",
    "extender.resources.limits=2Gi": "/extender/resources/limits",
    "deviceplugin.resources.requests.cpu=-1": "/deviceplugin/resources/requests/cpu",
    "mps.resources.memory=1Gi": "/mps/resources",
    "scheduler.resources.requests.cpu=100 m": "/scheduler/resources/requests/cpu",
    "webhook.affinity.nodeAfinity.x=y": "/webhook/affinity",
    "extender.affinity.podAffinity=zone": "/extender/affinity/podAffinity",
    "scheduler.affinity.antiAffinity.x=y": "/scheduler/affinity",
    "extender.service.clusterIP=10.96.0.300": "/extender/service/clusterIP",
    "extender.service.clusterIP=10.96.7": "/extender/service/clusterIP",
    "extender.service.clusterIP=fd00:12345": "/extender/service/clusterIP",
    f"nodes.mpsRoot=/{'x' * LONGEST_ROOT}": "/nodes/mpsRoot",
    "webhook.url=http://127.0.0.1:1": "/webhook/url",
    "webhook.url=https://127.0.0.1:1/path": "/webhook/url",
    "webhook.toleratedTaints={nvidia.com/gpu}": "/webhook/toleratedTaints/0",
    "webhook.shareAgentImage=a b": "/webhook/shareAgentImage",
    "webhook.shareAgentImage=cardwise-agent:": "/webhook/shareAgentImage",
    "webhook.exemptNamespaces={O'Neill}": "/webhook/exemptNamespaces/0",
    "webhok.url=https://x": "'webhok' not allowed",
    "policies.hostPaths={dev/nvidia}": "/policies/hostPaths/0",
    "policies.runtimeClasses={O'Neill}": "/policies/runtimeClasses/0",
    "policies.deviceHostPaths={dev/infiniband}": "/policies/deviceHostPaths/0",
    "webhook.gangSchedulers={Not A Name}": "/webhook/gangSchedulers/0",
    "policies.infrastructure.serviceAccounts={dcgm}": "/policies/infrastructure/serviceAccounts/0",
    "policies.annotationWriters={a'b}": "/policies/annotationWriters/0",
    "scheduler.name=a.-b": "/scheduler/name",
    "extender.service.clusterIP=:::::": "/extender/service/clusterIP",
    "nodes.stateDir=/var/lib/../cardwise": "/nodes/stateDir",
    "nodes.cdiDir=/var/run/./cdi": "/nodes/cdiDir",
    'policies.annotationWriters={a"b}': "/policies/annotationWriters/0",
    # The templates write paths into flow mappings of YAML without quotes.
    "nodes.cdiDir=/var/run/cdi\\,x": "/nodes/cdiDir",
    "nodes.kubeletDir=/var/lib/kubelet:": "/nodes/kubeletDir",
    "nodes.criSocket=/run/{cri}/cri.sock": "/nodes/criSocket",
    "nodes.mpsRoot=/run/[mps]": "/nodes/mpsRoot",
    "nodes.simulatedGPUs=/etc/a#b/gpus.yaml": "/nodes/simulatedGPUs",
    'scheduler.manifestsDir=/etc/"kubernetes"/manifests': "/scheduler/manifestsDir",
}


def _at_odds(setting: str, other: str) -> bool:
    """Whether Helm cannot take both values, or what it says of one could be meant for the other."""
    keys, messages = [assigned.partition("=")[0] for assigned in (setting, other)], [WRONG[setting], WRONG[other]]
    unknown = all("not allowed" in text for text in messages)  # it names these together
    return unknown or any(a.startswith(b) or b.startswith(a) for a, b in (keys, messages))


@pytest.fixture(scope="session")
def refusals(helm: str) -> dict[str, str]:
    """What Helm says of wrong values. It is given many at once."""
    refused: dict[str, str] = {}
    while remaining := WRONG.keys() - refused.keys():
        together: list[str] = []
        for setting in sorted(remaining):
            if not any(_at_odds(setting, other) for other in together):
                together.append(setting)
        refused |= dict.fromkeys(together, template(helm, *together).stderr)
    return refused


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_value_is_refused_by_its_name(refusals: dict[str, str], setting: str) -> None:
    assert "values don't meet the specifications" in refusals[setting]
    assert WRONG[setting] in refusals[setting]


def _leaves(part_of_manifest: object) -> Iterator[object]:
    match part_of_manifest:
        case dict():
            for key, part in part_of_manifest.items():
                yield key
                yield from _leaves(part)
        case list():
            for part in part_of_manifest:
                yield from _leaves(part)
        case _:
            yield part_of_manifest


def test_names_that_yaml_takes_for_a_number_are_strings(helm: str) -> None:
    parts = ("webhook", "extender", "deviceplugin", "mps")
    named = [
        *(f"{part}.priorityClassName" for part in (*parts, "scheduler")),
        *("webhook.runtimeClass", "nodes.runtimeClass"),
        *("namespace.name", "scheduler.name", "tests.namespace", "image.repository", "image.tag"),
        *("webhook.exemptNamespaces[0]", "webhook.gangSchedulers[0]", "bindings.allowedUsers[0]"),
        *("policies.runtimeClasses[0]", "policies.annotationWriters[0]"),
    ]
    numbers = range(7654321, 7654321 + len(named) + 2)
    settings = [f"{name}={number}" for name, number in zip(named, numbers, strict=False)]
    release, namespace = map(str, numbers[-2:])
    apis = ("--api-versions", "monitoring.coreos.com/v1")
    for mode in ("own", "kubeadm"):
        sets = [f"scheduler.mode={mode}", "scheduler.image=k:v1", "namespace.create=true"]
        sets += [
            "scheduler.controlPlaneNodes=3",
            "networkPolicies.enabled=true",
            "monitoring.dashboard.enabled=true",
            "monitoring.podMonitor.enabled=true",
        ]
        flags = [flag for setting in sets for flag in ("--set", setting)]
        flags += [flag for setting in settings for flag in ("--set-string", setting)]
        command = [helm, "template", release, str(CHART), "--namespace", namespace, "--kube-version", "1.34.0"]
        done = subprocess.run([*command, *apis, *flags], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for manifest in documents(done.stdout):
            assert not set(numbers) & set(_leaves(manifest)), manifest["kind"]


RIGHT = (
    "extender.resources.limits.memory=1.5Gi",
    "extender.resources.limits.cpu=2",
    "extender.resources.requests.ephemeral-storage=1e9",
    "webhook.affinity.podAntiAffinity.x=y",
    f"nodes.mpsRoot=/{'x' * (LONGEST_ROOT - 1)}",
    "nodes.cdiDir=/.cdi/..v1/a_B-9.8@%+=~",
    "nodes.criSocket=/run/k3s/containerd/containerd.sock",
)


@pytest.mark.parametrize("address", ["10.96.0.30", "fd00::30"])
def test_right_values_are_taken(helm: str, address: str) -> None:
    done = template(helm, f"extender.service.clusterIP={address}", *RIGHT)
    assert done.returncode == 0, done.stderr


def test_what_has_no_default_is_refused_with_what_to_write(helm: str) -> None:
    mode = template(helm, "scheduler.mode=").stderr
    for word in (
        "scheduler.mode: kube-scheduler must call",
        "kubeadm   control planes of kubeadm",
        "own       managed (EKS, GKE",
    ):
        assert word in mode
    assert "write image.repository=REGISTRY/cardwise" in template(helm, "image.repository=").stderr
    assert (
        "scheduler.controlPlaneNodes: helm cannot look up the control plane nodes here"
        in template(helm, "scheduler.mode=kubeadm").stderr
    )
    error_text = template(helm, "image.repository=", "scheduler.mode=").stderr
    assert "write image.repository=" in error_text
    assert "scheduler.mode: kube-scheduler must call" in error_text
    everybodys = template(helm, "namespace.name=default").stderr
    assert "helm install cardwise helm/cardwise --namespace cardwise-system --create-namespace" in everybodys


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["webhook.enabled=false"], "webhook.enabled: without the webhook no pod that requests a GPU can be created"),
        (["webhook.url=https://127.0.0.1:8443"], "webhook.url: the API server would call https://127.0.0.1:8443"),
        (["scheduler.mode=own"], "scheduler.image: scheduler.mode=own needs kube-scheduler's image"),
        (
            ["scheduler.mode=own", "scheduler.image=a:1", "scheduler.name=default-scheduler"],
            "scheduler.name: default-scheduler is the name of the cluster's kube-scheduler",
        ),
        (
            ["scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=1", "extender.enabled=false"],
            "scheduler.mode: kubeadm needs the extender",
        ),
        (["deviceplugin.mps=never"], "deviceplugin.mps: never means that no node has an MPS manager"),
        (["tests.namespace=kube-system"], "tests.namespace: the webhook does not see pods of kube-system"),
        (["webhook.metricsPort=8443"], "webhook.metricsPort: is the same as webhook.port"),
    ],
)
def test_values_that_contradict_each_other_are_refused(helm: str, settings: list[str], message: str) -> None:
    done = template(helm, *settings)
    assert done.returncode != 0
    assert message in done.stderr


def test_pods_run_on_linux_only_also_where_an_admin_names_labels(render: Render) -> None:
    """In a cluster with Windows nodes half of the pods would wait there for an image that cannot run."""
    for sets in (
        (),
        ALL,
        ("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3"),
        ("nodes.selector.pool=gpu", "webhook.nodeSelector.pool=cpu"),
    ):
        specs = workloads(render(*sets))
        assert specs, sets
        assert {name for name, spec in specs.items() if spec["nodeSelector"]["kubernetes.io/os"] != "linux"} == set()
    assert specs["cardwise-deviceplugin"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "gpu"}
    assert specs["cardwise-webhook"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "cpu"}


def test_nodes_wait_for_an_mps_manager_only_where_the_chart_runs_one(render: Render) -> None:
    """What an earlier installation with MPS left on a node must not keep pods away from its cards for ever."""
    for sets, setting in (
        ((), HasManager.SEEN),
        (("mps.enabled=false",), HasManager.NEVER),
        (("mps.enabled=false", "deviceplugin.mps=seen"), HasManager.SEEN),
        (("deviceplugin.mps=always",), HasManager.ALWAYS),
    ):
        assert f"--mps={setting}" in container(render, "deviceplugin", *sets)["args"], sets


@pytest.mark.parametrize("part", ["deviceplugin", "mps"])
def test_the_parts_on_nodes_run_where_a_label_says_gpu_and_leave_while_the_driver_is_replaced(
    render: Render, part: str
) -> None:
    """By labels of NVIDIA's GPU Operator: a pod that holds the module of the driver keeps it from unloading."""
    states = ("upgrade-required", "wait-for-jobs-required", "drain-required", "validation-required", "upgrade-done")
    staying = [
        {"nvidia.com/gpu.deploy.client": "true"},
        *({"nvidia.com/gpu-driver-upgrade-state": state} for state in states),
        {},
    ]
    for sets, labels in (
        ((), [{key: (label_values or ("any",))[0]} for key, label_values in gpunodes.GPU_NODE_LABELS.items()]),
        (("nodes.selector.pool=gpu",), [{"pool": "gpu"}]),
    ):
        spec = workloads(render(*sets))[f"cardwise-{part}"]
        constraints = nodeconstraints.constraints_of(spec)
        linux = {"kubernetes.io/os": "linux"}
        assert not constraints.admits("n1", NodeLabelsAndTaints(linux))
        for of_gpu in labels:
            for stable in staying:
                assert constraints.admits("n1", NodeLabelsAndTaints(linux | of_gpu | stable)), (of_gpu, stable)
            for key, label in gpunodes.UPGRADE_LABELS.items():
                assert not constraints.admits("n1", NodeLabelsAndTaints(linux | of_gpu | {key: label})), (of_gpu, key)
        (terms,) = [spec["affinity"]["nodeAffinity"][nodeconstraints.REQUIRED_AFFINITY_FIELD]["nodeSelectorTerms"]]
        assert len(terms) == len(labels), "no label more than doctor knows"


def test_the_image_can_be_pinned_by_its_digest(render: Render) -> None:
    digest = f"sha256:{'0a' * 32}"
    objects = render(f"image.digest={digest}", "image.tag=v1")
    images = {c["image"] for spec in workloads(objects).values() for c in spec["containers"]}
    assert images == {f"cardwise@{digest}"}
    assert f"--share-agent-image=cardwise@{digest}" in container(lambda *_: objects, "webhook")["args"]


@pytest.mark.parametrize("sets", [(), ALL, ("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3", *OFF[:1])])
def test_a_quota_admits_our_pods_of_system_priority_where_the_cluster_limits_them(
    render: Render, sets: tuple[str, ...]
) -> None:
    """GKE admits pods of these PriorityClasses only in namespaces with a ResourceQuota for them."""
    objects = render(*sets)
    quota = get_object(objects, "ResourceQuota", "cardwise-system-priority")
    (scope,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert (scope["scopeName"], scope["operator"]) == ("PriorityClass", "In")
    assert quota["metadata"]["namespace"] == names.NAMESPACE
    # It limits nothing: a quota that a new node could fill would keep its device plugin away.
    assert quota["spec"]["hard"] == {"pods": "1G"}
    named = {spec["priorityClassName"] for spec in workloads(objects).values() if "priorityClassName" in spec}
    assert named == set(scope["values"]) == {"system-cluster-critical", "system-node-critical"}


@pytest.mark.parametrize("sets", [(), OFF])
def test_probe_pods_have_a_class_that_preempts_no_pod(render: Render, sets: tuple[str, ...]) -> None:
    priority_class = get_object(render(*sets), "PriorityClass", names.PROBE_PRIORITY_CLASS)
    assert (priority_class["preemptionPolicy"], priority_class.get("globalDefault", False)) == ("Never", False)
    assert priority_class["value"] < -10, "from there on a cluster autoscaler adds nodes"


def test_each_part_s_priority_class_is_a_value(render: Render) -> None:
    for mode in (ALL, ("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3")):
        parts = ("webhook", "extender", "deviceplugin", "mps", "scheduler")
        specs = workloads(render(*mode, *(f"{part}.priorityClassName=ours" for part in parts)))
        assert {spec["priorityClassName"] for spec in specs.values() if "priorityClassName" in spec} == {"ours"}
        none = workloads(render(*mode, *(f"{part}.priorityClassName=" for part in parts)))
        assert [name for name, spec in none.items() if "priorityClassName" in spec] == []


@pytest.mark.parametrize(
    ("address", "refused"), [("10.0.0.8", True), ("10.0.0.7", False), ("", False)], ids=["other", "same", "none"]
)
def test_another_address_of_the_extender_s_service_is_refused_before_the_upgrade(
    helm: str, tmp_path: Path, address: str, refused: bool
) -> None:
    """Kubernetes refuses to change it, amid the upgrade. `helm template` asks no cluster, so the Service is put in."""
    chart = tmp_path / "cardwise"
    shutil.copytree(CHART, chart)
    checks = chart / "templates" / "checks.yaml"
    before, lookup, after = checks.read_text().partition('(lookup "v1" "Service" $own "cardwise-extender")')
    assert lookup
    checks.write_text(f'{before}(dict "spec" (dict "clusterIP" "10.0.0.7")){after}')
    done = template(helm, f"extender.service.clusterIP={address}", chart=chart)
    assert (done.returncode != 0) == refused, done.stderr
    assert ("extender.service.clusterIP: the Service has the address 10.0.0.7" in done.stderr) == refused
    assert (f"kubectl delete service cardwise-extender --namespace {names.NAMESPACE}" in done.stderr) == refused


def test_a_container_that_crashes_leaves_the_end_of_its_log(render: Render) -> None:
    """`cardwise doctor` says it."""
    for sets in (ALL, ("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3")):
        policies_by_container = {
            name: container.get("terminationMessagePolicy")
            for name, spec in workloads(render(*sets)).items()
            for container in spec["containers"]
        }
        assert len(policies_by_container) > len(KIND_OF)
        assert set(policies_by_container.values()) == {"FallbackToLogsOnError"}, policies_by_container
