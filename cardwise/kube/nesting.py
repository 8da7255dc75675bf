"""JSON of the API server that is nested deeper than msgspec follows, read without what lies that deep.

The API server takes 10,000 levels, in `metadata.managedFields` from everybody who may change the object. msgspec gives
up at Python's recursion limit: one such pod would keep everybody from reading the list that it is in.
"""

import re
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

DEEPEST: Final = 100  # levels that are kept; nothing that we read lies deeper than twenty
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{\]}]', re.DOTALL)


def bounded(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """`read`, which raises RecursionError for nothing that the API server sends."""

    def bounded_read(raw: bytes) -> T:
        try:
            return read(raw)
        except RecursionError:
            return read(shallow(bytes(raw)))

    return bounded_read


def shallow(raw: bytes) -> bytes:
    """The JSON with null for each object and array below `DEEPEST` levels."""
    kept, begin, depth = [], 0, 0
    for token in _TOKEN.finditer(raw):
        match raw[token.start()]:
            case 0x7B | 0x5B:  # { [
                depth += 1
                if depth == DEEPEST + 1:
                    kept += [raw[begin : token.start()], b"null"]
            case 0x7D | 0x5D:  # } ]
                if depth == DEEPEST + 1:
                    begin = token.end()
                depth -= 1
    return b"".join([*kept, raw[begin:]])
