"""Reads JSON of the API server that is nested deeper than msgspec allows.

The API server takes 10,000 levels, in `metadata.managedFields` from everybody who may change the object. msgspec gives
up at Python's recursion limit: one such pod would keep everybody from reading the list that it is in. To skip 10,000
levels takes half a MiB of a thread's stack, so the limit is raised for that; to make objects of them takes eight times
as much, and nobody can use these, so readers of whole objects get null for what is too deep.
"""

import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

_LEVELS: Final = 12_000  # the API server's, those of a list and of the caller
_PLACES: Final = 4  # levels in which what is too deep is looked for: metadata.managedFields[].fieldsV1
_SPARE = 100  # levels that a reader may need besides
_SHORTEST = sys.getrecursionlimit()  # bytes: what is shorter has at most half as many levels

_raising = threading.Lock()  # the limit is the process's
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def following(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """`read`, which makes nothing of what may be deep (it skips that, or leaves it raw), however deep that is."""

    def following_read(raw: bytes) -> T:
        try:
            return read(raw)
        except RecursionError:
            with _raising:
                return _deeper(read, raw)

    return following_read


def bounded(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """`read` of an object, which raises RecursionError for none that the API server has: it gets null for what is too
    deep.
    """

    def bounded_read(raw: bytes) -> T:
        try:
            return read(raw)
        except RecursionError:
            return read(shallow(bytes(raw)))

    return bounded_read


def shallow(raw: bytes) -> bytes:
    """An object's JSON with null for each value that is too deep."""
    with _raising:
        return _encode(_cut(raw, _PLACES))


def _cut(data: bytes, places: int) -> object:
    if _is_shallow(data):
        return msgspec.Raw(data)
    if not places:
        return None
    if data.lstrip().startswith(b"{"):
        return {name: _cut_within(value, places) for name, value in _deeper(_members, data).items()}
    return [_cut_within(value, places) for value in _deeper(_elements, data)]


def _cut_within(value: msgspec.Raw, places: int) -> object:
    return value if memoryview(value).nbytes < _SHORTEST else _cut(bytes(value), places - 1)


def _is_shallow(data: bytes) -> bool:
    try:
        _skip(b"".join((b"[" * _SPARE, data, b"]" * _SPARE)))
    except RecursionError:
        return False
    return True


def _deeper(read: Callable[[bytes], T], raw: bytes) -> T:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_LEVELS)
    try:
        return read(raw)
    finally:
        sys.setrecursionlimit(limit)
