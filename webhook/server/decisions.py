"""Decides reviews: one function per path, pure except for lookups in the view.

The Flask layer (`app`) only decodes, calls one of these functions and encodes.
"""

from collections.abc import Callable
from typing import Final

from cardwise.core.api import names, request
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.core.values.invalid import InvalidRequest
from webhook import deadline, rules
from webhook.cluster import namespaces
from webhook.pods import claims, defaults, gangs
from webhook.pods.context import Context, Lookups, WebhookSettings
from webhook.pods.pod import PodUnderReview
from webhook.quotas import gpuquotas, quotas, resourceclasses
from webhook.server import advice, patches, reapplied, sizes
from webhook.server.review import CREATE, Decision, Review, is_pod_shaped
from webhook.templates import templates

_POD_FIELD_PREFIXES: Final = ("spec.", "metadata.")  # the prefixes of messages that name a field of the pod
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
            return _mutate_pod(PodUnderReview(review.object), _context(review, view, settings))
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
    namespace_defaults = view.defaults_or_fetch(review.namespace)
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
            return _refuse_invalid(lambda: _validate_pod(review, _context(review, view, settings)))
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
    """POST /advise: warns about misspelt names, and about workloads whose pods could never run.

    Never a refusal. Raises KubeError.
    """
    if review.namespace in settings.exempt_namespaces:
        return Decision()
    offers = view.offers()
    match review.resource:
        case "pods":
            pod = PodUnderReview(review.object)
            rules.advise(pod, _context(review, view, settings))
            return Decision(warnings=tuple(pod.warnings))
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
    context = _context(review, view, settings, is_template=True)
    unique_texts: dict[str, None] = {}
    is_queued = advice.KUEUE_LABEL in labels_of(review.object)
    weight = 0
    for path, template in templates.find_templates(review.object, review.resource):
        deadline.check()
        if not is_pod_shaped(template):
            continue
        if weight and weight + _template_weight(template) > sizes.MAX_CONTAINERS:
            break  # checking all templates must take no longer than checking the largest pod
        weight += _template_weight(template)
        texts = _warn_template(template, context)
        if is_queued:
            texts += advice.warn_kueue_amounts(template, settings.unit)
        unique_texts |= {
            templates.field_in_workload(path, text) if text.startswith(_POD_FIELD_PREFIXES) else text: None
            for text in texts
        }
        if len(unique_texts) >= _MAX_WARNINGS:
            break  # further warnings would not be shown
    return Decision(warnings=tuple(unique_texts)[:_MAX_WARNINGS])


def _template_weight(template: Json) -> int:
    """The time to check a template, measured in containers. Checking its nodes takes as long as `_MIN_WEIGHT`
    containers.
    """
    return max(_MIN_WEIGHT, sum(1 for _ in request.containers(template)))


def _warn_template(template: Json, context: Context) -> list[str]:
    """The warnings about the pods of the template. Users get these warnings for the workload, because they do not see
    warnings about pods that a controller creates.
    """
    manifest = {"metadata": template.get("metadata") or {}, "spec": template.get("spec") or {}}
    try:
        sizes.check_template(manifest)
        pod = PodUnderReview(manifest)
        rules.mutate(pod, context)
        stored_pod = PodUnderReview(pod.to_json(), request.parse_mutated)
        rules.validate(stored_pod, context)
        return pod.warnings + stored_pod.warnings
    except InvalidRequest as error:
        return [f"{error}; its pods will be refused"]


def _must_rewrite_pod(review: Review, settings: WebhookSettings) -> bool:
    """Whether pods of this review are rewritten and checked: only at creation, and not mirrors of static pods."""
    annotations = annotations_of(review.object)
    # The annotation counts only if a kubelet sent it, because users may write it too.
    mirror = names.MIRROR in annotations and review.username.startswith("system:node:")
    return review.operation == CREATE and review.namespace not in settings.exempt_namespaces and not mirror


def _context(review: Review, view: Lookups, settings: WebhookSettings, *, is_template: bool = False) -> Context:
    return Context(
        namespace=review.namespace,
        cluster=view,
        settings=settings,
        defaults=view.defaults(review.namespace),
        is_template=is_template,
    )


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
    return _make_patch(review.object, resourceclasses.normalize_selector(review.object, review.old))


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


def _validate_pod(review: Review, context: Context) -> Decision:
    sizes.check_template(review.object)
    pod = PodUnderReview(review.object, request.parse_mutated)
    rules.validate(pod, context)
    return Decision(warnings=tuple(pod.warnings))


def _validate_workload(review: Review, settings: WebhookSettings) -> Decision:
    path, template = templates.template_of(review.object, review.resource)
    sizes.check_template(template, f"{path}.", update=review.is_update)
    return Decision(warnings=gangs.check_workload(review.object, review.old, review.resource, settings.gang_schedulers))


def _validate_binding(review: Review, view: Lookups, settings: WebhookSettings) -> Decision:
    sizes.check_object(review.object)
    # With the legacy resource `bindings`, only the object names the pod.
    name = review.name or ((review.object.get("metadata") or {}).get("name") or "")
    pod = view.pod(review.namespace, name, "" if settings.callers_known else review.caller, sizes.check_text)
    if pod is not None:
        _check_binding(pod)
    return Decision()


def _check_binding(manifest: Json) -> None:
    """Check a pod that a program other than the extender binds. Raises InvalidRequest.

    Any scheduler may bind a pod whose share is allocated by claim: the claim names the node, and other nodes refuse it.
    """
    if claims.is_by_claim(manifest):
        return
    try:
        has_request = request.parse(manifest) is not None
    except InvalidRequest:
        has_request = True
    if has_request:
        raise InvalidRequest(
            "target",
            "only the Cardwise extender may bind pods that request a share of a GPU",
            "let a kube-scheduler that calls the Cardwise extender place the pod",
        )


def _validate_class(review: Review, view: Lookups) -> Decision:
    sizes.check_object(review.object)
    return Decision(warnings=resourceclasses.warn_class(review.object, review.old, view.reviewed_class_cards))


def _validate_gpu_quota(review: Review, view: Lookups) -> Decision:
    sizes.check_object(review.object)
    return Decision(warnings=gpuquotas.check_quota(review.object, view.resource_class, view.classes()))


def _validate_namespace(review: Review) -> Decision:
    sizes.check_object(review.object)
    namespace_defaults = namespaces.defaults_of(review.object)
    if namespace_defaults is not None:
        defaults.check_defaults(namespace_defaults, str((review.object.get("metadata") or {}).get("name", review.name)))
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
