"""How many examples a property test draws."""

import os

SOAK = bool(os.environ.get("CARDWISE_SOAK"))


def examples(count: int, *, soak: int) -> int:
    """`count` in `make test`, the same ones each time; as many as `soak` says in `make soak`, which draws others."""
    return soak if SOAK else count
