"""Numbers and lists in a sentence, as events, refusals and commands write them."""

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """Such as "1 device", "2 devices"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def shortened(text: str, most: int = 64) -> str:
    """What a user has written, its beginning and end where it is long."""
    return text if len(text) <= most else f"{text[:20]}...{text[-5:]}"


def few(some: Sequence[str], most: int, noun: str = "") -> str:
    """The first of them by comma, and how many more there are; `noun`: of what, in the singular."""
    more = len(some) - most
    others = count(more, f"more {noun}") if noun else f"{more} more"
    return ", ".join(some[:most]) + (f" and {others}" if more > 0 else "")
