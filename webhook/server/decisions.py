"""Decides a review: one function per path, pure but for the look-ups it is handed.

Decide, then apply: the Flask shell only decodes, calls one of these and encodes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from cardwise.core.api import names, request
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.mps import Mode, SmPercent
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB, Unit
from webhook.cluster.offers import Offers
from webhook.pods import (
    agent,
    classes,
    defaults,
    devices,
    environment,
    frameworks,
    gangs,
    mpsmode,
    mutate,
    reapplied,
    units,
    validate,
)
from webhook.pods.agent import AgentSettings
from webhook.pods.defaults import Defaults
from webhook.pods.limitranges import Bounds
from webhook.pods.validate import CardSizes, Oversize
from webhook.quotas import gpuquotas, quotas, resourceclasses
from webhook.quotas.gpuquotas import QuotaStanding
from webhook.server import advice, patches, sizes
from webhook.server.review import CREATE, Decision, Review, shaped_like_pod
from webhook.templates import templates
from webhook.templates.spellings import NvidiaGpu, Vocabulary

_IN_POD: Final = ("spec.", "metadata.")  # how a message begins that names a field of the pod
_MOST_WARNINGS: Final = 8


class Lookups(Protocol):
    """What the webhook knows of the cluster."""

    def defaults(self, namespace: str) -> Defaults | None:
        """The defaults of a namespace that has opted in; None for others (and for those not seen yet)."""

    def fresh_defaults(self, namespace: str) -> Defaults | None:
        """As `defaults`, but asks the API server where the namespace is not known. Raises KubeError."""

    def cards(self, resource_class: ResourceClass | None = None, nodes: Collection[str] | None = None) -> CardSizes:
        """The sizes of the cards or devices of the class, or of all cards; of these nodes only."""

    def selects(self, resource_class: ResourceClass) -> bool:
        """Whether a card or a device that there is now is of the class, which need not be known."""

    def classes(self) -> Mapping[str, ResourceClass]:
        """The ResourceClasses that are known, by name."""

    def resource_class(self, name: str) -> ResourceClass | None:
        """A class, None where there is none; asks the API server where it is not known. Raises KubeError."""

    def offers(self) -> Offers | None:
        """What nodes offer; None where that is not known."""

    def quotas(self, namespace: str) -> Sequence[QuotaStanding]:
        """The GPUQuotas of the namespace."""

    def other_number(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        """A living pod of the gang that says another number, and which; None where none is known."""

    def bounds(self, namespace: str) -> Bounds:
        """What the LimitRanges of the namespace say."""

    def mps_scopes(self) -> frozenset[str]:
        """How many cards a daemon of the MPS managers serves that there are; empty where there is no manager."""

    def podgroups(self) -> bool:
        """Whether the cluster serves PodGroups of Kubernetes. Raises KubeError."""

    def pod(self, namespace: str, name: str, caller: str) -> Json | None:
        """The pod, from the API server; None where it cannot be read.

        caller: the address for which it is looked up, "" if that is an API server's for certain.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """`runtime_class` "" leaves pods as they are. `gang_schedulers`: those that ask the extender. `mps` and
    `sm_percent`: of pods with a share that do not say, in namespaces that do not. `least_mps`: less no pod that shares
    cards may say, wherever it is. `scheduler`: of pods that ask for cards and name none. `tolerated`: what pods with
    cards tolerate of nodes. `least_share`: MiB of a card below which a share is warned about. `callers_known`: nobody
    but the API server asks; else an answer does not say what others in the namespace have or use. `unit`: what bare
    numbers of gpu-mem count where the object comes from; the path says it, so the API server has chosen.
    """

    runtime_class: str = ""
    oversize: Oversize = "refuse"
    nvidia_gpu: NvidiaGpu = "leave"
    exempt_namespaces: frozenset[str] = frozenset()
    gang_schedulers: frozenset[str] = frozenset({gangs.DEFAULT_SCHEDULER})
    mps: Mode = Mode.PREFERRED
    least_mps: Mode = Mode.OFF
    sm_percent: SmPercent = SmPercent.CORE
    share_agent: AgentSettings = field(default_factory=AgentSettings)
    scheduler: str = ""
    tolerated: tuple[Json, ...] = ()
    least_share: int = 0
    callers_known: bool = True
    unit: Unit = Unit.MIB


Decide = Callable[[Review, Lookups, WebhookSettings], Decision]


def on_mutate(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /mutate: pods that ask for a card or a device, their templates, quotas, LimitRanges, ResourceClasses.

    Raises KubeError.
    """
    match review.resource:
        case "pods" if _concerns(review, settings):
            return _mutate_pod(review, view, view.defaults(review.namespace), settings, apply=False)
        case "pods" if review.old is not None and review.namespace not in settings.exempt_namespaces:
            return _refusable(lambda: _reapply_pod(review, settings))
        case "resourcequotas":
            return _refusable(lambda: _mutate_quota(review, view, settings))
        case "limitranges":
            return _refusable(lambda: _mutate_limit_range(review, settings))
        case "resourceclasses":
            return _refusable(lambda: _mutate_class(review))
        case kind if kind in templates.KINDS and review.namespace not in settings.exempt_namespaces:
            return _refusable(lambda: _mutate_workload(review, view, settings))
    return Decision()


def on_defaults(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /mutate/defaults: pods of a namespace that opted in. Raises KubeError."""
    if review.resource != "pods" or not _concerns(review, settings):
        return Decision()
    known = view.fresh_defaults(review.namespace)
    if known is None or not known.gpu_mem or not defaults.wants(review.object):
        return Decision()  # it gets nothing here, so nothing of it can be wrong
    return _mutate_pod(review, view, known, settings, apply=True)


def on_validate(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /validate. Raises KubeError."""
    match review.resource:
        case "pods" if _concerns(review, settings):
            return _refusable(lambda: _validate_pod(review, view, settings))
        case "pods/binding" | "bindings":
            return _refusable(lambda: _validate_binding(review, view, settings))
        case "namespaces":
            return _refusable(lambda: _validate_namespace(review))
        case "resourceclasses":
            return _refusable(lambda: _validate_class(review, view))
        case "gpuquotas":
            return _refusable(lambda: _validate_gpu_quota(review, view))
        case kind if kind in templates.KINDS and review.namespace not in settings.exempt_namespaces:
            return _refusable(lambda: _validate_workload(review, settings))
    return Decision()


def on_advise(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /advise: warnings for pods and quotas that name what nobody reads, and for all that makes pods which could
    never run.

    Never a refusal. Raises KubeError.
    """
    if review.namespace in settings.exempt_namespaces:
        return Decision()
    offers = view.offers()
    match review.resource:
        case "pods":
            found = advice.foreign_names(review.object, offers, view.classes()) if offers else ()
            return Decision(warnings=found + advice.keys(review.object, settings.gang_schedulers))
        case "resourcequotas":
            standings = view.quotas(review.namespace)
            return Decision(warnings=advice.resource_quota(review.object, standings, offers, view.classes()))
        case "limitranges":
            return Decision(warnings=advice.limit_range(review.object, offers, view.classes()))
    if templates.is_controlled(review.object):
        return Decision()  # whoever wrote its owner has been told
    told: dict[str, None] = {}
    queued = advice.QUEUE in labels_of(review.object)
    for path, template in templates.all_of(review.object, review.resource):
        texts = _of_template(template, review.namespace, view, settings)
        if queued and shaped_like_pod(template):
            texts += advice.of_kueue(template, settings.unit)
        told |= {templates.field(path, text) if text.startswith(_IN_POD) else text: None for text in texts}
    return Decision(warnings=tuple(told)[:_MOST_WARNINGS])


def _of_template(template: Json, namespace: str, view: Lookups, settings: WebhookSettings) -> tuple[str, ...]:
    """What a person who creates such a pod is told; of a controller's pods nobody is."""
    if not shaped_like_pod(template):
        return ()
    pod = {"metadata": template.get("metadata") or {}, "spec": template.get("spec") or {}}
    try:
        sizes.check(pod)
        pod, told = _rewritten(pod, namespace, view, view.defaults(namespace), settings)
        return told + _judged(pod, namespace, view, settings)
    except InvalidRequest as error:
        return (f"{error}; its pods will be refused",)


def _concerns(review: Review, settings: WebhookSettings) -> bool:
    """Pods are rewritten and judged when they are created; mirrors of static pods are the node's."""
    annotations = annotations_of(review.object)
    # By the word of a kubelet only: a user may write the annotation too.
    mirror = names.MIRROR in annotations and review.username.startswith("system:node:")
    return review.operation == CREATE and review.namespace not in settings.exempt_namespaces and not mirror


def _vocabulary(view: Lookups, settings: WebhookSettings) -> Vocabulary:
    return Vocabulary(view.resource_class, take_nvidia=settings.nvidia_gpu == "take")


def _mutate_pod(
    review: Review, view: Lookups, known: Defaults | None, settings: WebhookSettings, *, apply: bool
) -> Decision:
    def decide() -> Decision:
        sizes.check(review.object)
        after, warnings = _rewritten(review.object, review.namespace, view, known, settings, apply=apply)
        return _patch(review.object, after, warnings)

    return _refusable(decide)


def _rewritten(
    obj: Json, namespace: str, view: Lookups, known: Defaults | None, settings: WebhookSettings, *, apply: bool = False
) -> tuple[Json, tuple[str, ...]]:
    """The pod as it should be, and warnings. `known` is of its namespace. Raises InvalidRequest, KubeError."""
    mutate.check_counts(obj)
    gang = gangs.of(obj, settings.gang_schedulers)

    def most_mib() -> int:
        cards = view.cards()
        return cards.largest * cards.most if settings.oversize == "refuse" else 0

    pod = units.spelled(obj, settings.unit, most_mib)
    pod, given = classes.rewritten(pod, _vocabulary(view, settings)), Defaults()
    # First of all: where it was placed decides what it takes of its namespace's defaults.
    pod, unplaced = mutate.unplaced(pod, gang)
    if known is not None and defaults.wants(pod):
        known.check(namespace)
        given = known
        if apply and gang is None and request.parse(pod) is None:
            pod = units.spelled(defaults.applied(pod, known), settings.unit, most_mib)
    replaced = devices.replaced(obj, pod)
    asked = request.parse(pod)
    native: tuple[str, ...] = ()
    if gang is None and asked is not None:
        coming = mutate.scheduled(pod, settings.scheduler)
        gang = gangs.of(coming, settings.gang_schedulers)
        if gang is None:
            gang, native = gangs.native(coming, settings.gang_schedulers, view.podgroups)
    if asked is not None and asked.containers:
        percent = SmPercent(given.sm_percent or settings.sm_percent)
        bound = mpsmode.least(asked, settings.least_mps, known.least_mps if known is not None else "")
        default = Mode(given.mps or settings.mps)
        pod = mpsmode.noted(pod, asked, default, view.mps_scopes, percent=percent, bound=bound)
        pod = frameworks.noted(pod, given.frameworks)
    injected = agent.inject(pod, asked, settings.share_agent, lambda: view.bounds(namespace), view.mps_scopes)
    mutation = mutate.mutate(
        injected.pod,
        runtime_class=settings.runtime_class,
        policy=given.policy,
        in_gang=gang is not None,
        agent=injected.key,
        scheduler=settings.scheduler,
        tolerated=settings.tolerated,
    )
    joined, told = gangs.joined(mutation.pod, gang)
    return joined, unplaced + replaced + injected.warnings + mutation.warnings + native + told


def _reapply_pod(review: Review, settings: WebhookSettings) -> Decision:
    sizes.check(review.object, update=True)
    pod = reapplied.as_stored(review.object, review.old or {}, settings.unit, settings.tolerated)
    return _patch(review.object, pod)


def _mutate_workload(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    path, template = templates.template_of(review.object, review.resource)
    sizes.check(template, f"{path}.", update=review.update)
    vocabulary = _vocabulary(view, settings)
    workload = templates.rewrite(review.object, review.old, review.resource, vocabulary, update=review.update)
    return _patch(review.object, workload)


def _mutate_class(review: Review) -> Decision:
    sizes.check_object(review.object)
    return _patch(review.object, resourceclasses.normal(review.object, review.old))


def _mutate_quota(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    quota, warnings = quotas.resource_quota(
        review.object, review.old, _vocabulary(view, settings), update=review.update, unit=settings.unit
    )
    return _patch(review.object, quota, tuple(warnings))


def _mutate_limit_range(review: Review, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    limits, warnings = quotas.limit_range(review.object, review.old, unit=settings.unit)
    return _patch(review.object, limits, tuple(warnings))


def _validate_pod(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check(review.object)
    warnings = _judged(review.object, review.namespace, view, settings)
    gang = gangs.of(review.object, settings.gang_schedulers)
    if gang is not None:
        gangs.check_number(review.object, gang, review.namespace, view.other_number, told=settings.callers_known)
    return Decision(warnings=warnings)


def _judged(pod: Json, namespace: str, view: Lookups, settings: WebhookSettings) -> tuple[str, ...]:
    """Warnings about a pod as it should be. Raises InvalidRequest, KubeError."""
    asked, told = validate.pod(pod, view, settings.oversize)
    gang = gangs.of(pod, settings.gang_schedulers)
    if gang is None and asked is not None:
        gang, _ = gangs.native(pod, settings.gang_schedulers, view.podgroups)
    told += gangs.check(pod, gang, asked)
    offers = view.offers()
    if offers is not None:
        told += advice.foreign_names(pod, offers, view.classes())
    unread = advice.keys(pod, settings.gang_schedulers)
    if asked is None:
        return told + unread
    left = offers.left(pod) if offers is not None else None
    told += advice.placing(pod, settings.gang_schedulers, offers, left)
    if not told:
        told += validate.kept_to(asked, view, left)
    told += validate.small(asked, view, settings.least_share)
    told += _judge_quotas(asked, view.quotas(namespace), view, settings)
    return told + _judge_sharing(pod, namespace, asked, view, settings) + unread


def _judge_quotas(
    asked: PodRequest, standings: Sequence[QuotaStanding], view: Lookups, settings: WebhookSettings
) -> tuple[str, ...]:
    """Warnings about a pod that asks for cards, by the GPUQuotas of its namespace."""

    def smallest(container: ContainerRequest) -> MiB:
        of_class = view.resource_class(container.resource_class) if container.resource_class else None
        return max(view.cards(of_class).smallest, MiB(1))

    def now() -> tuple[str, ...]:
        gpuquotas.check(asked, standings, smallest, told=settings.callers_known)
        return ()

    gpuquotas.check(asked, standings, told=settings.callers_known)
    return validate.or_waits(settings.oversize, now, "a smaller card comes or the quota is raised")


def _judge_sharing(
    pod: Json, namespace: str, asked: PodRequest, view: Lookups, settings: WebhookSettings
) -> tuple[str, ...]:
    """Warnings about a pod that asks for something: its environment, its agent and what it says of MPS."""
    known = view.defaults(namespace)
    cards = {container.key: container for container in asked.containers}
    mps = bool(cards) and mpsmode.of(pod).wanted
    for container in request.containers(pod):
        environment.check(container.spec.get("env") or [], cards.get(container.key), container.path, mps=mps)
    agent.check(pod, asked)
    if not cards:
        return ()
    mpsmode.check_least(pod, mpsmode.least(asked, settings.least_mps, known.least_mps if known else ""))
    judge = partial(mpsmode.judged, pod, asked, view.mps_scopes)
    return validate.or_waits(settings.oversize, judge, "one serves several")


def _validate_workload(review: Review, settings: WebhookSettings) -> Decision:
    path, template = templates.template_of(review.object, review.resource)
    sizes.check(template, f"{path}.", update=review.update)
    return Decision(warnings=gangs.workload(review.object, review.old, review.resource, settings.gang_schedulers))


def _validate_binding(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    # The legacy resource names the pod in the object only.
    name = review.name or ((review.object.get("metadata") or {}).get("name") or "")
    pod = view.pod(review.namespace, name, "" if settings.callers_known else review.caller)
    if pod is not None:
        validate.binding(pod)
    return Decision()


def _validate_class(review: Review, view: Lookups) -> Decision:
    sizes.check_object(review.object)
    return Decision(warnings=resourceclasses.warnings(review.object, review.old, view.selects, view.cards))


def _validate_gpu_quota(review: Review, view: Lookups) -> Decision:
    sizes.check_object(review.object)
    return Decision(warnings=gpuquotas.validate(review.object, view.resource_class))


def _validate_namespace(review: Review) -> Decision:
    sizes.check_object(review.object)
    known = defaults.of(review.object)
    if known is not None:
        known.check(str((review.object.get("metadata") or {}).get("name", review.name)))
    return Decision(warnings=advice.namespace(review.object))


def _patch(before: Json, after: Json, warnings: tuple[str, ...] = ()) -> Decision:
    # What was left as it was is the same object: no need to compare.
    patch = patches.between(before, after) if after is not before else []
    return Decision(patch=patch, warnings=warnings)


def _refusable(decide: Callable[[], Decision]) -> Decision:
    try:
        return decide()
    except InvalidRequest as error:
        return Decision(allowed=False, message=str(error), about=error.field)
