"""The commands that findings print as remedies. Each can be copied and run for this installation."""

import re
from collections.abc import Sequence
from typing import Final

from cardwise.cli.cluster import schedulers, workloads
from cardwise.cli.doctor.facts import Facts
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.shellcommand import command

_CHART: Final = "helm/cardwise"
_RELEASE_NAME: Final = "meta.helm.sh/release-name"  # an annotation that Helm writes
_RELEASE_NAMESPACE: Final = "meta.helm.sh/release-namespace"
_MAX_NAMED_PODS: Final = 10  # maximum number of pods named in one command
# The version without the suffix of a provider, such as in v1.37.2-gke.100 and v1.37.2+k3s1.
_VERSION: Final = re.compile(r"v\d+\.\d+\.\d+")


def suggest_installation(facts: Facts) -> str:
    """Return the command that shows how to install the chart in this cluster."""
    namespace_option = "" if facts.cardwise_namespace == names.NAMESPACE else " --cardwise-namespace {namespace}"
    propose = command("cardwise doctor --before-install" + namespace_option, namespace=facts.cardwise_namespace)
    return f"install the chart; {propose} prints the command (docs/install.md)"


def upgrade_command(facts: Facts, **settings: str) -> str:
    """Return the remedy that writes the chart's objects again with changed values.

    If Helm does not know the installation (`helm template`, GitOps), the remedy names the values to change.

    settings: the changed values; "_" stands for the dot in a value's name.
    """
    changed_values = ",".join(f"{name.replace('_', '.')}={text}" for name, text in settings.items())
    release = _helm_release(facts)
    if release is None:
        with_values = f" with {changed_values}" if changed_values else ""
        return f"render and apply the chart again{with_values}"
    name, namespace = release
    change = "helm upgrade {name} {chart:text} -n {namespace} --reset-then-reuse-values"
    set_ = " --set {values:text}" if changed_values else ""
    return command(change + set_, name=name, chart=_CHART, namespace=namespace, values=changed_values)


def suggest_scheduler_configuration(facts: Facts) -> str:
    """Return the command that configures kube-scheduler to call the extender, with this cluster's scheduler.mode."""
    if schedulers.scheduler_names(facts.deployments):
        return f"let the chart rewrite its scheduler's configuration: {upgrade_command(facts)}"
    if any(names.MIRROR in annotations_of(pod) for pod in facts.schedulers):
        change = upgrade_command(facts, scheduler_mode="kubeadm")
    else:
        change = upgrade_command(facts, scheduler_mode="own", scheduler_image=scheduler_image(facts))
    return f"let the chart do it: {change} (by hand: docs/install.md#kube-scheduler)"


def suggest_certificate_renewal(facts: Facts) -> str:
    """Return the remedy that gives kube-scheduler the present certificates of the extender."""
    if schedulers.scheduler_names(facts.deployments):
        restart = "kubectl rollout restart deployment/{name} -n {namespace}"
        return command(restart, name=names.SCHEDULER, namespace=facts.cardwise_namespace)
    if any(names.FORMER_CONFIG in annotations_of(pod) for pod in facts.schedulers):
        return f"let the chart do it: {upgrade_command(facts)}"
    release = _helm_release(facts)
    steps = "the notes of the chart"
    if release:
        steps = command("helm get notes {name} -n {namespace}", name=release[0], namespace=release[1])
    return f"give it the current ones (steps 1 and 3 of: {steps}), or {suggest_scheduler_configuration(facts)}"


def scheduler_image(facts: Facts) -> str:
    """Return `scheduler.image` for scheduler.mode=own: the kube-scheduler of the API server's version."""
    version = _VERSION.match(str(facts.version.get("gitVersion", "")))
    return f"registry.k8s.io/kube-scheduler:{version[0] if version else 'VERSION'}"


def recreate_command(pods: Sequence[Json], *, delete_all: str = "", dropped_fields: Sequence[str] = ()) -> str:
    """Return the commands that recreate pods.

    The commands delete each pod that has a controller. They save each bare pod to a file and create it again. They name
    at most ten pods with and ten pods without a controller.

    delete_all: the command that deletes all of the pods, used if each pod has a controller.
    dropped_fields: fields of the spec that the new pods must not have.
    """
    controlled_pods = [pod for pod in pods if not workloads.is_bare(pod)]
    bare_pods = [pod for pod in pods if workloads.is_bare(pod)]
    parts = []
    if controlled_pods:
        commands = [
            command("kubectl delete pods -n {namespace} {pods}", namespace=namespace, pods=pod_names)
            for namespace, pod_names in _names_by_namespace(controlled_pods)
        ]
        deletion = (
            delete_all if delete_all and not bare_pods else " && ".join(commands) + _omitted_suffix(controlled_pods)
        )
        parts.append(f"delete those with a controller, which recreates them: {deletion}")
    if bare_pods:
        single_pods = [
            (namespace, [name]) for namespace, pod_names in _names_by_namespace(bare_pods) for name in pod_names
        ]
        commands = [
            workloads.recreate_command(namespace, pod_names, dropped_fields=dropped_fields)
            for namespace, pod_names in (single_pods if dropped_fields else _names_by_namespace(bare_pods))
        ]
        save_commands = f"{' && '.join(commands)}{_omitted_suffix(bare_pods)}"
        parts.append(f"save and recreate those without a controller: {save_commands}")
    return "; ".join(parts)


def _names_by_namespace(pods: Sequence[Json]) -> list[tuple[str, list[str]]]:
    """Return the first `_MAX_NAMED_PODS` pods as namespaces, each with the names of its pods."""
    names_by_namespace: dict[str, list[str]] = {}
    for pod in pods[:_MAX_NAMED_PODS]:
        names_by_namespace.setdefault(pod["metadata"]["namespace"], []).append(pod["metadata"]["name"])
    return [*names_by_namespace.items()]


def _omitted_suffix(pods: Sequence[Json]) -> str:
    return (
        f" (and so on: {wording.pluralize(len(pods) - _MAX_NAMED_PODS, 'more pod')})"
        if len(pods) > _MAX_NAMED_PODS
        else ""
    )


def log_command(facts: Facts, pod: str, *, previous: bool = False) -> str:
    """Return the command that shows the log of a pod of Cardwise. `pod`: its name, or KIND/NAME of its controller."""
    kind, slash, name = pod.rpartition("/")
    command_text = "kubectl logs -n {namespace} {kind}/{name}" if slash else "kubectl logs -n {namespace} {name}"
    return command(command_text + " --previous" * previous, namespace=facts.cardwise_namespace, kind=kind, name=name)


def get_pods_command(cardwise_namespace: str, component: str) -> str:
    """Return the command that lists the pods of one of Cardwise's components."""
    command_text = "kubectl get pods -n {namespace} -l app.kubernetes.io/component={component}"
    return command(command_text, namespace=cardwise_namespace, component=component)


def scale_command(facts: Facts, deployment: str) -> str:
    """Return the command that scales a Deployment of Cardwise up from zero."""
    up = "kubectl scale deployment {deployment} -n {namespace} --replicas 2"
    return command(up, deployment=deployment, namespace=facts.cardwise_namespace)


def label_namespace_command(namespace: str) -> str:
    """Return the command that makes Pod Security admit the node components in Cardwise's namespace."""
    label = "kubectl label namespace {namespace} pod-security.kubernetes.io/enforce=privileged --overwrite"
    return command(label, namespace=namespace)


def _helm_release(facts: Facts) -> tuple[str, str] | None:
    """Return name and namespace of the Helm release; the documentation's if no object of Cardwise is visible."""
    all_annotations = [
        annotations_of(workload)
        for workload in (*facts.deployments, *facts.daemonsets)
        if workload["metadata"]["name"].startswith("cardwise-")
    ]
    for annotations in all_annotations:
        if _RELEASE_NAME in annotations:
            return annotations[_RELEASE_NAME], annotations.get(_RELEASE_NAMESPACE, facts.cardwise_namespace)
    return None if all_annotations else ("cardwise", facts.cardwise_namespace)
