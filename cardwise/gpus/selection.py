"""The cards of a node that an administrator lets Cardwise share: the option `--gpus`.

The other modules of the node components see only the selected cards. So another program, such as NVIDIA's own device
plugin, can have the other cards.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus.protocol import HEALTHY, GpuCard, Gpus, Health

FIELD = "--gpus"
_REMEDY = "write indices such as 0,2, or UUIDs such as GPU-8dc8a2a1-ed6e-0c5b-9d0f-5d1d3c2b1a00, by comma"
_UUID = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


@dataclass(frozen=True, slots=True)
class CardSelection:
    """A selection of cards by index or by UUID. UUIDs are in lower case, as in names of ExtendedResources."""

    entries: tuple[int | str, ...]

    def selects(self, card: GpuCard) -> bool:
        return card.index in self.entries or card.uuid.lower() in self.entries

    def problems(self, cards: list[GpuCard]) -> list[str]:
        """The problems of this selection on a machine with these cards, one line each."""
        present = ", ".join(f"{card.index} ({card.uuid})" for card in cards) or "none"
        problems = [
            f"{FIELD}: {entry} is not a GPU of this node; use one of: {present}"
            for entry in self.entries
            if not any(entry in (card.index, card.uuid.lower()) for card in cards)
        ]
        problems += [
            f"{FIELD}: {card.index} and {card.uuid} are the same GPU; list it once"
            for card in cards
            if card.index in self.entries and card.uuid.lower() in self.entries
        ]
        return problems


def parse_selection(text: str) -> CardSelection:
    """Parse a comma-separated list of indices and UUIDs. Raises InvalidRequest if it is wrong on every machine."""
    entries: list[int | str] = []
    for part in text.split(","):
        word = part.strip()
        if word.isascii() and word.isdigit():
            entry: int | str = int(word)
        elif _UUID.fullmatch(word):
            entry = word.lower()
        elif word:
            raise InvalidRequest(FIELD, f"{word!r} is neither the index nor the UUID of a GPU", _REMEDY)
        else:
            raise InvalidRequest(FIELD, f"{text!r} has an empty entry", f"{_REMEDY}; leave {FIELD} out for all GPUs")
        if entry in entries:
            raise InvalidRequest(FIELD, f"{word!r} is listed twice", "list each GPU once")
        entries.append(entry)
    return CardSelection(tuple(entries))


class _FilteredGpus:
    """A subset of the cards of `gpus`. Subclasses define the subset in `cards`."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def cards(self) -> list[GpuCard]:
        raise NotImplementedError

    def unresponsive_indices(self) -> list[int]:
        return self._gpus.unresponsive_indices()

    def health(self) -> Mapping[str, Health]:
        uuids = {card.uuid for card in self.cards()}
        return {uuid: state for uuid, state in self._gpus.health().items() if uuid in uuids}

    def wait_change(self, timeout: float) -> bool:
        return self._gpus.wait_change(timeout)

    def close(self) -> None:
        self._gpus.close()


class SelectedGpus(_FilteredGpus):
    """The selected cards. A selected card that is missing is left out until it appears."""

    def __init__(self, gpus: Gpus, selection: CardSelection) -> None:
        super().__init__(gpus)
        self._selection = selection

    def cards(self) -> list[GpuCard]:
        return [card for card in self._gpus.cards() if self._selection.selects(card)]

    def unresponsive_indices(self) -> list[int]:
        """The indices of unresponsive cards that may be selected.

        Such a card is selected by its index, or may have a selected UUID that no known card has.
        """
        unresponsive = self._gpus.unresponsive_indices()
        known_uuids = {card.uuid.lower() for card in self._gpus.cards()}
        any_unknown_uuid = any(isinstance(entry, str) and entry not in known_uuids for entry in self._selection.entries)
        return [index for index in unresponsive if any_unknown_uuid or index in self._selection.entries]

    def problems(self) -> list[str]:
        """The current problems of the selection on this machine, one line each."""
        return self._selection.problems(self._gpus.cards())


class NonMigGpus(_FilteredGpus):
    """The cards that are not in MIG mode. A card in MIG mode is left out: another component allocates its slices."""

    def cards(self) -> list[GpuCard]:
        health = self._gpus.health()
        return [card for card in self._gpus.cards() if not health.get(card.uuid, HEALTHY).mig]
