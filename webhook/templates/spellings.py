"""Translates resource names as users write them into the stored names.

Kubernetes refuses names without a domain, such as `nvidia.tesla.k80: 1`. So the webhook adds Cardwise's domain to the
bare name of a class before Kubernetes validates the name. Other bare names are left to Kubernetes' own refusal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from cardwise.core.api import classes, names
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity

NvidiaGpu = Literal["leave", "take"]
Lookup = Callable[[str], ResourceClass | None]
"""Returns the class of this name; None if there is none. May call the API server, so it may raise KubeError."""

_REQUESTS_PREFIX = "requests."  # the prefix by which a ResourceQuota counts resources with a domain
_DECIMAL_SUFFIXES: Final = ("", "k", "M", "G", "T", "P", "E")
_LIMITS_PREFIX = "limits."  # limits always equal requests, so this prefix means the same
# Resources of Cardwise that a ResourceQuota may count, by their names in pods.
_COUNTED_RESOURCES = (names.GPU_MEM, names.GPU_CORE, names.WHOLE_GPU, names.SHARE)


@dataclass(frozen=True, slots=True)
class NameTranslator:
    """Translates names. `take_nvidia`: `nvidia.com/gpu` means whole cards of Cardwise."""

    lookup: Lookup
    take_nvidia: bool = False

    def without_nvidia(self) -> "NameTranslator":
        return replace(self, take_nvidia=False)

    def translate_container_name(self, name: str, amount: object) -> str:
        """The stored name of a limit or request; unchanged if there is nothing to rewrite. Raises KubeError."""
        if name == names.NVIDIA_GPU:
            # The amount 0 is not translated, because it would be refused for a resource of Cardwise.
            return names.WHOLE_GPU if self.take_nvidia and not is_zero(amount) else name
        return names.CLASS_PREFIX + name if self._is_class(name) else name

    def translate_quota_name(self, name: str, amount: object) -> str:  # noqa: ARG002 - as translate_container_name
        """The stored name of a key of a ResourceQuota. Raises KubeError."""
        plain = counted_resource(name)
        if plain == names.GPU_COUNT or (self.take_nvidia and plain == names.NVIDIA_GPU):
            return _REQUESTS_PREFIX + names.WHOLE_GPU
        if plain in _COUNTED_RESOURCES or names.class_of(plain):
            return _REQUESTS_PREFIX + plain
        return _REQUESTS_PREFIX + names.CLASS_PREFIX + name if self._is_class(name) else name

    def _is_class(self, name: str) -> bool:
        return classes.is_bare_class_name(name, lambda bare: self.lookup(bare) is not None)


def warn_unknown_classes(field: str, written_names: Mapping[str, str], translator: NameTranslator) -> list[str]:
    """Warnings about classes that do not exist. `written_names`: the written spellings by stored name."""
    named_classes = (
        (names.class_of(counted_resource(key)), written_name) for key, written_name in written_names.items()
    )
    return [
        f"{field}[{written_name}]: there is no ResourceClass {name} now; until there is one, it counts nothing"
        for name, written_name in named_classes
        if name and translator.lookup(name) is None
    ]


def counted_resource(key: str) -> str:
    """The resource that a key of a ResourceQuota counts."""
    return key.removeprefix(_LIMITS_PREFIX).removeprefix(_REQUESTS_PREFIX)


def possible_spellings(key: str) -> frozenset[str]:
    """All spellings that the webhook rewrites to `key`, and `key` itself."""
    plain = key.removeprefix(_REQUESTS_PREFIX)
    bare = {plain.removeprefix(names.CLASS_PREFIX)} if names.class_of(plain) else set()
    if plain == key:
        return frozenset({key, *bare, *((names.NVIDIA_GPU,) if key == names.WHOLE_GPU else ())})
    equal_names = (plain, names.NVIDIA_GPU, names.GPU_COUNT) if plain == names.WHOLE_GPU else (plain,)
    return frozenset(
        {*bare, *(prefix + name for name in equal_names for prefix in ("", _REQUESTS_PREFIX, _LIMITS_PREFIX))}
    )


def rename_keys(amounts: Json, field: str, translate: Callable[[str, object], str]) -> tuple[Json, dict[str, str]]:
    """The amounts by stored name, and the written names of renamed keys by stored name.

    Raises InvalidRequest if two spellings of one name have different amounts.
    """
    stored_amounts: Json = {}
    written_names: dict[str, str] = {}
    for name, amount in amounts.items():
        stored_name = translate(name, amount)
        if stored_name in stored_amounts and not is_equal(stored_amounts[stored_name], amount):
            other = written_names.get(stored_name, stored_name)
            raise InvalidRequest(
                f"{field}[{name}]",
                f"{amount} differs from {other}, which has the same meaning and the value "
                f"{stored_amounts[stored_name]}",
                f"write only {min(name, other, key=len)}",
            )
        # If both spellings are present, the amount under the stored name is kept.
        stored_amounts[stored_name] = amount if stored_name == name else stored_amounts.get(stored_name, amount)
        if stored_name != name:
            written_names[stored_name] = name
    return stored_amounts, written_names


def is_zero(amount: object) -> bool:
    """Whether the amount is zero, which many charts write for "no GPU"."""
    try:
        return quantity.parse_amount(str(amount)).number == 0
    except InvalidQuantity:
        return False


def is_equal(amount: object, other: object) -> bool:
    """Whether two amounts are the same quantity."""
    try:
        return quantity.parse_amount(str(amount)).number == quantity.parse_amount(str(other)).number
    except InvalidQuantity:
        return amount == other


def format_count(text: object, number: int) -> str:
    """The number in digits, or in the API server's spelling if `text` has it: 8k for 8000."""
    suffix, shortened = 0, number
    while shortened and shortened % 1000 == 0 and suffix < len(_DECIMAL_SUFFIXES) - 1:
        suffix, shortened = suffix + 1, shortened // 1000
    stored = f"{shortened}{_DECIMAL_SUFFIXES[suffix]}"
    return stored if text == stored else str(number)
