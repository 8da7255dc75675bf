"""Decodes JSON of the API server that is nested deeper than msgspec supports.

The API server accepts 10,000 levels. Any user who may change an object can write such values, for example in
`metadata.managedFields`. msgspec fails earlier, with RecursionError. So one such pod would make the whole list
unreadable.

msgspec's limit depends on the Python version. With 3.11 it is the recursion limit, which is raised here: skipping
10,000 levels takes half a MiB of a thread's stack. Decoding them into objects would take eight times as much, and the
objects are not needed. So decoders of whole objects get null in place of values that are too deep. With 3.12 and 3.13
the limit is fixed at 1,500 and 10,000 levels; with 3.14 it is the remaining stack. If msgspec still fails, a scan
without recursion (ten times slower) replaces the values that are too deep by null.
"""

import sys
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

_RECURSION_LIMIT: Final = 12_000  # levels: the 10,000 of the API server, and those of a list and of the caller
_SEARCHED_LEVELS: Final = 4  # levels in which values are replaced, such as metadata.managedFields[].fieldsV1
_SPARE_LEVELS = 100  # levels that a decoder may need in addition to those of a value
_MIN_BYTES = sys.getrecursionlimit()  # bytes; a shorter value is not too deep, because each level takes two bytes

_MAX_LEVELS: Final = 100  # levels that the scan keeps; a list, an object and the templates in it have about twenty
_OPENING_BRACKETS, _CLOSING_BRACKETS = b"[{", b"]}"

_recursion_limit_lock = threading.Lock()  # all threads of the process share the recursion limit
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def tolerate_depth(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Return a decoder like `decode` that works at any depth. `decode` must skip deep values or leave them raw."""

    def tolerant_decode(raw: bytes) -> T:
        try:
            return decode(raw)
        except RecursionError:
            try:
                with _recursion_limit_lock:
                    return _read_with_raised_limit(decode, raw)
            except RecursionError:
                return decode(cut_nesting_by_scan(bytes(raw)))

    return tolerant_decode


def null_deep_values(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Return a decoder of whole objects that decodes too deep values as null. So it works for all objects of the API
    server, unlike `decode`.
    """

    def nulling_decode(raw: bytes) -> T:
        try:
            return decode(raw)
        except RecursionError:
            cut = cut_nesting(bytes(raw))
        try:
            return decode(cut)
        except RecursionError:  # with 3.14, a value that msgspec can skip may be too deep to be decoded
            return decode(cut_nesting_by_scan(cut))

    return nulling_decode


def cut_nesting(raw: bytes) -> bytes:
    """Replace by null each value of an object's JSON that is too deep for msgspec."""
    try:
        with _recursion_limit_lock:
            return _encode(_cut_deep(raw, _SEARCHED_LEVELS))
    except RecursionError:
        return cut_nesting_by_scan(raw)


def cut_nesting_by_scan(raw: bytes) -> bytes:
    """Replace by null each value that is deeper than `_MAX_LEVELS` levels; no field that Cardwise reads is as deep.
    Invalid JSON stays invalid.

    Takes one pass, so the time is proportional to the length.
    """
    pieces, kept, depth = list[bytes](), 0, 0
    # Escaped quotes are removed, so every second part is the content of a string.
    parts = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
    begins = list(accumulate(map(len, parts), lambda before, length: before + length + 1, initial=0))
    known = dict[bytes, tuple[int, int]]()
    for i, part in enumerate(parts[::2]):
        counts = known.get(part)
        if counts is None:
            counts = known[part] = _count_bracket(part, _OPENING_BRACKETS), _count_bracket(part, _CLOSING_BRACKETS)
        opened, closed = counts
        if depth + opened <= _MAX_LEVELS or depth - closed > _MAX_LEVELS:
            depth += opened - closed
            continue
        for at, letter in enumerate(part, begins[2 * i]):
            if letter in _OPENING_BRACKETS:
                depth += 1
                if depth == _MAX_LEVELS + 1:
                    pieces += [raw[kept:at], b"null"]
                    kept = len(raw)  # changed below when the deep value ends
            elif letter in _CLOSING_BRACKETS:
                if depth == _MAX_LEVELS + 1:
                    kept = at + 1
                depth -= 1
    return b"".join((*pieces, raw[kept:]))


def _count_bracket(part: bytes, brackets: bytes) -> int:
    return part.count(brackets[0]) + part.count(brackets[1])


def _cut_deep(data: bytes, places: int) -> object:
    if _is_shallow(data):
        return msgspec.Raw(data)
    if not places:
        return None
    if data.lstrip().startswith(b"{"):
        return {
            name: _cut_within(member, places) for name, member in _read_with_raised_limit(_decode_members, data).items()
        }
    return [_cut_within(member, places) for member in _read_with_raised_limit(_decode_elements, data)]


def _cut_within(raw: msgspec.Raw, places: int) -> object:
    return raw if memoryview(raw).nbytes < _MIN_BYTES else _cut_deep(bytes(raw), places - 1)


def _is_shallow(data: bytes) -> bool:
    try:
        _decode_raw(b"".join((b"[" * _SPARE_LEVELS, data, b"]" * _SPARE_LEVELS)))
    except RecursionError:
        return False
    return True


def _read_with_raised_limit(decode: Callable[[bytes], T], raw: bytes) -> T:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        return decode(raw)
    finally:
        sys.setrecursionlimit(limit)
