"""Commands that findings give as their remedy: each runs as it is printed, for this installation."""

import re
from typing import Final

from cardwise.cli.doctor.facts import Facts
from cardwise.core.api import names
from cardwise.core.values.decoded import annotations_of

_CHART: Final = "helm/cardwise"
_RELEASE: Final = "meta.helm.sh/release-name"  # annotations that Helm writes
_RELEASE_NAMESPACE: Final = "meta.helm.sh/release-namespace"
_VERSION: Final = re.compile(r"v\d+\.\d+\.\d+")  # without what providers add: v1.37.2-gke.100, v1.37.2+k3s1


def install(facts: Facts) -> str:
    """Installs the chart: by the command that doctor proposes for this cluster."""
    where = "" if facts.installed == names.NAMESPACE else f" --cardwise-namespace {facts.installed}"
    return f"install the chart; cardwise doctor --before-install{where} prints the command (docs/admin.md#install)"


def upgrade(facts: Facts, **settings: str) -> str:
    """Has the chart write its objects again, with these values changed; "_" stands for the dot of a value's name.

    An installation that Helm does not know (`helm template`, GitOps) takes them from its values.
    """
    values = ",".join(f"{name.replace('_', '.')}={value}" for name, value in settings.items())
    release = _release(facts)
    if release is None:
        with_values = f" with {values}" if values else ""
        return f"render and apply the chart again{with_values}"
    name, namespace = release
    set_ = f" --set {values}" if values else ""
    return f"helm upgrade {name} {_CHART} -n {namespace} --reset-then-reuse-values{set_}"


def wire_scheduler(facts: Facts) -> str:
    """Makes kube-scheduler ask the extender, by the scheduler.mode that this cluster can have."""
    if any(one["metadata"]["name"] == names.SCHEDULER for one in facts.deployments):
        return f"let the chart write its scheduler's configuration again: {upgrade(facts)}"
    if any(names.MIRROR in annotations_of(pod) for pod in facts.schedulers):
        change = upgrade(facts, scheduler_mode="kubeadm")
    else:
        change = upgrade(facts, scheduler_mode="own", scheduler_image=scheduler_image(facts))
    return f"let the chart do it: {change} (by hand: docs/admin.md#kube-scheduler)"


def scheduler_image(facts: Facts) -> str:
    """The image of the kube-scheduler that has the API server's version: `scheduler.image` for scheduler.mode=own."""
    version = _VERSION.match(str(facts.version.get("gitVersion", "")))
    return f"registry.k8s.io/kube-scheduler:{version[0] if version else 'VERSION'}"


def log(facts: Facts, pod: str, *, previous: bool = False) -> str:
    """Shows the log of a pod of Cardwise's."""
    return f"kubectl logs -n {facts.installed} {pod}{' --previous' * previous}"


def _release(facts: Facts) -> tuple[str, str] | None:
    """Name and namespace of the Helm release; those of the documents where nothing of Cardwise is to be seen."""
    ours = [
        annotations_of(workload)
        for workload in (*facts.deployments, *facts.daemonsets)
        if workload["metadata"]["namespace"] == facts.installed and workload["metadata"]["name"].startswith("cardwise-")
    ]
    for annotations in ours:
        if _RELEASE in annotations:
            return annotations[_RELEASE], annotations.get(_RELEASE_NAMESPACE, facts.installed)
    return None if ours else ("cardwise", facts.installed)
