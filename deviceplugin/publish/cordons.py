"""The cordons of this node's cards and devices, saved on the node's disk.

The ExtendedResource is authoritative while it exists. But this object is deleted with its Node, or when the card is
missing for a moment. The object that replaces it must not offer a card that an administrator has cordoned.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from cardwise.kube.objects.extendedresources import Cordon, ExtendedResource
from cardwise.runtime.replacing import replace_file

_log = structlog.get_logger(__name__)


_UNREADABLE_REASON = "the reason was written by another version of Cardwise"


class Cordons:
    """The saved cordons. Not thread-safe.

    A card whose entry cannot be read, for example an entry of another version, is treated as cordoned. If the whole
    file is unreadable, all cards are treated as open, and a copy of the file is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_uuid: dict[str, Cordon] = {}
        try:
            self._load_cordons(path.read_bytes())
        except FileNotFoundError:
            pass  # no card of this node was ever cordoned
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            _log.error("failed to read the saved cordons", path=str(path), error=str(error))
        self._saved = dict(self._by_uuid)

    def save_cordons(self, resources: Iterable[ExtendedResource]) -> None:
        """Save the cordons of these objects. Cordons of deleted objects are kept."""
        for resource in resources:
            if resource.spec.unschedulable:
                self._by_uuid[resource.spec.uuid] = resource.spec.cordon
            else:
                self._by_uuid.pop(resource.spec.uuid, None)
        if self._by_uuid != self._saved or (self._by_uuid and not self._path.exists()):
            self._save_cordons()

    def spec_fields(self, uuid: str) -> dict[str, Any]:
        """The cordon fields for the spec of a new ExtendedResource; {} if the card is not cordoned."""
        cordon = self._by_uuid.get(uuid)
        return {} if cordon is None else {"unschedulable": True, "cordon": msgspec.to_builtins(cordon)}

    def _load_cordons(self, text: bytes) -> None:
        """Read the saved cordons. Raises OSError or msgspec.DecodeError."""
        try:
            entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            replace_file(self._path.with_name(f"{self._path.name}.unreadable"), text)
            raise
        for uuid, raw in entries.items():
            try:
                self._by_uuid[uuid] = msgspec.json.decode(raw, type=Cordon)
            except (msgspec.DecodeError, RecursionError) as error:
                _log.error("failed to read why a GPU was cordoned", uuid=uuid, path=str(self._path), error=str(error))
                self._by_uuid[uuid] = Cordon(reason=_UNREADABLE_REASON)

    def _save_cordons(self) -> None:
        try:
            replace_file(self._path, msgspec.json.encode(self._by_uuid))
        except OSError as error:  # the cards are published nevertheless; the next pass tries again
            _log.warning("failed to save the cordons", path=str(self._path), error=str(error))
            return
        self._saved = dict(self._by_uuid)
