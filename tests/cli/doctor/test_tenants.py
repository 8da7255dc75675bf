"""What tenants write into their own namespaces changes nothing of what doctor and explain say of Cardwise."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest

from cardwise.cli.cluster import schedulers
from cardwise.cli.doctor import before, checks, exposure, facts, repairs
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.cli.doctor import planted
from tests.cli.doctor.planted import part
from tests.cli.worlds import Cluster

TENANT: Final = "a-team"  # the API server lists its objects before those of cardwise-system
EVIL: Final = "registry.evil.example/sh:1"
IMAGE: Final = "registry.example/cardwise:1"
FOREIGN_NAMES: Final = (
    "my-gpushare-device-plugin", "gpushare-schd-extender", "nvidia-device-plugin", "hami-device-plugin",
)  # fmt: skip


def made(workload: Json, image: str, *arguments: str, **annotations: str) -> Json:
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
    for kind, configurations in (("mutating", seen.mutating), ("validating", seen.validating)):
        for configuration in configurations:
            configuration["webhooks"][0]["clientConfig"]["service"] = service
        api.add(f"{kind}webhookconfigurations", *configurations)
    api.add("validatingadmissionpolicies", *seen.policies)
    api.add("namespaces", {"metadata": {"name": names.NAMESPACE}}, {"metadata": {"name": "fair"}})
    api.add("deployments", *(made(part(name), IMAGE) for name in ("webhook", "extender")))
    api.add("daemonsets", made(part("deviceplugin", "DaemonSet"), IMAGE))
    if own_scheduler:
        api.add("deployments", made(part("scheduler"), IMAGE))
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
            workload = made(part(name, kind), EVIL, "--client-ca=/x", "--exempt-namespaces=fair", **evil)
            workload["metadata"]["namespace"] = TENANT
            api.add(f"{kind.lower()}s", workload)
        for name in FOREIGN_NAMES:
            workload = made(part("x", kind), EVIL, "--memory-unit=GiB")
            workload["metadata"] |= {"namespace": TENANT, "name": name}
            api.add(f"{kind.lower()}s", workload)
    lease = planted.lease(names.LEASE, age=0.0, namespace=TENANT)
    policy = {"podSelector": {}, "policyTypes": ["Ingress"]}
    api.add("leases", lease)
    api.add("networkpolicies", {"metadata": {"namespace": TENANT, "name": "all"}, "spec": policy})


def findings(api: Cluster) -> list[Finding]:
    return list(checks.judge(facts.read(api.kube)))


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
    more = [*added(sound, after)]
    assert [(finding.check, finding.level) for finding in more] == [
        ("other-plugins", Severity.NOTE), ("gpushare", Severity.NOTE),
    ]  # fmt: skip
    assert all("in namespaces of users" in finding.text for finding in more)
    assert not any("webhook.gpuMemUnit" in finding.remedy for finding in after)


def test_the_image_of_pods_that_doctor_starts_is_never_a_tenants():
    api = installed()
    plant_workloads(api)
    seen = facts.read(api.kube)
    assert {made["spec"]["containers"][0]["image"] for made in looked_with(api, seen)} == {IMAGE}
    api.replace("daemonsets", *(obj for obj in api.of("daemonsets") if obj["metadata"]["namespace"] == TENANT))
    seen = facts.read(api.kube)
    (found,) = exposure.look(api.kube, "default", names.NAMESPACE, seen)
    assert "no image to look with is known" in found.text


def looked_with(api: Cluster, seen: Facts) -> list[Json]:
    """The pods that doctor creates."""
    created: list[Json] = []

    def end(request: Any) -> None:
        created.append(request.body)
        request.body["status"] = {"phase": "Succeeded"}

    api.before(end, "create", times=math.inf)
    list(exposure.look(api.kube, "default", names.NAMESPACE, seen, clock=api.clock))
    assert created
    return created


def test_a_tenants_scheduler_changes_no_remedy_and_no_sentence_of_explain():
    api = installed()
    sound = facts.read(api.kube)
    plant_workloads(api)
    after = facts.read(api.kube)
    for remedy in (repairs.wire_scheduler, repairs.renew_certificates, repairs.upgrade):
        assert remedy(sound) == remedy(after)
    deployments = schedulers.take(api.kube, names.NAMESPACE)
    assert deployments == []
    assert schedulers.named(deployments) == frozenset()


def test_before_an_installation_a_tenants_workloads_propose_no_value():
    api = Cluster({})
    plant_workloads(api)
    for kind in ("daemonsets", "deployments"):
        api.replace(kind, *(obj for obj in api.of(kind) if obj["metadata"]["name"] in FOREIGN_NAMES))
    seen = before.read(api.kube, names.NAMESPACE)
    found = [*before.judge(seen, names.NAMESPACE)]
    assert any("in namespaces of users" in finding.text for finding in found)
    assert not any("webhook.gpuMemUnit" in finding.remedy for finding in found)
