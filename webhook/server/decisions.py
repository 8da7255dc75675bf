"""Decides reviews: one function per path, pure except for lookups in the view.

The Flask layer (`app`) only decodes, calls one of these functions and encodes.
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
from webhook.cluster import namespaces
from webhook.cluster.cards import CardSizes
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.cluster.limitranges import Bounds
from webhook.cluster.namespaces import Defaults
from webhook.cluster.offers import NodeOffers
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
from webhook.pods.validate import OversizePolicy
from webhook.quotas import gpuquotas, quotas, resourceclasses
from webhook.server import advice, patches, sizes
from webhook.server.review import CREATE, Decision, Review, is_pod_shaped
from webhook.templates import templates
from webhook.templates.spellings import NameTranslator, NvidiaGpu

_IN_POD: Final = ("spec.", "metadata.")  # the prefixes of messages that name a field of the pod
_MAX_WARNINGS: Final = 8
_MIN_WEIGHT: Final = 8


class Lookups(Protocol):
    """The webhook's knowledge of the cluster, for the decisions."""

    def defaults(self, namespace: str) -> Defaults | None:
        """The defaults of a namespace that opted in; None for others, and for namespaces that are not known yet."""

    def fresh_defaults(self, namespace: str) -> Defaults | None:
        """The defaults of a namespace that opted in, None for others; reads an unknown namespace from the API server.
        Raises KubeError.
        """

    def cards(self, resource_class: ResourceClass | None = None, nodes: Collection[str] | None = None) -> CardSizes:
        """The sizes of the cards or devices of the class, or of all cards; `nodes`: of these nodes only."""

    def reviewed_class_cards(self, resource_class: ResourceClass) -> CardSizes | None:
        """As `cards`, for the class in a review, which any client may send; None if comparing its cards takes too
        long.
        """

    def classes(self) -> Mapping[str, ResourceClass]:
        """The known ResourceClasses, by name."""

    def resource_class(self, name: str) -> ResourceClass | None:
        """The class; None if it does not exist. Reads an unknown class from the API server. Raises KubeError."""

    def offers(self) -> NodeOffers | None:
        """The offers of the nodes; None if they are not listed yet."""

    def quotas(self, namespace: str) -> Sequence[QuotaUsage]:
        """The GPUQuotas of the namespace."""

    def conflicting_member(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        """The name of an existing pod of the gang that names another size, and that size; None if no such pod is
        known.
        """

    def bounds(self, namespace: str) -> Bounds:
        """The bounds of the namespace's LimitRanges."""

    def mps_scopes(self) -> frozenset[str]:
        """The scopes of all MPS daemons; empty without an MPS manager."""

    def serves_podgroups(self) -> bool:
        """Whether the cluster serves Kubernetes' PodGroups. Raises KubeError."""

    def pod(self, namespace: str, name: str, caller: str) -> Json | None:
        """The pod, from the API server; None if it cannot be read.

        caller: the address of the client; "" if it is certainly an API server.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The webhook's settings.

    runtime_class: the RuntimeClass for pods that request GPUs and name none; "" for none.
    gang_schedulers: the schedulers that call the extender.
    mps, sm_percent: the defaults for pods with a share, if neither the pod nor its namespace sets a value.
    min_mps: the weakest MPS mode that a pod which shares cards may have, in any namespace.
    scheduler: the scheduler for pods that request GPUs and name none.
    tolerated: tolerations for pods with cards.
    min_share: MiB; smaller shares get a warning.
    callers_known: whether only the API server can call. If so, answers may show the names and the use of other objects
        in the namespace.
    unit: the unit of bare gpu-mem numbers, by the path, which the API server chooses.
    """

    runtime_class: str = ""
    oversize: OversizePolicy = "refuse"
    nvidia_gpu: NvidiaGpu = "leave"
    exempt_namespaces: frozenset[str] = frozenset()
    gang_schedulers: frozenset[str] = frozenset({gangs.DEFAULT_SCHEDULER})
    mps: Mode = Mode.PREFERRED
    min_mps: Mode = Mode.OFF
    sm_percent: SmPercent = SmPercent.CORE
    share_agent: AgentSettings = field(default_factory=AgentSettings)
    scheduler: str = ""
    tolerated: tuple[Json, ...] = ()
    min_share: int = 0
    callers_known: bool = True
    unit: Unit = Unit.MIB


Decide = Callable[[Review, Lookups, WebhookSettings], Decision]


def decide_mutate(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /mutate: rewrites pods that request a card or a device, their templates, quotas, LimitRanges,
    ResourceClasses.

    Raises KubeError.
    """
    match review.resource:
        case "pods" if _must_rewrite_pod(review, settings):
            return _mutate_pod(review, view, view.defaults(review.namespace), settings, apply=False)
        case "pods" if review.old is not None and review.namespace not in settings.exempt_namespaces:
            return _refuse_invalid(lambda: _reapply_pod(review, settings))
        case "resourcequotas":
            return _refuse_invalid(lambda: _mutate_quota(review, view, settings))
        case "limitranges":
            return _refuse_invalid(lambda: _mutate_limit_range(review, settings))
        case "resourceclasses":
            return _refuse_invalid(lambda: _mutate_class(review))
        case kind if kind in templates.KINDS and review.namespace not in settings.exempt_namespaces:
            return _refuse_invalid(lambda: _mutate_workload(review, view, settings))
    return Decision()


def decide_defaults(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /mutate/defaults: rewrites pods of a namespace that opted in. Raises KubeError."""
    if review.resource != "pods" or not _must_rewrite_pod(review, settings):
        return Decision()
    namespace_defaults = view.fresh_defaults(review.namespace)
    if namespace_defaults is None or not namespace_defaults.gpu_mem or not defaults.takes_defaults(review.object):
        return Decision()  # this path does not change the pod, so it has no error to report
    return _mutate_pod(review, view, namespace_defaults, settings, apply=True)


def decide_validate(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /validate: checks pods, Bindings, namespaces, classes, quotas and workloads. Raises KubeError."""
    match review.resource:
        case "pods" if _must_rewrite_pod(review, settings):
            return _refuse_invalid(lambda: _validate_pod(review, view, settings))
        case "pods/binding" | "bindings":
            return _refuse_invalid(lambda: _validate_binding(review, view, settings))
        case "namespaces":
            return _refuse_invalid(lambda: _validate_namespace(review))
        case "resourceclasses":
            return _refuse_invalid(lambda: _validate_class(review, view))
        case "gpuquotas":
            return _refuse_invalid(lambda: _validate_gpu_quota(review, view))
        case kind if kind in templates.KINDS and review.namespace not in settings.exempt_namespaces:
            return _refuse_invalid(lambda: _validate_workload(review, settings))
    return Decision()


def decide_advise(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /advise: warns about names that no program reads, and about workloads whose pods could never run.

    Never a refusal. Raises KubeError.
    """
    if review.namespace in settings.exempt_namespaces:
        return Decision()
    offers = view.offers()
    match review.resource:
        case "pods":
            warnings = advice.warn_foreign_resources(review.object, offers, view.classes()) if offers else ()
            return Decision(warnings=warnings + advice.warn_unread_keys(review.object, settings.gang_schedulers))
        case "resourcequotas":
            quota_usages = view.quotas(review.namespace)
            return Decision(
                warnings=advice.warn_resource_quota(
                    review.object, quota_usages, offers, view.classes(), settings.min_share
                )
            )
        case "limitranges":
            return Decision(warnings=advice.warn_limit_range(review.object, offers, view.classes(), settings.min_share))
    if templates.is_controlled(review.object):
        return Decision()  # the author of the owner has got the warnings
    unique_texts: dict[str, None] = {}
    is_queued = advice.QUEUE in labels_of(review.object)
    weight = 0
    for path, template in templates.find_templates(review.object, review.resource):
        if not is_pod_shaped(template):
            continue
        if weight and weight + _template_weight(template) > sizes.MAX_CONTAINERS:
            break  # checking all templates must take no longer than checking the largest pod
        weight += _template_weight(template)
        texts = _warn_template(template, review.namespace, view, settings)
        if is_queued:
            texts += advice.warn_kueue_amounts(template, settings.unit)
        unique_texts |= {
            templates.field_in_workload(path, text) if text.startswith(_IN_POD) else text: None for text in texts
        }
        if len(unique_texts) >= _MAX_WARNINGS:
            break  # further warnings would not be shown
    return Decision(warnings=tuple(unique_texts)[:_MAX_WARNINGS])


def _template_weight(template: Json) -> int:
    """The time to check a template, measured in containers. Checking its nodes takes as long as `_MIN_WEIGHT`
    containers.
    """
    return max(_MIN_WEIGHT, sum(1 for _ in request.containers(template)))


def _warn_template(template: Json, namespace: str, view: Lookups, settings: WebhookSettings) -> tuple[str, ...]:
    """The warnings about the pods of the template. Users get these warnings for the workload, because they do not see
    warnings about pods that a controller creates.
    """
    pod = {"metadata": template.get("metadata") or {}, "spec": template.get("spec") or {}}
    try:
        sizes.check_template(pod)
        pod, warnings = _rewrite_pod(pod, namespace, view, view.defaults(namespace), settings)
        return warnings + _check_pod(pod, namespace, view, settings)
    except InvalidRequest as error:
        return (f"{error}; its pods will be refused",)


def _must_rewrite_pod(review: Review, settings: WebhookSettings) -> bool:
    """Whether pods of this review are rewritten and checked: only at creation, and not mirrors of static pods."""
    annotations = annotations_of(review.object)
    # The annotation counts only if a kubelet sent it, because users may write it too.
    mirror = names.MIRROR in annotations and review.username.startswith("system:node:")
    return review.operation == CREATE and review.namespace not in settings.exempt_namespaces and not mirror


def _name_translator(view: Lookups, settings: WebhookSettings) -> NameTranslator:
    return NameTranslator(view.resource_class, take_nvidia=settings.nvidia_gpu == "take")


def _mutate_pod(
    review: Review, view: Lookups, namespace_defaults: Defaults | None, settings: WebhookSettings, *, apply: bool
) -> Decision:
    def decide() -> Decision:
        sizes.check_template(review.object)
        after, warnings = _rewrite_pod(review.object, review.namespace, view, namespace_defaults, settings, apply=apply)
        return _make_patch(review.object, after, warnings)

    return _refuse_invalid(decide)


def _rewrite_pod(
    manifest: Json,
    namespace: str,
    view: Lookups,
    namespace_defaults: Defaults | None,
    settings: WebhookSettings,
    *,
    apply: bool = False,
) -> tuple[Json, tuple[str, ...]]:
    """The rewritten pod, and warnings. Raises InvalidRequest, KubeError."""
    mutate.check_counts(manifest)
    gang = gangs.gang_of(manifest, settings.gang_schedulers)

    def largest_node_mib() -> int:
        cards = view.cards()
        return cards.largest * cards.max_cards if settings.oversize == "refuse" else 0

    pod = units.add_units(manifest, settings.unit, largest_node_mib)
    pod, pod_defaults = classes.rewrite_classes(pod, _name_translator(view, settings)), Defaults()
    # The placement is removed before the defaults are applied, because a placed pod gets no defaults.
    pod, placement_warnings = mutate.remove_placement(pod, gang)
    if namespace_defaults is not None and defaults.takes_defaults(pod):
        defaults.check(namespace_defaults, namespace)
        pod_defaults = namespace_defaults
        if apply and gang is None and request.parse(pod) is None:
            pod = units.add_units(defaults.apply_defaults(pod, namespace_defaults), settings.unit, largest_node_mib)
    device_warnings = devices.warn_replaced(manifest, pod)
    pod_request = request.parse(pod)
    podgroup_warnings: tuple[str, ...] = ()
    if gang is None and pod_request is not None:
        pod_with_scheduler = mutate.assign_scheduler(pod, settings.scheduler)
        gang = gangs.gang_of(pod_with_scheduler, settings.gang_schedulers)
        if gang is None:
            gang, podgroup_warnings = gangs.podgroup_gang_of(
                pod_with_scheduler, settings.gang_schedulers, view.serves_podgroups
            )
    if pod_request is not None and pod_request.containers:
        sm_percent = SmPercent(pod_defaults.sm_percent or settings.sm_percent)
        min_mode = mpsmode.min_mode(
            pod_request, settings.min_mps, namespace_defaults.min_mps if namespace_defaults is not None else ""
        )
        default = Mode(pod_defaults.mps or settings.mps)
        pod = mpsmode.annotate_mode(pod, pod_request, default, view.mps_scopes, percent=sm_percent, bound=min_mode)
        pod = frameworks.annotate_hook(pod, pod_defaults.frameworks)
    injection = agent.inject_agent(
        pod, pod_request, settings.share_agent, lambda: view.bounds(namespace), view.mps_scopes
    )
    mutation = mutate.mutate(
        injection.pod,
        runtime_class=settings.runtime_class,
        policy=pod_defaults.policy,
        in_gang=gang is not None,
        agent=injection.key,
        scheduler=settings.scheduler,
        tolerated=settings.tolerated,
    )
    pod_in_gang, gang_warnings = gangs.join_gang(mutation.pod, gang)
    return (
        pod_in_gang,
        placement_warnings
        + device_warnings
        + injection.warnings
        + mutation.warnings
        + podgroup_warnings
        + gang_warnings,
    )


def _reapply_pod(review: Review, settings: WebhookSettings) -> Decision:
    sizes.check_template(review.object, update=True)
    pod = reapplied.restore_stored_names(review.object, review.old or {}, settings.unit, settings.tolerated)
    return _make_patch(review.object, pod)


def _mutate_workload(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    path, template = templates.template_of(review.object, review.resource)
    sizes.check_template(template, f"{path}.", update=review.is_update)
    translator = _name_translator(view, settings)
    workload = templates.rewrite_workload(
        review.object, review.old, review.resource, translator, update=review.is_update
    )
    return _make_patch(review.object, workload)


def _mutate_class(review: Review) -> Decision:
    sizes.check_object(review.object)
    return _make_patch(review.object, resourceclasses.normalize(review.object, review.old))


def _mutate_quota(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    quota, warnings = quotas.rewrite_resource_quota(
        review.object, review.old, _name_translator(view, settings), update=review.is_update, unit=settings.unit
    )
    return _make_patch(review.object, quota, tuple(warnings))


def _mutate_limit_range(review: Review, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    limits, warnings = quotas.rewrite_limit_range(review.object, review.old, unit=settings.unit)
    return _make_patch(review.object, limits, tuple(warnings))


def _validate_pod(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_template(review.object)
    warnings = _check_pod(review.object, review.namespace, view, settings)
    gang = gangs.gang_of(review.object, settings.gang_schedulers)
    if gang is not None:
        gangs.check_number(
            review.object, gang, review.namespace, view.conflicting_member, detailed=settings.callers_known
        )
    return Decision(warnings=warnings)


def _check_pod(pod: Json, namespace: str, view: Lookups, settings: WebhookSettings) -> tuple[str, ...]:
    """Warnings about a rewritten pod. Raises InvalidRequest, KubeError."""
    pod_request, warnings = validate.check_pod(pod, view, settings.oversize)
    gang = gangs.gang_of(pod, settings.gang_schedulers)
    if gang is None and pod_request is not None:
        gang, _ = gangs.podgroup_gang_of(pod, settings.gang_schedulers, view.serves_podgroups)
    warnings += gangs.check(pod, gang, pod_request)
    offers = view.offers()
    if offers is not None:
        warnings += advice.warn_foreign_resources(pod, offers, view.classes())
    key_warnings = advice.warn_unread_keys(pod, settings.gang_schedulers)
    if pod_request is None:
        return warnings + key_warnings
    admitting = offers.admitting_nodes(pod) if offers is not None else None
    warnings += advice.warn_placement(pod, settings.gang_schedulers, offers, admitting)
    if not warnings:
        warnings += validate.check_nodes(pod_request, view, admitting)
    warnings += validate.warn_small_shares(pod_request, view, settings.min_share)
    warnings += _check_quotas(pod_request, view.quotas(namespace), view, settings)
    return warnings + _check_container_settings(pod, namespace, pod_request, view, settings) + key_warnings


def _check_quotas(
    pod_request: PodRequest, quota_usages: Sequence[QuotaUsage], view: Lookups, settings: WebhookSettings
) -> tuple[str, ...]:
    """Warnings about a pod that requests cards, by its namespace's GPUQuotas."""

    def smallest(container: ContainerRequest) -> MiB:
        resource_class = view.resource_class(container.resource_class) if container.resource_class else None
        return max(view.cards(resource_class).smallest, MiB(1))

    def check_smallest() -> tuple[str, ...]:
        gpuquotas.check_pod(pod_request, quota_usages, smallest, detailed=settings.callers_known)
        return ()

    gpuquotas.check_pod(pod_request, quota_usages, detailed=settings.callers_known)
    return validate.collect_warnings(
        settings.oversize, check_smallest, "a node with a smaller GPU joins or the quota is raised"
    )


def _check_container_settings(
    pod: Json, namespace: str, pod_request: PodRequest, view: Lookups, settings: WebhookSettings
) -> tuple[str, ...]:
    """Warnings about a pod with a request: its environment, its agent and its MPS mode."""
    namespace_defaults = view.defaults(namespace)
    cards = {container.key: container for container in pod_request.containers}
    mps = bool(cards) and mpsmode.mode_of(pod).uses_mps
    for container in request.containers(pod):
        environment.check_environment(
            container.spec.get("env") or [], cards.get(container.key), container.path, mps=mps
        )
    agent.check_agent(pod, pod_request)
    if not cards:
        return ()
    mpsmode.check_min_mode(
        pod, mpsmode.min_mode(pod_request, settings.min_mps, namespace_defaults.min_mps if namespace_defaults else "")
    )
    check_daemons = partial(mpsmode.check_mode, pod, pod_request, view.mps_scopes)
    return validate.collect_warnings(settings.oversize, check_daemons, "a daemon serves several GPUs")


def _validate_workload(review: Review, settings: WebhookSettings) -> Decision:
    path, template = templates.template_of(review.object, review.resource)
    sizes.check_template(template, f"{path}.", update=review.is_update)
    return Decision(warnings=gangs.check_workload(review.object, review.old, review.resource, settings.gang_schedulers))


def _validate_binding(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    # With the legacy resource `bindings`, only the object names the pod.
    name = review.name or ((review.object.get("metadata") or {}).get("name") or "")
    pod = view.pod(review.namespace, name, "" if settings.callers_known else review.caller)
    if pod is not None:
        validate.check_binding(pod)
    return Decision()


def _validate_class(review: Review, view: Lookups) -> Decision:
    sizes.check_object(review.object)
    return Decision(warnings=resourceclasses.warn(review.object, review.old, view.reviewed_class_cards))


def _validate_gpu_quota(review: Review, view: Lookups) -> Decision:
    sizes.check_object(review.object)
    return Decision(warnings=gpuquotas.check_quota(review.object, view.resource_class, view.classes()))


def _validate_namespace(review: Review) -> Decision:
    sizes.check_object(review.object)
    namespace_defaults = namespaces.defaults_of(review.object)
    if namespace_defaults is not None:
        defaults.check(namespace_defaults, str((review.object.get("metadata") or {}).get("name", review.name)))
    return Decision(warnings=advice.warn_namespace(review.object))


def _make_patch(before: Json, after: Json, warnings: tuple[str, ...] = ()) -> Decision:
    # An unchanged object is the same Python object, so it need not be compared.
    patch = patches.make_patch(before, after) if after is not before else []
    return Decision(patch=patch, warnings=warnings)


def _refuse_invalid(decide: Callable[[], Decision]) -> Decision:
    try:
        return decide()
    except InvalidRequest as error:
        return Decision(allowed=False, message=str(error), about=error.field)
