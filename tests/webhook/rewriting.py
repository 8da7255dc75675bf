"""Pods that go through some of the webhook's rules."""

from dataclasses import dataclass
from typing import Any

from cardwise.core.api import request
from cardwise.core.gangs.gangs import Membership
from cardwise.core.values.decoded import Json
from tests.webhook.reviews import Known
from webhook.cluster.namespaces import Defaults
from webhook.pods import amounts, annotations, capacity, resources, scheduling
from webhook.pods.context import Context, WebhookSettings
from webhook.pods.pod import PodUnderReview


@dataclass(frozen=True)
class Rewritten:
    pod: Json
    warnings: tuple[str, ...]


def context(known: Known | None = None, **settings: Any) -> Context:
    return Context(namespace="default", cluster=known or Known(), settings=WebhookSettings(**settings))


def mutate(pod: Json, *, policy: str = "", in_gang: bool = False, **settings: Any) -> Rewritten:
    """The pod with resources, environment, scheduler and annotations. `policy`: the policy of its namespace."""
    under_review = PodUnderReview(pod)
    under_review.read_request()
    under_review.gang = Membership(name="g") if in_gang else None
    under_review.defaults = Defaults(policy=policy)
    for rule in (annotations.mutate, resources.mutate, scheduling.mutate):
        rule(under_review, context(**settings))
    return Rewritten(under_review.to_json(), tuple(under_review.warnings))


def with_classes(pod: Json, known: Known, **settings: Any) -> Json:
    """The pod with the stored names of classes."""
    under_review = PodUnderReview(pod)
    amounts.mutate(under_review, context(known, **settings))
    return under_review.to_json()


def without_placement(pod: Json) -> Rewritten:
    under_review = PodUnderReview(pod)
    scheduling.mutate_copies(under_review, context())
    return Rewritten(under_review.to_json(), tuple(under_review.warnings))


def check_pod(pod: Json, known: Known, **settings: Any) -> tuple[str, ...]:
    """The warnings about a rewritten pod: is it rewritten, does it fit? Raises InvalidRequest."""
    under_review = PodUnderReview(pod, request.parse_mutated)
    for rule in (amounts.validate, resources.validate, scheduling.validate_node_name, capacity.validate):
        rule(under_review, context(known, **settings))
    return tuple(under_review.warnings)
