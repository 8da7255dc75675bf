"""Reads JSON of the API server that is nested deeper than msgspec follows.

The API server takes 10,000 levels, in `metadata.managedFields` from everybody who may change the object. msgspec gives
up sooner, with RecursionError: one such pod would keep everybody from reading the list that it is in.

The limit depends on the Python version. With 3.11 it is the recursion limit, which is raised for that: to skip 10,000
levels takes half a MiB of a thread's stack. To make objects of them takes eight times as much, and nobody can use
these, so readers of whole objects get null for what is too deep. With 3.12 and 3.13 it is 1,500 and 10,000 levels
whatever one sets, with 3.14 what is left of the stack. If msgspec still gives up, a scan without recursion (ten times
slower) finds the parts that are too deep, and the object is read without them.
"""

import sys
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

_LEVELS: Final = 12_000  # the API server's, those of a list and of the caller
_PLACES: Final = 4  # levels in which what is too deep is looked for: metadata.managedFields[].fieldsV1
_SPARE = 100  # levels that a reader may need besides
_SHORTEST = sys.getrecursionlimit()  # bytes: what is shorter has at most half as many levels

_READ: Final = 100  # levels of what is read, at most: a list, an object and the templates in it are some twenty
_OPEN, _CLOSE = b"[{", b"]}"

_raising = threading.Lock()  # the limit is the process's
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def tolerate_depth(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """`read`, which makes nothing of what may be deep (it skips that, or leaves it raw), however deep that is."""

    def following_read(raw: bytes) -> T:
        try:
            return read(raw)
        except RecursionError:
            try:
                with _raising:
                    return _read_with_raised_limit(read, raw)
            except RecursionError:
                return read(cut_nesting_by_scan(bytes(raw)))

    return following_read


def read_bounded(read: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """`read` of an object, which raises RecursionError for none that the API server has: it gets null for what is too
    deep.
    """

    def bounded_read(raw: bytes) -> T:
        try:
            return read(raw)
        except RecursionError:
            cut = cut_nesting(bytes(raw))
        try:
            return read(cut)
        except RecursionError:  # with 3.14 what can be skipped is not shallow enough to make objects of
            return read(cut_nesting_by_scan(cut))

    return bounded_read


def cut_nesting(raw: bytes) -> bytes:
    """An object's JSON with null for each value that is too deep."""
    try:
        with _raising:
            return _encode(_cut_deep(raw, _PLACES))
    except RecursionError:
        return cut_nesting_by_scan(raw)


def cut_nesting_by_scan(raw: bytes) -> bytes:
    """JSON with null for each value that lies deeper than anything that we read; what is no JSON stays none.

    In one pass, whose time grows with the length alone.
    """
    pieces, kept, depth = list[bytes](), 0, 0
    # Without escapes each second part is a string.
    parts = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
    begins = list(accumulate(map(len, parts), lambda before, length: before + length + 1, initial=0))
    known = dict[bytes, tuple[int, int]]()
    for i, part in enumerate(parts[::2]):
        counts = known.get(part)
        if counts is None:
            counts = known[part] = _count(part, _OPEN), _count(part, _CLOSE)
        opened, closed = counts
        if depth + opened <= _READ or depth - closed > _READ:
            depth += opened - closed
            continue
        for at, letter in enumerate(part, begins[2 * i]):
            if letter in _OPEN:
                depth += 1
                if depth == _READ + 1:
                    pieces += [raw[kept:at], b"null"]
                    kept = len(raw)  # unless it ends
            elif letter in _CLOSE:
                if depth == _READ + 1:
                    kept = at + 1
                depth -= 1
    return b"".join((*pieces, raw[kept:]))


def _count(part: bytes, brackets: bytes) -> int:
    return part.count(brackets[0]) + part.count(brackets[1])


def _cut_deep(data: bytes, places: int) -> object:
    if _is_shallow(data):
        return msgspec.Raw(data)
    if not places:
        return None
    if data.lstrip().startswith(b"{"):
        return {name: _cut_within(member, places) for name, member in _read_with_raised_limit(_members, data).items()}
    return [_cut_within(member, places) for member in _read_with_raised_limit(_elements, data)]


def _cut_within(raw: msgspec.Raw, places: int) -> object:
    return raw if memoryview(raw).nbytes < _SHORTEST else _cut_deep(bytes(raw), places - 1)


def _is_shallow(data: bytes) -> bool:
    try:
        _skip(b"".join((b"[" * _SPARE, data, b"]" * _SPARE)))
    except RecursionError:
        return False
    return True


def _read_with_raised_limit(read: Callable[[bytes], T], raw: bytes) -> T:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_LEVELS)
    try:
        return read(raw)
    finally:
        sys.setrecursionlimit(limit)
