"""One object for all labels, and for all lists of names, that are equal: tens of thousands of records have the same.

Pods and nodes write these texts. So the tables are limited in bytes, not only in entries: what is long is not shared.
A tenant whose pods each had 1 MiB of other labels filled the memory with labels of pods that were long deleted.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern

_ENTRIES = 4096
_LONGEST = 2048  # characters of an entry; the tables take some 20 MiB at most


def labels(of: Mapping[str, str]) -> Mapping[str, str]:
    """These labels; not to be changed."""
    if sum(map(len, of)) + sum(map(len, of.values())) > _LONGEST:
        return of
    return _labels(tuple(sorted(of.items())))


def texts(of: Iterable[str]) -> tuple[str, ...]:
    """These texts."""
    together = tuple(of)
    return _texts(together) if sum(map(len, together)) <= _LONGEST else together


@lru_cache(maxsize=_ENTRIES)
def _labels(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(items)


@lru_cache(maxsize=_ENTRIES)
def _texts(of: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(intern, of))
