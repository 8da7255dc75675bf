"""`cardwise explain`: why a pod is pending, or why it runs on its node; also for the pods of a workload."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import click

from cardwise.cli import console, options, rights
from cardwise.cli.cluster import (
    installation,
    liveworkload,
    nodestates,
    podevents,
    podgroups,
    published,
    schedulers,
    workloads,
)
from cardwise.cli.cluster.podgroups import GangView
from cardwise.cli.explanation import blockers, missingpods, objects, remedies, sentences
from cardwise.cli.explanation.blockers import PodContext
from cardwise.cli.render import printing
from cardwise.core.api import names, policies, request
from cardwise.core.placement import totals
from cardwise.core.placement.totals import EntryView
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import clusterstate, errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.clusterstate import ClusterState
from cardwise.kube.pods import eligible

# States of pods, the most urgent first: a pod of a workload in the first of these states is explained.
_STATES_BY_URGENCY: Final = ("waiting", "starting", "running", "ending", "ended")


@click.command()
@options.cluster
@options.namespace
@options.cardwise_namespace
@options.plain_output
@click.argument("target", nargs=-1, required=True, metavar="[KIND] NAME | KIND/NAME")
def explain(namespace: str | None, cardwise_namespace: str, output: str, target: tuple[str, ...]) -> None:
    """Explain why a pod waits, or why it is on its GPU.

    For a workload: a summary of its pods and why the first pending one waits. KIND is pod, deployment, statefulset,
    job, cronjob, replicaset or daemonset, or kubectl's abbreviation of one. Without KIND, NAME is a pod, or a workload
    if no pod has this name.
    """
    kind, name = _parse_target(target)
    client = options.load_client()
    namespace = namespace or client.namespace
    kind_and_manifest = find_target(client, kind, namespace, name)
    if kind_and_manifest is None and kind in (None, workloads.POD):
        deletion_lines = missingpods.explain_gone_pod(namespace, name, podevents.events_of_pod(client, namespace, name))
        if deletion_lines:
            text = sentences.join_lines(deletion_lines)
            _print_explanation(text, missingpods.as_json(namespace, name, text), output)
            return
    if kind_and_manifest is None:
        options.check_namespace(client, namespace)
        raise click.ClickException(
            f"there is no {kind or 'pod or workload'} {name!r} in namespace {namespace!r}; -n names another"
        )
    kind, manifest = kind_and_manifest
    if kind == workloads.POD:
        text, data = explain_pod(client, manifest, namespace, cardwise_namespace)
    else:
        text, data = explain_workload(client, kind, manifest, namespace, cardwise_namespace)
    _print_explanation(text, data, output)


def _print_explanation(text: str, data: Json, output: str) -> None:
    if output == "table":
        console.print_lines(text)
    else:
        printing.print_object(data, output)


def _parse_target(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Return kind and name of the target; the kind is None if the user gave none."""
    if len(words) == 1 and "/" not in words[0] and words[0]:
        return None, words[0]
    word, slash, name = words[0].partition("/")
    if not slash and len(words) == 2:
        name = words[1]
    if not name or len(words) != (1 if slash else 2):
        raise click.UsageError("name one object: NAME, KIND NAME or KIND/NAME")
    kind = workloads.parse_kind(word)
    if not kind:
        raise click.UsageError(f"{word!r} is not a kind that creates pods; write one of: {', '.join(workloads.KINDS)}")
    return kind, name


def find_target(client: KubeClient, kind: str | None, namespace: str, name: str) -> tuple[str, Json] | None:
    """Read the target; None if it does not exist.

    Raises KubeError. Raises Forbidden if the user lacks the right to read objects of this kind. If no kind is given: if
    the user lacks the right to read pods, and no workload has this name.
    """
    refusal = None
    for candidate_kind in (kind,) if kind else workloads.KINDS:
        try:
            manifest = workloads.read_workload(client, candidate_kind, namespace, name)
        except errors.Forbidden as error:
            if candidate_kind in (kind, workloads.POD):
                refusal = error
            continue
        if manifest is not None:
            return candidate_kind, manifest
    if refusal is not None:
        raise refusal
    return None


def explain_workload(
    client: KubeClient, kind: str, manifest: Json, namespace: str, cardwise_namespace: str
) -> tuple[str, Json]:
    """Explain a workload and the first of its pods. Returns the text and its JSON, as `explain_pod` does."""
    workload = workloads.read_state(client, kind, manifest)
    pods = sorted(
        workload.pods, key=lambda pod: (_STATES_BY_URGENCY.index(workloads.pod_state(pod)), pod["metadata"]["name"])
    )
    counts = Counter(map(workloads.pod_state, pods))
    states = ", ".join(f"{counts[state]} {state}" for state in _STATES_BY_URGENCY if counts[state]) or "none"
    lines = [
        f"{kind} {namespace}/{manifest['metadata']['name']} has {len(pods)} pod{'s' * (len(pods) != 1)}: {states}."
    ]
    if len(pods) == 0:
        lines[0] = f"{kind} {namespace}/{manifest['metadata']['name']} has no pod."
    node_names = [name for pod in pods if (name := (pod.get("spec") or {}).get("nodeName"))]
    reasons = nodestates.read_unschedulable_reasons(client, list(dict.fromkeys(node_names)))
    text = sentences.join_lines(
        [*lines, *missingpods.explain_nodes(pods, reasons), *missingpods.explain_workload(workload)]
    )
    data: Json = {"kind": kind, "namespace": namespace, "name": manifest["metadata"]["name"], "pods": dict(counts)}
    if pods:
        pod_text, pod_data = explain_pod(client, pods[0], namespace, cardwise_namespace)
        text, data = text + pod_text, data | {"first": pod_data}
    return text, data | {"text": text.splitlines()}


def _print_note(note: str) -> None:
    console.print_text(f"note: {note}", err=True)


def explain_pod(
    client: KubeClient,
    pod: Json,
    namespace: str,
    cardwise_namespace: str,
    add_note: Callable[[str], None] = _print_note,
) -> tuple[str, Json]:
    """Explain a pod. Returns the text and its JSON. Raises KubeError.

    add_note: called with each sentence about a part of the reason that cannot be seen.
    """
    # For a finished pod, nothing else has to be read.
    if (pod.get("status") or {}).get("phase") in names.FINISHED_PHASES:
        text = sentences.explain_pod(pod, None)
        return text, objects.as_json(pod, None, "", text)
    gang = podgroups.gang_of_pod(client, pod)
    settings = published.read_published(client, cardwise_namespace)
    is_pending = not pod["spec"].get("nodeName")
    cluster_state = None
    try:
        cluster_state = clusterstate.read_cluster_state(
            client, addresses=False, own_namespace=namespace, limits=settings.limits
        )
    except errors.Forbidden as error:
        add_note(f"only part of the reason is visible to you: {rights.describe_missing_right(error)}")
    if cluster_state is not None and cluster_state.partial:
        add_note(cluster_state.partial)
    if settings.note and cluster_state is not None and is_pending:  # the policy matters only until a pod is placed
        add_note(f"assuming that the extender's policy is {settings.policy}: {settings.note}")
    pods: Sequence[Json] = ()
    if cluster_state is not None:
        pods = _list_visible_pods(client, namespace)
        _mark_terminating(cluster_state, pods)
    engine = None
    if (
        cluster_state is not None
        and is_pending
        and policies.find_policy(published.policy_of_pod(pod, settings)).is_scored
    ):
        from cardwise.cli.cluster.engine import ClusterEngine  # noqa: PLC0415 - loads numpy

        free_loads, unread_nodes = liveworkload.read_free_loads(client)
        engine = ClusterEngine(cluster_state.ledger, free_loads, settings.workload)
        for note in filter(None, (unread_nodes, engine.note)):
            add_note(note)
    bare_uids = frozenset(str(pod["metadata"].get("uid")) for pod in pods if workloads.is_bare(pod))
    context = replace(
        _read_context(client, pod, cluster_state, gang, cardwise_namespace), bare_uids=bare_uids, pods=pods
    )
    gang_lines = blockers.explain_gang(gang) if gang is not None else ()
    text = sentences.explain_pod(pod, cluster_state, gang_lines, settings, engine, context=context)
    return text, objects.as_json(pod, cluster_state, published.policy_of_pod(pod, settings), text)


def _list_visible_pods(client: KubeClient, namespace: str) -> Sequence[Json]:
    """List the pods of all namespaces; without the right to do so, the pods of `namespace`. Raises KubeError."""
    try:
        return list(client.list_objects(paths.pods()))
    except errors.Forbidden:
        return list(client.list_objects(paths.pods(namespace)))


def _mark_terminating(cluster_state: ClusterState, pods: Sequence[Json]) -> None:
    """Mark the shares of pods that are already being deleted, so that no remedy names these pods as pods to delete."""
    terminating_uids = {pod["metadata"].get("uid") for pod in pods if pod["metadata"].get("deletionTimestamp")}
    for holding in cluster_state.ledger.holdings():
        if holding.uid in terminating_uids and not holding.phase_name:
            cluster_state.ledger.set_holding(replace(holding, phase_name=remedies.ENDING_PHASE))


def _read_context(
    client: KubeClient, pod: Json, cluster_state: ClusterState | None, gang: GangView | None, cardwise_namespace: str
) -> PodContext:
    """Read the facts about a pod besides cards; for a placed pod only the facts about its node."""
    webhook = installation.read_webhook(client, cardwise_namespace) if _lacks_rewrite(pod) else None
    if name := pod["spec"].get("nodeName"):
        is_starting = workloads.pod_state(pod) == "starting"
        warning = podevents.last_warning(client, pod) if is_starting else None
        nodes: list[Json] | None
        try:
            nodes = [client.get(paths.nodes(name))]
        except errors.NotFound:
            nodes = []
        except errors.Forbidden:
            nodes = None
        return PodContext(nodes, webhook=webhook, warning=warning)
    if webhook is not None:
        return PodContext(webhook=webhook)  # the pod is never placed, on any node
    try:
        nodes = list(client.list_objects(paths.nodes()))
    except errors.Forbidden:
        nodes = None
    pending_members, bound = (gang.waiting, frozenset(gang.bound)) if gang is not None else (frozenset(), frozenset())
    metadata = pod["metadata"]
    partners = {
        name: pod_request
        for namespace, name, pod_request in (cluster_state.waiting if cluster_state is not None else ())
        if namespace == metadata["namespace"] and name in pending_members and name != metadata["name"]
    }
    reachable_nodes = {}
    if gang is not None and partners and nodes is not None:
        members = client.list_objects(paths.pods(metadata["namespace"]), paths.label_query(names.GANG, gang.name))
        reachable_nodes = {member["metadata"]["name"]: eligible.eligible_nodes(member, nodes) for member in members}
    replicas = workloads.other_replicas(client, pod)
    deployments = schedulers.read_deployments(client, cardwise_namespace)
    return PodContext(
        nodes,
        former_replicas=replicas.from_former_template,
        hopeless_pods=replicas.of_same_controller | bound,
        pending_members=partners,
        reachable_nodes=reachable_nodes,
        bound_members=bound,
        missing_members=max(0, gang.minimum - len(gang.bound)) if gang is not None else 0,
        is_planned=gang is not None and bool(gang.reserved or gang.waiting_for),
        schedulers=schedulers.scheduler_names(deployments) if deployments is not None else None,
        stopped_schedulers=schedulers.stopped_scheduler_names(deployments or ()),
        leaderless_seconds=installation.leaderless_seconds(client, cardwise_namespace),
        directly_bound=tuple(
            dict.fromkeys(event.name for event in podevents.direct_bind_events(client, metadata["namespace"]))
        ),
        quotas=_read_quota_usage(client, metadata["namespace"]) if cluster_state is None else (),
    )


def _lacks_rewrite(pod: Json) -> bool:
    """Whether the pod requests cards or devices in a form that the webhook would have rewritten."""
    try:
        request.parse_mutated(pod)
    except request.NotRewritten:
        return True
    except InvalidRequest:
        return False
    return False


def _read_quota_usage(client: KubeClient, namespace: str) -> Sequence[EntryView]:
    """Read the GPUQuotas from their statuses; empty if they may not be read, or if the kind does not exist."""
    try:
        return totals.quota_entries_from_statuses(client.list_objects(paths.gpuquotas(namespace)))
    except (errors.Forbidden, errors.NotFound):
        return ()
