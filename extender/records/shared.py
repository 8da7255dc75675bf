"""One object for all equal labels, and for all equal lists of names: tens of thousands of records have the same.

Pods and nodes write these texts. So the tables are limited in bytes, not only in entries: long texts are not shared.
Without that limit a tenant whose pods each had 1 MiB of other labels filled the memory with labels of deleted pods.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern

_ENTRIES = 4096
_MAX_CHARACTERS = 2048  # characters of an entry; the tables take some 20 MiB at most


def share_labels(original: Mapping[str, str]) -> Mapping[str, str]:
    """The labels as a shared object, which must not be changed."""
    if sum(map(len, original)) + sum(map(len, original.values())) > _MAX_CHARACTERS:
        return original
    return _cached_labels(tuple(sorted(original.items())))


def share_texts(originals: Iterable[str]) -> tuple[str, ...]:
    """The texts as a shared object."""
    originals_tuple = tuple(originals)
    return _cached_texts(originals_tuple) if sum(map(len, originals_tuple)) <= _MAX_CHARACTERS else originals_tuple


@lru_cache(maxsize=_ENTRIES)
def _cached_labels(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(pairs)


@lru_cache(maxsize=_ENTRIES)
def _cached_texts(originals: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(intern, originals))
