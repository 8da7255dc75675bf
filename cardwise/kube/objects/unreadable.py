"""An object of one of Cardwise's kinds that passes the schema of its CRD but cannot be used."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of an object that cannot be read. `problem`: why, with the field and what to write instead."""

    problem: str


def parse_or_unreadable(parse: Callable[[Json], T], manifest: Json) -> T | Unreadable:
    """What `parse` returns for the object, or why the object cannot be read.

    parse: raises InvalidRequest for an object without a meaning.
    """
    try:
        return parse(manifest)
    except InvalidRequest as error:
        return Unreadable(str(error))
