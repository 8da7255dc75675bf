"""`cardwise explain`: why a pod, or the pods of a workload, wait, or why they are where they are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import click

from cardwise.cli import console, options, rights
from cardwise.cli.cluster import (
    installation,
    nodestates,
    podevents,
    podgroups,
    published,
    schedulers,
    snapshots,
    workloads,
)
from cardwise.cli.cluster.podgroups import GangView
from cardwise.cli.explanation import absences, holdups, objects, remedies, sentences
from cardwise.cli.explanation.holdups import Around
from cardwise.cli.render import printing
from cardwise.core.api import names, policies, request
from cardwise.core.placement import totals
from cardwise.core.placement.totals import EntryView
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, survey
from cardwise.kube.client import KubeClient
from cardwise.kube.pods import eligible
from cardwise.kube.survey import Survey

_WORST: Final = ("waiting", "starting", "running", "ending", "ended")  # whom to explain first


@click.command()
@options.cluster
@options.namespace
@options.cardwise_namespace
@options.plain_output
@click.argument("what", nargs=-1, required=True, metavar="[KIND] NAME | KIND/NAME")
def explain(namespace: str | None, cardwise_namespace: str, output: str, what: tuple[str, ...]) -> None:
    """Why a pod waits, or why it is where it is; of a workload, how its pods are, and why the first of them waits.

    KIND is pod, deployment, statefulset, job, cronjob, replicaset or daemonset, also as kubectl abbreviates them.
    Without it NAME is a pod, or else a workload, of that name.
    """
    kind, name = _named(what)
    client = options.client()
    namespace = namespace or client.namespace
    found = find(client, kind, namespace, name)
    if found is None and kind in ("", workloads.POD):
        gone = absences.of_gone_pod(namespace, name, podevents.about_pod(client, namespace, name))
        if gone:
            text = sentences.text(gone)
            _show(text, absences.as_json(namespace, name, text), output)
            return
    if found is None:
        options.check_namespace(client, namespace)
        raise click.ClickException(
            f"there is no {kind or 'pod or workload'} {name!r} in namespace {namespace!r}; -n names another"
        )
    kind, obj = found
    if kind == workloads.POD:
        text, data = of_pod(client, obj, namespace, cardwise_namespace)
    else:
        text, data = of_workload(client, kind, obj, namespace, cardwise_namespace)
    _show(text, data, output)


def _show(text: str, data: Json, output: str) -> None:
    if output == "table":
        console.show(text)
    else:
        printing.dump(data, output)


def _named(words: tuple[str, ...]) -> tuple[str, str]:
    """Kind and name; "" where the kind is not said."""
    if len(words) == 1 and "/" not in words[0] and words[0]:
        return "", words[0]
    word, slash, name = words[0].partition("/")
    if not slash and len(words) == 2:
        name = words[1]
    if not name or len(words) != (1 if slash else 2):
        raise click.UsageError("name one thing: NAME, KIND NAME or KIND/NAME")
    kind = workloads.kind_of(word)
    if not kind:
        raise click.UsageError(f"{word!r} is no kind that makes pods; write one of: {', '.join(workloads.KINDS)}")
    return kind, name


def find(client: KubeClient, kind: str, namespace: str, name: str) -> tuple[str, Json] | None:
    """None where there is none. Raises KubeError, Forbidden too where it may be a pod that one may not read."""
    refused = None
    for one in (kind,) if kind else workloads.KINDS:
        try:
            obj = workloads.find(client, one, namespace, name)
        except errors.Forbidden as error:
            if one in (kind, workloads.POD):
                refused = error
            continue
        if obj is not None:
            return one, obj
    if refused is not None:
        raise refused
    return None


def of_workload(client: KubeClient, kind: str, obj: Json, namespace: str, installed: str) -> tuple[str, Json]:
    """What is said of the workload, and of the first of its pods; as `of_pod`."""
    made = workloads.made_by(client, kind, obj)
    pods = sorted(made.pods, key=lambda pod: (_WORST.index(workloads.state(pod)), pod["metadata"]["name"]))
    counts = Counter(map(workloads.state, pods))
    how = ", ".join(f"{counts[state]} {state}" for state in _WORST if counts[state]) or "none"
    lines = [f"{kind} {namespace}/{obj['metadata']['name']} has {len(pods)} pod{'s' * (len(pods) != 1)}: {how}."]
    if len(pods) == 0:
        lines[0] = f"{kind} {namespace}/{obj['metadata']['name']} has no pod."
    placed = [name for pod in pods if (name := (pod.get("spec") or {}).get("nodeName"))]
    closed = nodestates.read(client, list(dict.fromkeys(placed)))
    text = sentences.text([*lines, *absences.of_nodes(pods, closed), *absences.of_workload(made)])
    data: Json = {"kind": kind, "namespace": namespace, "name": obj["metadata"]["name"], "pods": dict(counts)}
    if pods:
        inner, first = of_pod(client, pods[0], namespace, installed)
        text, data = text + inner, data | {"first": first}
    return text, data | {"text": text.splitlines()}


def of_pod(client: KubeClient, pod: Json, namespace: str, installed: str) -> tuple[str, Json]:
    """What is said of the pod, for people and for programs. `installed`: Cardwise's namespace. Raises KubeError."""
    if (pod.get("status") or {}).get("phase") in names.FINISHED_PHASES:  # what is around it changes nothing any more
        text = sentences.explain(pod, None)
        return text, objects.as_json(pod, None, "", text)
    gang = podgroups.of_pod(client, pod)
    told = published.take(client, installed)
    waits = not pod["spec"].get("nodeName")
    seen = None
    try:
        seen = survey.take(client, addresses=False, own=namespace, limits=told.limits)
    except errors.Forbidden as error:
        console.say(f"note: why it is so cannot be said in full: {rights.missing(error)}", err=True)
    if seen is not None and seen.partial:
        console.say(f"note: {seen.partial}", err=True)
    if told.note and seen is not None and waits:  # of a placed pod no policy decides any more
        console.say(f"note: the extender's policy is taken as {told.policy}: {told.note}", err=True)
    pods: Sequence[Json] = ()
    if seen is not None:
        pods = _visible_pods(client, namespace)
        _mark_ending(seen, pods)
    engine = None
    if seen is not None and waits and published.in_force(pod, told) in policies.SCORED:
        from cardwise.cli.cluster.engine import SurveyedEngine  # noqa: PLC0415 - loads numpy

        left, unknown = snapshots.read_left(client)
        engine = SurveyedEngine(seen.ledger, left, told.workload)
        for note in filter(None, (unknown, engine.note)):
            console.say(f"note: {note}", err=True)
    bare = frozenset(str(pod["metadata"].get("uid")) for pod in pods if workloads.is_bare(pod))
    around = replace(_around(client, pod, seen, gang, installed), bare=bare)
    of_gang = holdups.gang(gang) if gang is not None else ()
    text = sentences.explain(pod, seen, of_gang, told, engine, around=around)
    return text, objects.as_json(pod, seen, published.in_force(pod, told), text)


def _visible_pods(client: KubeClient, namespace: str) -> Sequence[Json]:
    """All pods; where these may not be read, those of the namespace. Raises KubeError."""
    try:
        return list(client.objects(paths.pods()))
    except errors.Forbidden:
        return list(client.objects(paths.pods(namespace)))


def _mark_ending(seen: Survey, pods: Sequence[Json]) -> None:
    """Mark the shares of pods that are already being deleted, so that they are not named as pods to delete."""
    ending = {pod["metadata"].get("uid") for pod in pods if pod["metadata"].get("deletionTimestamp")}
    for holding in seen.ledger.holdings():
        if holding.uid in ending and not holding.mark:
            seen.ledger.hold(replace(holding, mark=remedies.ENDING))


def _around(client: KubeClient, pod: Json, seen: Survey | None, gang: GangView | None, installed: str) -> Around:
    """What is known beside cards; of a placed pod only its node is needed."""
    webhook = installation.webhook(client, installed) if _is_unwritten(pod) else None
    if name := pod["spec"].get("nodeName"):
        starts = workloads.state(pod) == "starting"
        warning = podevents.last_warning(client, pod) if starts else None
        nodes: list[Json] | None
        try:
            nodes = [client.get(paths.nodes(name))]
        except errors.NotFound:
            nodes = []
        except errors.Forbidden:
            nodes = None
        return Around(nodes, webhook=webhook, warning=warning)
    if webhook is not None:
        return Around(webhook=webhook)  # it is never placed, whatever the nodes are
    try:
        nodes = list(client.objects(paths.nodes()))
    except errors.Forbidden:
        nodes = None
    waiting, bound = (gang.waiting, frozenset(gang.bound)) if gang is not None else (frozenset(), frozenset())
    metadata = pod["metadata"]
    partners = {
        name: asked
        for namespace, name, asked in (seen.waiting if seen is not None else ())
        if namespace == metadata["namespace"] and name in waiting and name != metadata["name"]
    }
    reach = {}
    if gang is not None and partners and nodes is not None:
        members = client.objects(paths.pods(metadata["namespace"]), paths.with_label(names.GANG, gang.name))
        reach = {member["metadata"]["name"]: eligible.nodes(member, nodes) for member in members}
    replicas = workloads.replicas(client, pod)
    deployments = schedulers.take(client, installed)
    return Around(
        nodes,
        former=replicas.former,
        fellows=replicas.fellows | bound,
        partners=partners,
        reach=reach,
        bound=bound,
        needed=max(0, gang.minimum - len(gang.bound)) if gang is not None else 0,
        is_planned=gang is not None and bool(gang.held or gang.waiting_for),
        schedulers=schedulers.named(deployments) if deployments is not None else None,
        stopped=schedulers.stopped(deployments or ()),
        silent=installation.silent_seconds(client, installed),
        bound_past=tuple(dict.fromkeys(event.name for event in podevents.bound_past(client, metadata["namespace"]))),
        quotas=_quotas(client, metadata["namespace"]) if seen is None else (),
    )


def _is_unwritten(pod: Json) -> bool:
    """Whether it asks for cards or devices in a form that the webhook would have rewritten."""
    try:
        request.parse_mutated(pod)
    except request.NotRewritten:
        return True
    except InvalidRequest:
        return False
    return False


def _quotas(client: KubeClient, namespace: str) -> Sequence[EntryView]:
    """The GPUQuotas as their statuses show them; none where they may not be read or are of no kind that is known."""
    try:
        return totals.entries_by_status(client.objects(paths.gpuquotas(namespace)))
    except (errors.Forbidden, errors.NotFound):
        return ()
