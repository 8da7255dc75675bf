"""A sound installation as doctor reads it, in which tests plant faults."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from cardwise.cli.doctor import checks, facts
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.cli.doctor.policies import ALWAYS_INSTALLED
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.cli.clusters import card

_Plant = TypeVar("_Plant", bound=Callable[..., None])
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)  # of the API server; no check asks the clock of the machine


class Faults(list[Any]):
    """Functions that each plant a fault, with what doctor says about it: the rows of a test's table."""

    def says(self, *words: object) -> Callable[[_Plant], _Plant]:
        def keep(plant: _Plant) -> _Plant:
            self.append(pytest.param(plant, *words, id=plant.__name__))
            return plant

        return keep


def node(name: str, runtime: str = "containerd://2.1.4", **allocatable: str) -> Json:
    offers = {names.SHARE: "128", names.GPU_MEM: "32552"} | {
        key.replace("__", "/"): v for key, v in allocatable.items()
    }
    status = {"nodeInfo": {"containerRuntimeVersion": runtime}, "allocatable": offers, "capacity": dict(offers)}
    return build.node(name, status=status)


def lease(name: str, *, ahead: float = 0.0, age: float = 1.0, namespace: str = facts.NODE_LEASES) -> Json:
    """Renewed `age` seconds ago by a clock that is `ahead`."""
    written = NOW - timedelta(seconds=age)
    metadata = {"name": name, "namespace": namespace, "managedFields": [{"time": f"{written:%Y-%m-%dT%H:%M:%SZ}"}]}
    renewed = written + timedelta(seconds=ahead)
    spec = {"holderIdentity": name, "leaseDurationSeconds": 15, "renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}"}
    return {"metadata": metadata, "spec": spec}


def part(name: str, kind: str = "", *, replicas: int = 2, release: str = "cardwise", **status: Any) -> Json:
    """The Deployment (or what `kind` names) of a part, as Helm leaves it; `release` "": as `helm template` does."""
    annotations = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": names.NAMESPACE}
    metadata = {"namespace": names.NAMESPACE, "name": f"cardwise-{name}", "annotations": annotations if release else {}}
    spec = {"template": {"spec": {"containers": []}}} | ({} if kind == "DaemonSet" else {"replicas": replicas})
    return {"metadata": metadata, "spec": spec, "status": status}


def workload(name: str, namespace: str = "gpu") -> Json:
    return {"metadata": {"namespace": namespace, "name": name}}


def controlled(pod: Json) -> Json:
    """The pod, as one that a controller has made."""
    pod["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "r", "controller": True}]
    return pod


def configuration(bundle: str = "Q0E=", name: str = names.WEBHOOK_CONFIGURATION) -> Json:
    hook = {"name": "pods.cardwise.dev", "clientConfig": {"caBundle": bundle} if bundle else {}}
    return {"metadata": {"name": name}, "webhooks": [hook]}


def policy(name: str, **match_constraints: object) -> Json:
    """As the API server has it, with defaults."""
    selectors: Json = {"matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}}
    spec = {"failurePolicy": "Fail", "matchConstraints": selectors | match_constraints}
    return {"metadata": {"name": name}, "spec": spec}


def policy_binding(policy_name: str, **spec: object) -> Json:
    return {
        "metadata": {"name": policy_name},
        "spec": {"policyName": policy_name, "validationActions": ["Deny"]} | spec,
    }


def installation() -> Facts:
    """What doctor reads of an installation without a fault."""
    cards = [card("n1", 0), card("n1", 1)]
    for resource in cards:
        resource["status"] |= {"gpuAccess": "cdi", "mps": {"state": "Ready"}}
    return Facts(
        version={"gitVersion": "v1.34.4"},
        nodes=[node("n1")],
        cards=cards,
        mutating_webhooks=[configuration(), configuration(name=names.LATE_CONFIGURATION)],
        validating_webhooks=[configuration()],
        policies=[policy(name) for name in ALWAYS_INSTALLED],
        policy_bindings=[policy_binding(name) for name in ALWAYS_INSTALLED],
        node_leases=[lease("n1")],
        leases=[lease(names.LEASE, namespace=names.NAMESPACE)],
        now=NOW,
    )


def troubles(seen: Facts) -> list[Finding]:
    return [finding for finding in checks.check_facts(seen) if finding.level is not Severity.OK]
