"""Quantities as users write them in Cardwise's custom resources.

They differ from Kubernetes' quantities (`quantity`) in two ways: `10GiB` is allowed and means `10Gi`, as in the
proposals that ResourceClass follows. An amount of memory may be 0, or larger than any card.
"""

import math
import re
from fractions import Fraction

from cardwise.core.values import quantity
from cardwise.core.values.quantity import InvalidQuantity

_BYTES_PATTERN = re.compile(r"[+-]?[\d.]+[KMGTPE]iB")
_BYTES_PER_MIB = 1024**2
_MAX_AMOUNT = 2**53  # the largest integer up to which all JSON readers are exact


def to_kubernetes_spelling(text: str) -> str:
    """The quantity in Kubernetes' spelling: `10Gi` for `10GiB`. Other texts stay unchanged, so errors quote them."""
    text = text.strip()
    return text[:-1] if _BYTES_PATTERN.fullmatch(text) else text


def parse_quantity(text: str | int) -> Fraction:
    """The value of a quantity; `10GiB` and `10Gi` are bytes. Raises InvalidQuantity."""
    return quantity.parse_amount(to_kubernetes_spelling(str(text))).number


def parse_memory_mib(text: str | int) -> int:
    """Parse an amount of memory into MiB, 0 or more. `65536` means MiB; `64Gi` and `64GiB` mean bytes, which are
    rounded up to MiB as in pods. Raises InvalidQuantity.

    `64G` is refused: by Kubernetes' rules it would mean 64,000,000,000 MiB, surely by mistake.
    """
    number, is_bytes = quantity.parse_amount(to_kubernetes_spelling(str(text)))
    if str(text).strip()[-1:] in "MGTPE":
        raise InvalidQuantity(f"{text} would mean that many MiB, not bytes", "write MiB such as 65536, or 64Gi")
    if is_bytes:
        number = Fraction(math.ceil(number / _BYTES_PER_MIB))
    if number.denominator != 1 or not 0 <= number <= _MAX_AMOUNT:
        raise InvalidQuantity(f"{text} is not a whole number of MiB, 0 or more", "write MiB such as 65536, or 64Gi")
    return number.numerator
