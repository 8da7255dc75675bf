"""Some of a machine's cards: those that an administrator lets Cardwise share.

Everything above sees these alone, so that the others can be given to somebody else, such as NVIDIA's own device
plugin, and never be met.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus.protocol import HEALTHY, GpuCard, Gpus, Health

FIELD = "--cards"
_REMEDY = "write indices such as 0,2, or UUIDs such as GPU-8dc8a2a1-ed6e-0c5b-9d0f-5d1d3c2b1a00, by comma"
_UUID = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


@dataclass(frozen=True, slots=True)
class CardChoice:
    """Cards by index or by UUID; UUIDs in lower case, as they name objects."""

    entries: tuple[int | str, ...]

    def names(self, card: GpuCard) -> bool:
        return card.index in self.entries or card.uuid.lower() in self.entries

    def problems(self, cards: list[GpuCard]) -> list[str]:
        """What is wrong with it on a machine with these cards, a line each."""
        here = ", ".join(f"{card.index} ({card.uuid})" for card in cards) or "none"
        found = [
            f"{FIELD}: {entry} is no card of this node; it has {here}: write one of these"
            for entry in self.entries
            if not any(entry in (card.index, card.uuid.lower()) for card in cards)
        ]
        found += [
            f"{FIELD}: {card.index} and {card.uuid} are the same card; name it once"
            for card in cards
            if card.index in self.entries and card.uuid.lower() in self.entries
        ]
        return found


def parse(text: str) -> CardChoice:
    """A choice as people write it, by comma. Raises InvalidRequest for what is wrong on any machine."""
    entries: list[int | str] = []
    for item in text.split(","):
        written = item.strip()
        if written.isascii() and written.isdigit():
            entry: int | str = int(written)
        elif _UUID.fullmatch(written):
            entry = written.lower()
        elif written:
            raise InvalidRequest(FIELD, f"{written!r} is neither the index nor the UUID of a card", _REMEDY)
        else:
            raise InvalidRequest(FIELD, f"{text!r} has an empty entry", f"{_REMEDY}; leave {FIELD} out for all cards")
        if entry in entries:
            raise InvalidRequest(FIELD, f"{written!r} is there twice", "name each card once")
        entries.append(entry)
    return CardChoice(tuple(entries))


class _Some:
    """`Gpus` of some of the cards of `gpus`: a subclass says which."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def cards(self) -> list[GpuCard]:
        raise NotImplementedError

    def silent(self) -> list[int]:
        return self._gpus.silent()

    def health(self) -> Mapping[str, Health]:
        here = {card.uuid for card in self.cards()}
        return {uuid: state for uuid, state in self._gpus.health().items() if uuid in here}

    def wait_change(self, timeout: float) -> bool:
        return self._gpus.wait_change(timeout)

    def close(self) -> None:
        self._gpus.close()


class ChosenGpus(_Some):
    """Those that were chosen; a card that is not there is left out until it comes."""

    def __init__(self, gpus: Gpus, choice: CardChoice) -> None:
        super().__init__(gpus)
        self._choice = choice

    def cards(self) -> list[GpuCard]:
        return [card for card in self._gpus.cards() if self._choice.names(card)]

    def silent(self) -> list[int]:
        """Those that may be chosen: by their index, or by a UUID that no card has that is known."""
        silent = self._gpus.silent()
        known = {card.uuid.lower() for card in self._gpus.cards()}
        unknown = any(isinstance(entry, str) and entry not in known for entry in self._choice.entries)
        return [index for index in silent if unknown or index in self._choice.entries]

    def problems(self) -> list[str]:
        """What is wrong with the choice on this machine at present, a line each."""
        return self._choice.problems(self._gpus.cards())


class WholeGpus(_Some):
    """Those that are not in MIG mode. Such a card is as one that is not there, since its slices are others'."""

    def cards(self) -> list[GpuCard]:
        health = self._gpus.health()
        return [card for card in self._gpus.cards() if not health.get(card.uuid, HEALTHY).mig]
