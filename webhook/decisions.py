"""From a review to a decision: one function per path, pure but for the two look-ups they are handed.

Decide, then apply: the Flask shell only decodes, calls one of these and encodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jsonpatch

from cardwise.core import names, request
from cardwise.core.request import InvalidRequest
from webhook import defaults, mutate, quotas, validate
from webhook.defaults import Defaults
from webhook.review import Decision, Review
from webhook.validate import Cards, Oversize

Json = dict[str, Any]


class View(Protocol):
    """What the webhook knows of the cluster."""

    def defaults(self, namespace: str) -> Defaults | None:
        """Of a namespace that has opted in; None for others (and for those not seen yet)."""

    def fresh_defaults(self, namespace: str) -> Defaults | None:
        """As `defaults`, but asks the API server where the namespace is not known. Raises KubeError."""

    def cards(self) -> Cards: ...

    def pod(self, namespace: str, name: str) -> Json | None:
        """The pod, from the API server; None where it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`runtime_class` "" leaves pods as they are."""

    runtime_class: str = ""
    oversize: Oversize = "refuse"
    exempt_namespaces: frozenset[str] = frozenset()


Decide = Callable[[Review, View, Settings], Decision]


def on_mutate(review: Review, view: View, settings: Settings) -> Decision:
    """POST /mutate: pods that ask for a share, ResourceQuotas, LimitRanges."""
    match review.resource:
        case "pods" if _concerns(review, settings):
            return _mutate_pod(review, view.defaults(review.namespace), settings, apply=False)
        case "resourcequotas":
            return _refusable(lambda: _patch(review.object, quotas.resource_quota(review.object)))
        case "limitranges":
            return _refusable(lambda: _patch(review.object, quotas.limit_range(review.object)))
    return Decision()


def on_defaults(review: Review, view: View, settings: Settings) -> Decision:
    """POST /mutate/defaults: pods of a namespace that opted in. Raises KubeError."""
    if review.resource != "pods" or not _concerns(review, settings):
        return Decision()
    return _mutate_pod(review, view.fresh_defaults(review.namespace), settings, apply=True)


def on_validate(review: Review, view: View, settings: Settings) -> Decision:
    """POST /validate."""
    match review.resource:
        case "pods" if _concerns(review, settings):
            return _refusable(lambda: Decision(warnings=validate.pod(review.object, view.cards(), settings.oversize)))
        case "pods/binding" | "bindings":
            return _refusable(lambda: _validate_binding(review, view))
        case "namespaces":
            return _refusable(lambda: _validate_namespace(review))
    return Decision()


def _concerns(review: Review, settings: Settings) -> bool:
    """Pods are rewritten and judged when they are created; mirrors of static pods are the node's."""
    annotations = (review.object.get("metadata") or {}).get("annotations") or {}
    # By the word of a kubelet only: a user may write the annotation too.
    mirror = names.MIRROR in annotations and review.username.startswith("system:node:")
    return review.operation == "CREATE" and review.namespace not in settings.exempt_namespaces and not mirror


def _mutate_pod(review: Review, known: Defaults | None, settings: Settings, *, apply: bool) -> Decision:
    def decide() -> Decision:
        pod, policy = review.object, ""
        if known is not None and defaults.wants(pod):
            known.check(review.namespace)
            policy = known.policy
            if apply and request.parse(pod) is None:
                pod = defaults.applied(pod, known)
        mutation = mutate.mutate(pod, runtime_class=settings.runtime_class, policy=policy)
        return _patch(review.object, mutation.pod, mutation.warnings)

    return _refusable(decide)


def _validate_binding(review: Review, view: View) -> Decision:
    # The legacy resource names the pod in the object only.
    name = review.name or ((review.object.get("metadata") or {}).get("name") or "")
    pod = view.pod(review.namespace, name)
    if pod is not None:
        validate.binding(pod)
    return Decision()


def _validate_namespace(review: Review) -> Decision:
    metadata = review.object.get("metadata") or {}
    known = defaults.of(metadata)
    if known is not None:
        validate.namespace(str(metadata.get("name", review.name)), known)
    return Decision()


def _patch(before: Json, after: Json, warnings: tuple[str, ...] = ()) -> Decision:
    return Decision(patch=jsonpatch.make_patch(before, after).patch, warnings=warnings)


def _refusable(decide: Callable[[], Decision]) -> Decision:
    try:
        return decide()
    except InvalidRequest as error:
        return Decision(allowed=False, message=str(error))
