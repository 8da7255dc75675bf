"""AdmissionReviews, and a view of the cluster for the webhook, for tests."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jsonpatch

from cardwise.core.api import classes
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.decoded import Json
from webhook.cluster.cards import CardSizes
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.cluster.limitranges import Bounds
from webhook.cluster.namespaces import Defaults
from webhook.cluster.offers import NodeOffers
from webhook.pods.context import WebhookSettings
from webhook.server import app, decisions
from webhook.server import review as reviews
from webhook.server.review import Decision, Review


def resource_classes(*objects: Json) -> dict[str, ResourceClass]:
    return {(resource_class := classes.parse(manifest)).name: resource_class for manifest in objects}


@dataclass
class Known:
    """A `context.Lookups` of plain values."""

    namespaces: dict[str, Defaults] = field(default_factory=dict)
    known_cards: CardSizes = field(default_factory=CardSizes)
    pods: dict[str, Json] = field(default_factory=dict)
    known_classes: dict[str, ResourceClass] = field(default_factory=dict)
    cards_of: dict[str, CardSizes] = field(default_factory=dict)
    cards_on: dict[tuple[str, ...], CardSizes] = field(default_factory=dict)  # by class and nodes
    card_labels: list[Json] = field(default_factory=list)
    standings: dict[str, list[QuotaUsage]] = field(default_factory=dict)
    gpu_resource_quotas: frozenset[str] = frozenset()  # namespaces with a ResourceQuota that counts GPUs
    # a member and the gang size that it names, by namespace/gang
    numbers: dict[str, tuple[str, int]] = field(default_factory=dict)
    scopes: frozenset[str] = frozenset()
    mostly_per_card: bool = False  # one daemon serves all GPUs on a few nodes only
    kernel_limit: bool = False  # whether the driver limits the memory of shares on any GPU
    clients: int = 48  # the maximum number of shares on one GPU
    ranges: dict[str, Bounds] = field(default_factory=dict)
    offered: NodeOffers | None = None
    native: bool = True  # whether PodGroups of Kubernetes are served
    callers: list[str] = field(default_factory=list)  # the callers for which pods of Bindings were looked up
    compared: list[str] = field(default_factory=list)  # the reviewed classes whose cards were compared
    comparable: bool = True  # whether the cards of reviewed classes can be compared in time

    def defaults(self, namespace: str) -> Defaults | None:
        return self.namespaces.get(namespace)

    defaults_or_fetch = defaults

    def cards(self, resource_class: ResourceClass | None = None, nodes: Collection[str] | None = None) -> CardSizes:
        if nodes is not None:
            return self.cards_on.get((resource_class.name if resource_class else "", *sorted(nodes)), CardSizes())
        return self.known_cards if resource_class is None else self.cards_of.get(resource_class.name, CardSizes())

    def reviewed_class_cards(self, resource_class: ResourceClass) -> CardSizes | None:
        self.compared.append(resource_class.name)
        if not self.comparable:
            return None
        matching = CardSizes(max_cards=sum(map(resource_class.selector.matches, self.card_labels)))
        return self.cards_of.get(resource_class.name, matching)

    def classes(self) -> Mapping[str, ResourceClass]:
        return self.known_classes

    def resource_class(self, name: str) -> ResourceClass | None:
        return self.known_classes.get(name)

    def offers(self) -> NodeOffers | None:
        return self.offered

    def quotas(self, namespace: str) -> Sequence[QuotaUsage]:
        return self.standings.get(namespace, [])

    def has_gpu_resource_quota(self, namespace: str) -> bool:
        return namespace in self.gpu_resource_quotas

    def conflicting_member(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        number_of_gang = self.numbers.get(f"{namespace}/{gang}")
        return number_of_gang if number_of_gang and number_of_gang[1] != number else None

    def bounds(self, namespace: str) -> Bounds:
        return self.ranges.get(namespace, Bounds())

    def mps_scopes(self) -> frozenset[str]:
        return self.scopes

    def do_node_daemons_prevail(self) -> bool:
        return "node" in self.scopes and not self.mostly_per_card

    def has_kernel_limit(self) -> bool:
        return self.kernel_limit

    def max_clients(self) -> int:
        return self.clients

    def serves_podgroups(self) -> bool:
        return self.native

    def pod(self, namespace: str, name: str, caller: str, check_size: Callable[[bytes], None]) -> Json | None:
        self.callers.append(caller)
        return self.pods.get(f"{namespace}/{name}")


def review(
    manifest: Any,
    resource: str = "pods",
    *,
    sub: str = "",
    operation: str = "CREATE",
    namespace: str = "default",
    name: str = "",
    username: str = "somebody",
    old: Any = None,
) -> Json:
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "X"},
        "resource": {"group": "", "version": "v1", "resource": resource},
        "operation": operation,
        "namespace": namespace,
        "name": name,
        "userInfo": {"username": username, "groups": ["system:authenticated"]},
        "object": manifest,
        "oldObject": old,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    if sub:
        request["subResource"] = sub
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def paths_of(resource: str) -> list[str]:
    """The paths to which the API server sends reviews of the resource."""
    return [path for path in sorted(app.DECIDE_BY_PATH) if app.accepts_resource(path, resource)]


def body(*args: Any, **kwargs: Any) -> bytes:
    return json.dumps(review(*args, **kwargs)).encode()


def decision_on(
    decide: Callable[[Review, Known, WebhookSettings], Decision],
    manifest: Any,
    resource: str,
    known: Known,
    settings: WebhookSettings | None = None,
    **about: Any,
) -> Decision:
    """The webhook's decision about the object; `about`: as in `review`."""
    return decide(reviews.decode(body(manifest, resource, **about)), known, settings or WebhookSettings())


on_mutate = partial(decision_on, decisions.decide_mutate)
on_defaults = partial(decision_on, decisions.decide_defaults)
on_validate = partial(decision_on, decisions.decide_validate)
on_advise = partial(decision_on, decisions.decide_advise)


def patched(manifest: Json, decision: Decision) -> Json:
    after: Json = jsonpatch.JsonPatch(decision.patch).apply(manifest)
    return after


def mutate_object(
    manifest: Json, resource: str, known: Known, settings: WebhookSettings | None = None, **about: Any
) -> Json:
    """The object after /mutate, which must let it pass."""
    decision = on_mutate(manifest, resource, known, settings, **about)
    assert decision.allowed, decision.message
    return patched(manifest, decision)


def mutate_object_twice(
    manifest: Json, resource: str, known: Known, settings: WebhookSettings | None = None, **about: Any
) -> Json:
    """As `mutate_object`; checks that a second call, as after another webhook's change, changes nothing."""
    once = mutate_object(manifest, resource, known, settings, **about)
    assert mutate_object(once, resource, known, settings, **about) == once, "not a fixed point"
    return once


def refusal(pod: Json, known: Known | None = None, settings: WebhookSettings | None = None) -> str:
    """The refusal of the pod by /mutate or the following /validate; "" if it is admitted."""
    known = known or Known()
    first = on_mutate(pod, "pods", known, settings)
    return (
        first.message or on_validate(mutate_object_twice(pod, "pods", known, settings), "pods", known, settings).message
    )
