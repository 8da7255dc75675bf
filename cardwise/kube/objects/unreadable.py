"""An object of Cardwise's kinds that the schema accepts, and that has no meaning nevertheless."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of an object that cannot be read. `problem`: why, with the field and what to write instead."""

    problem: str
