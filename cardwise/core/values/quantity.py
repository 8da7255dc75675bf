"""Converts Kubernetes quantities to integers, once, where they enter the process.

A trap of the format: the API server prints the integer 8000 as `8k`. So in gpu-mem a decimal suffix multiplies a number
of MiB, and only a binary suffix (`8Gi`) means bytes. The format: k8s.io/apimachinery `pkg/api/resource/quantity.go`.
"""

import math
import re
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple, NewType

from cardwise.core.values.wording import quote_text

MiB = NewType("MiB", int)
Percent = NewType("Percent", int)

_QUANTITY_PATTERN = re.compile(
    r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII
)
_BINARY_SUFFIXES = {
    suffix: Fraction(1024**power) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
}
_DECIMAL_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
}  # fmt: skip
_BYTES_PER_KIB = 1024
_BYTES_PER_MIB = 1024**2
_MIN_BYTES = 2**16  # from this number on, a number with a fraction is taken as bytes, not as MiB
_MAX_LENGTH = 64  # characters of a quantity; real ones are shorter, and Python refuses to convert thousands of digits
# MiB; more than any card has. A larger amount, rewritten by the webhook, would be refused by the API server with a less
# clear message. The limit also keeps sums within 64 bits, even if users or nodes write false amounts.
MAX_MIB: Final = MiB(2**31)


@lru_cache(maxsize=4096)
def shared_mib(mib: int) -> MiB:
    """The size of a card or a share, as one shared integer object for equal sizes, to save memory."""
    return MiB(mib)


class Unit(StrEnum):
    """The unit of gpu-mem numbers that users write without a unit. Stored numbers always mean MiB."""

    MIB = "MiB"
    GIB = "GiB"

    @property
    def mib(self) -> int:
        """MiB in one unit."""
        return 1 if self is Unit.MIB else 1024


class InvalidQuantity(ValueError):
    """An invalid quantity; `problem` and `remedy` are for the user."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem
        self.remedy = remedy


class ParsedAmount(NamedTuple):
    """A quantity.

    number: the value.
    is_bytes: whether it has a binary suffix (`Gi`).
    """

    number: Fraction
    is_bytes: bool


def parse_amount(text: str | int) -> ParsedAmount:
    """Parse a quantity. Raises InvalidQuantity."""
    text = str(text).strip()
    match = _QUANTITY_PATTERN.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise InvalidQuantity(f"{quote_text(text, _MAX_LENGTH)} is not a quantity", "write an amount such as 2 or 8Gi")
    sign, digits, suffix, exponent = match.groups()
    number = Fraction(digits)
    if exponent is not None:
        number *= Fraction(10) ** int(exponent)
    elif suffix is not None:
        number *= _BINARY_SUFFIXES.get(suffix) or _DECIMAL_SUFFIXES[suffix]
    return ParsedAmount(-number if sign == "-" else number, suffix in _BINARY_SUFFIXES)


def with_unit(text: str | int, unit: Unit) -> str:
    """The gpu-mem amount in a form that `parse_mib` reads correctly: a number without a unit gets `unit`. `2` in GiB is
    `2Gi`.

    An amount with a unit stays unchanged. An invalid amount also stays unchanged, since `parse_mib` refuses it. Raises
    InvalidQuantity if the amount is out of range.
    """
    if unit is Unit.MIB:
        return str(text)
    try:
        number, is_bytes = _parse_gpu_mem(text)
    except InvalidQuantity:
        return str(text)
    if is_bytes or number <= 0:
        return str(text)
    mib = number * unit.mib
    if mib > MAX_MIB:
        raise InvalidQuantity(f"{text} means GiB here, more than any GPU has", "write a unit, as in 8138Mi or 8Gi")
    if mib < 1:
        raise InvalidQuantity(f"{text} means GiB here, and is less than 1 MiB", "write a unit, as in 512Mi")
    return f"{number}Gi" if number.denominator == 1 else f"{_format_decimal(mib)}Mi"


def _parse_gpu_mem(text: str | int) -> ParsedAmount:
    """Parse a gpu-mem amount. Large amounts with a fraction of a byte count as bytes."""
    number, is_bytes = parse_amount(text)
    # The API server returns an amount such as 0.3Gi, which is not a whole number of bytes, as 322122547200m.
    return ParsedAmount(number, is_bytes or (number.denominator != 1 and number >= _MIN_BYTES))


def parse_mib(text: str | int) -> MiB:
    """Parse a gpu-mem amount into MiB. `8138` and `8k` mean MiB; `8Gi` means bytes, which are rounded up to whole MiB
    (`describe_rounding` returns a warning about this). Raises InvalidQuantity.
    """
    number, is_bytes = _parse_gpu_mem(text)
    if is_bytes:
        number /= _BYTES_PER_MIB
    if number <= 0:
        raise InvalidQuantity(f"{text} must be above zero", "write at least 1Mi, or leave it out")
    if is_bytes and number < 1:
        raise InvalidQuantity(
            f"{_describe_amount(text, number)} is less than 1 MiB", "write a whole number of MiB, such as 512Mi"
        )
    if not is_bytes and number.denominator != 1:
        raise _fraction_error(str(text), number)
    if number > MAX_MIB:
        raise _too_many_digits(str(text), number)
    return MiB(math.ceil(number))


def describe_rounding(text: str | int) -> str | None:
    """The warning that `parse_mib` will round up this amount of bytes to whole MiB; None if it will not."""
    try:
        number, is_bytes = _parse_gpu_mem(text)
        mib = parse_mib(text)
    except InvalidQuantity:
        return None
    number /= _BYTES_PER_MIB
    if not is_bytes or number == mib:
        return None
    return f"{_describe_amount(text, number)} is not a whole number of MiB and counts as {mib}Mi"


def _describe_amount(text: str | int, number: Fraction) -> str:
    """The amount for a sentence: in Mi or Gi, or the text with this in brackets if they differ. `number`: MiB."""
    shown = f"{float(number / _BYTES_PER_KIB):.4g}Gi" if number >= _BYTES_PER_KIB else f"{float(number):.4g}Mi"
    return shown if str(text) == shown else f"{text} ({shown})"


def _format_decimal(number: Fraction) -> str:
    """The number as quantities are written, without a fraction bar or an exponent."""
    return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"


def _fraction_error(text: str, number: Fraction) -> InvalidQuantity:
    """The error about a bare number with a fraction. `number`: MiB."""
    below = number.numerator // number.denominator
    nearby_amounts = [f"{below} or {below + 1}"] if below else []
    if number < _BYTES_PER_KIB:  # such a user often means GiB
        nearby_amounts.append(f"{math.ceil(number * _BYTES_PER_KIB)} for {float(number):.4g}Gi")
    return InvalidQuantity(f"{text} is not a whole number of MiB", f"write {', or '.join(nearby_amounts)}")


def _too_many_digits(text: str, number: Fraction) -> InvalidQuantity:
    """The error about a number that is too large, often because bytes were meant. `number`: MiB."""
    problem = f"{text} is {number if number < 10**18 else 'too many'} MiB, more than any GPU has"
    mib = number // _BYTES_PER_MIB
    if mib > MAX_MIB:
        return InvalidQuantity(problem, "write MiB, or a suffix as in 8Gi")
    suffixed = f", or {text}i" if text[-1] in "GT" else ""
    return InvalidQuantity(problem, f"without Mi or Gi it means MiB; write {mib} if you mean bytes{suffixed}")


def parse_count(text: str | int, *, minimum: int = 1, maximum: int | None = None) -> int:
    """A whole number, for example of cards. Raises InvalidQuantity."""
    number, _ = parse_amount(text)
    limits = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else "")
    if number.denominator != 1 or number < minimum or (maximum is not None and number > maximum):
        raise InvalidQuantity(f"{text} is out of range", f"write {limits}")
    return number.numerator
