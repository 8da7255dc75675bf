"""Lets tens of thousands of records share one object for equal labels, and one object for equal lists of names.

Owners of pods and nodes choose these texts. So the tables are limited in bytes as well as in entries, and only short
texts are shared. Without that limit, a tenant whose pods have 1 MiB of different labels each could fill the memory with
labels of deleted pods.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern

_MAX_CACHED_ENTRIES = 4096
_MAX_CHARACTERS = 2048  # maximum number of characters of a cached object: then the tables take some 20 MiB at most


def reuse_equal_labels(original: Mapping[str, str]) -> Mapping[str, str]:
    """The shared object that equals these labels. It must not be changed."""
    if sum(map(len, original)) + sum(map(len, original.values())) > _MAX_CHARACTERS:
        return original
    return _cached_labels(tuple(sorted(original.items())))


def reuse_equal_texts(originals: Iterable[str]) -> tuple[str, ...]:
    """The shared tuple of these texts."""
    originals_tuple = tuple(originals)
    return _cached_texts(originals_tuple) if sum(map(len, originals_tuple)) <= _MAX_CHARACTERS else originals_tuple


@lru_cache(maxsize=_MAX_CACHED_ENTRIES)
def _cached_labels(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(pairs)


@lru_cache(maxsize=_MAX_CACHED_ENTRIES)
def _cached_texts(originals: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(intern, originals))
