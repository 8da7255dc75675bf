"""Decides reviews: one function per path, pure except for lookups in the view.

The Flask layer (`app`) only decodes, calls one of these functions and encodes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cardwise.core.api import names, request
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from webhook import rules
from webhook.cluster import namespaces
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.pods import agent, defaults, environment, gangs, membership, mpsmode, reapplied, validate
from webhook.pods.context import Context, Lookups, WebhookSettings
from webhook.pods.pod import PodUnderReview
from webhook.quotas import gpuquotas, quotas, resourceclasses
from webhook.server import advice, patches, sizes
from webhook.server.review import CREATE, Decision, Review, is_pod_shaped
from webhook.templates import templates

_IN_POD: Final = ("spec.", "metadata.")  # the prefixes of messages that name a field of the pod
_MAX_WARNINGS: Final = 8
_MIN_WEIGHT: Final = 8


Decide = Callable[[Review, Lookups, WebhookSettings], Decision]


def decide_mutate(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    """POST /mutate: rewrites pods that request a card or a device, their templates, quotas, LimitRanges,
    ResourceClasses.

    Raises KubeError.
    """
    match review.resource:
        case "pods" if _must_rewrite_pod(review, settings):
            context = Context(
                namespace=review.namespace, cluster=view, settings=settings, defaults=view.defaults(review.namespace)
            )
            return _mutate_pod(PodUnderReview(review.object), context)
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
    pod = PodUnderReview(review.object)
    if namespace_defaults is None or not namespace_defaults.gpu_mem or not defaults.takes_defaults(pod):
        return Decision()  # this path does not change the pod, so it has no error to report
    context = Context(
        namespace=review.namespace,
        cluster=view,
        settings=settings,
        defaults=namespace_defaults,
        gives_default_share=True,
    )
    return _mutate_pod(pod, context)


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
    manifest = {"metadata": template.get("metadata") or {}, "spec": template.get("spec") or {}}
    context = Context(
        namespace=namespace, cluster=view, settings=settings, defaults=view.defaults(namespace), is_template=True
    )
    try:
        sizes.check_template(manifest)
        pod = PodUnderReview(manifest)
        rules.mutate(pod, context)
        return tuple(pod.warnings) + _check_pod(pod.to_json(), namespace, view, settings)
    except InvalidRequest as error:
        return (f"{error}; its pods will be refused",)


def _must_rewrite_pod(review: Review, settings: WebhookSettings) -> bool:
    """Whether pods of this review are rewritten and checked: only at creation, and not mirrors of static pods."""
    annotations = annotations_of(review.object)
    # The annotation counts only if a kubelet sent it, because users may write it too.
    mirror = names.MIRROR in annotations and review.username.startswith("system:node:")
    return review.operation == CREATE and review.namespace not in settings.exempt_namespaces and not mirror


def _context(review: Review, view: Lookups, settings: WebhookSettings) -> Context:
    return Context(namespace=review.namespace, cluster=view, settings=settings)


def _mutate_pod(pod: PodUnderReview, context: Context) -> Decision:
    def decide() -> Decision:
        sizes.check_template(pod.manifest)
        rules.mutate(pod, context)
        return _make_patch(pod.manifest, pod.to_json(), tuple(pod.warnings))

    return _refuse_invalid(decide)


def _reapply_pod(review: Review, settings: WebhookSettings) -> Decision:
    sizes.check_template(review.object, update=True)
    pod = reapplied.restore_stored_names(review.object, review.old or {}, settings.unit, settings.tolerated)
    return _make_patch(review.object, pod)


def _mutate_workload(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    path, template = templates.template_of(review.object, review.resource)
    sizes.check_template(template, f"{path}.", update=review.is_update)
    translator = _context(review, view, settings).translator
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
        review.object,
        review.old,
        _context(review, view, settings).translator,
        update=review.is_update,
        unit=settings.unit,
    )
    return _make_patch(review.object, quota, tuple(warnings))


def _mutate_limit_range(review: Review, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    limits, warnings = quotas.rewrite_limit_range(review.object, review.old, unit=settings.unit)
    return _make_patch(review.object, limits, tuple(warnings))


def _validate_pod(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_template(review.object)
    warnings = _check_pod(review.object, review.namespace, view, settings)
    gang = membership.named_gang(PodUnderReview(review.object), settings.gang_schedulers)
    if gang is not None:
        gangs.check_number(
            review.object, gang, review.namespace, view.conflicting_member, detailed=settings.callers_known
        )
    return Decision(warnings=warnings)


def _check_pod(pod: Json, namespace: str, view: Lookups, settings: WebhookSettings) -> tuple[str, ...]:
    """Warnings about a rewritten pod. Raises InvalidRequest, KubeError."""
    pod_request, warnings = validate.check_pod(pod, view, settings.oversize)
    under_review = PodUnderReview(pod)
    gang = membership.named_gang(under_review, settings.gang_schedulers)
    if gang is None and pod_request is not None:
        gang = membership.gang_of_requester(under_review, Context(namespace=namespace, cluster=view, settings=settings))
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
    mps = bool(cards) and mpsmode.mode_of(annotations_of(pod)).uses_mps
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
