"""Admission of ResourceClasses: normalizes the selector, and reports errors."""

from collections.abc import Callable

from cardwise.core.api import classes, lookalikes
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.selectors import Selector
from cardwise.core.values import amounts, quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from webhook.cluster.cards import CardSizes

_BYTES_PER_MIB = 1024**2
_MIN_MIB = 1024  # a smaller number was probably meant in GiB
_SELECTOR_FIELD = "selector"
_OTHER_SPELLINGS = ("resourceSelector", "labelSelector")  # the spellings in the proposals that ResourceClass follows


def normalize_selector(manifest: Json, old: Json | None) -> Json:
    """The class with its selector under `spec.selector`. `old`: the stored class at an update.

    A class with two different selectors, under two spellings, is refused later. The exception is an update that adds
    another spelling and leaves the stored selector unchanged: `kubectl apply` does this for a manifest with the other
    spelling. Then the added selector counts.
    """
    spec = manifest.get("spec") or {}
    other_spellings = [name for name in _OTHER_SPELLINGS if name in spec]
    if len(other_spellings) != 1:
        return manifest
    written_selector, stored_selector = spec[other_spellings[0]], ((old or {}).get("spec") or {}).get(_SELECTOR_FIELD)
    if _SELECTOR_FIELD in spec and spec[_SELECTOR_FIELD] not in (written_selector, stored_selector):
        return manifest
    other_fields = {name: content for name, content in spec.items() if name != other_spellings[0]}
    return manifest | {"spec": other_fields | {_SELECTOR_FIELD: written_selector}}


def warn_class(
    manifest: Json,
    old: Json | None,
    compare_cards: Callable[[ResourceClass], CardSizes | None],
) -> tuple[str, ...]:
    """Warnings for the author of a class. Raises InvalidRequest.

    old: the stored class at an update.
    compare_cards: returns the sizes of the class's cards; None if that takes too long.
    """
    parsed = classes.parse(manifest)
    device_noun = "device" if parsed.other else "GPU"
    texts = []
    cards = compare_cards(parsed)
    if cards is not None and not cards.max_cards:
        labels = ((key, lookalikes.suggest_card_label(key)) for key in sorted(parsed.selector.keys))
        hint = next(
            (f"; did you mean {suggested_name} instead of {key}?" for key, suggested_name in labels if suggested_name),
            "",
        )
        texts.append(
            f"spec.selector: does not match any {device_noun} now; pods that request {parsed.name} wait until one "
            f"comes{hint}"
        )
    if parsed.share is not None and (
        rounding := quantity.describe_rounding(
            amounts.to_kubernetes_spelling(str(manifest["spec"]["share"]["memoryMiB"]))
        )
    ):
        texts.append(f"spec.share.memoryMiB: {rounding}")
    if not parsed.other:
        texts += _warn_byte_amounts(parsed.selector)
    if cards is not None and parsed.share is not None and parsed.share.memory > cards.largest > 0:
        texts.append(
            f"spec.share.memoryMiB: {parsed.share.memory} is more than the largest GPU of the class has "
            f"({cards.largest}); "
            f"no pod gets {parsed.name} until a larger one joins"
        )
    if old is not None and _was_device_class(old) not in (None, parsed.other):
        former_kind, new_kind = ("GPUs", "other devices") if parsed.other else ("other devices", "GPUs")
        texts.append(
            f"spec.selector: the class selected {former_kind} and now selects {new_kind}; pods that have requested "
            f"{parsed.name} keep what they hold, but pending pods can no longer be placed: create them again"
        )
    return tuple(texts)


def _warn_byte_amounts(selector: Selector) -> list[str]:
    """Warnings about amounts of memory that no card can have: a number without a suffix is bytes, as in Kubernetes."""
    compared = (
        (condition.operator, number)
        for conditions in selector.alternatives
        for condition in conditions
        if condition.key == "memory"
        for number in sorted({condition.bound, *condition.numbers})
        if 0 < number < _BYTES_PER_MIB
    )
    return [
        f"spec.selector: memory {name} {float(number):.10g} is read as bytes; write {float(number):.10g}"
        f"{'Gi' if number < _MIN_MIB else 'Mi'} if that is what you mean"
        for name, number in compared
    ]


def _was_device_class(old: Json) -> bool | None:
    """Whether the stored class was of devices other than GPUs; None if it cannot be read."""
    try:
        return classes.parse(old).other
    except InvalidRequest:
        return None
