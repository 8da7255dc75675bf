"""What can never run, or would go past sharing: refused with the field and the remedy.

The last word on a pod: other webhooks may have changed it after ours. Rules that need no knowledge of the cluster are
ValidatingAdmissionPolicies of the chart, so that they hold while nobody serves this.
"""

from dataclasses import dataclass
from typing import Any, Literal

from cardwise.core import names, request
from cardwise.core.quantity import MiB
from cardwise.core.request import InvalidRequest, PodRequest
from webhook.defaults import Defaults
from webhook.mutate import INTERNAL

Json = dict[str, Any]
Oversize = Literal["refuse", "wait"]

_SCHEDULER_PLACES = "a pod that asks for a share of a card must be placed by the scheduler"
_KNOWN = (*names.REQUESTED, *INTERNAL)


@dataclass(frozen=True, slots=True)
class Cards:
    """The largest card and the most cards of one node; 0 while no card is known."""

    largest: MiB = MiB(0)
    most: int = 0


def pod(obj: Json, cards: Cards, oversize: Oversize) -> tuple[str, ...]:
    """Warnings for the user. Raises InvalidRequest."""
    _refuse_unknown(obj)
    asked = request.parse_mutated(obj)
    if asked is None:
        return ()
    if (obj.get("spec") or {}).get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", _SCHEDULER_PLACES, remedy)
    try:
        _fits(asked, cards)
    except InvalidRequest as error:
        if oversize == "refuse":
            raise
        return (f"{error.field}: {error.problem}; the pod waits until such a card comes",)
    return ()


def binding(obj: Json) -> None:
    """`obj` is the pod that somebody other than the extender binds. Raises InvalidRequest."""
    try:
        asks = request.parse(obj) is not None
    except InvalidRequest:
        asks = True
    if asks:
        raise InvalidRequest(
            "target",
            "only the Cardwise extender binds pods that ask for a share of a card",
            "let kube-scheduler with the Cardwise extender place the pod",
        )


def namespace(name: str, defaults: Defaults) -> None:
    """Raises InvalidRequest."""
    defaults.check(name)


def _refuse_unknown(obj: Json) -> None:
    for container in request.containers(obj):
        resources = container.spec.get("resources") or {}
        for kind in ("limits", "requests"):
            for name in resources.get(kind) or ():
                if name.startswith(f"{names.GROUP}/") and name not in _KNOWN:
                    raise InvalidRequest(
                        f"{container.path}.resources.{kind}[{name}]",
                        "is no resource of Cardwise",
                        f"ask for {names.GPU_MEM} (MiB) or {names.WHOLE_GPU} (whole cards)",
                    )


def _fits(asked: PodRequest, cards: Cards) -> None:
    if not cards.largest:
        return  # nothing is known yet, or there are no cards: the pod may wait for them
    paths = {container.key: _path(container.key) for container in asked.containers}
    if asked.largest_share > cards.largest:
        culprits = [c for c in asked.containers if not c.whole and c.mem_per_card > cards.largest]
        sharing = [c for c in asked.containers if not c.whole and c.cards == 1]
        culprit = culprits[0] if culprits else sharing[0]
        together = " together with the pod's other containers" if not culprits and len(sharing) > 1 else ""
        split = f"{asked.largest_share} MiB{together} is more than the largest card has ({cards.largest})"
        raise InvalidRequest(
            f"{paths[culprit.key]}.resources.limits[{names.GPU_MEM}]",
            split,
            f"ask for at most {cards.largest}, or split it over cards with {names.GPU_COUNT}",
        )
    whole = [c for c in asked.containers if c.whole]
    for container, wanted in (
        *((c, c.cards) for c in asked.containers if not c.whole),
        *((c, sum(w.cards for w in whole)) for c in whole[:1]),
    ):
        if wanted > cards.most:
            raise InvalidRequest(
                # As users write it; cardwise.dev/gpu is our own spelling of it.
                f"{paths[container.key]}.resources.limits[{names.GPU_COUNT}]",
                f"{wanted} cards are more than any node has ({cards.most})",
                f"ask for at most {cards.most}",
            )


def _path(key: str) -> str:
    return f"spec.initContainers[{key.removeprefix('init-')}]" if key.startswith("init-") else f"spec.containers[{key}]"
