"""The cordons of this node's cards and devices, kept on its own disk.

The ExtendedResource is the truth of it while there is one. But the object goes with its Node, or when the card was away
for a moment, and its next one must not offer a card that somebody has taken out of use.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from cardwise.kube.wire import Cordon, ExtendedResource
from cardwise.runtime.replacing import replace

_log = structlog.get_logger(__name__)


_UNKNOWN = "another version of Cardwise has written why"


class Cordons:
    """For one thread. A card whose entry cannot be read, such as one of another version, is cordoned all the same. A
    file that cannot be read at all is as if nothing had been cordoned, and kept beside the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_uuid: dict[str, Cordon] = {}
        with contextlib.suppress(FileNotFoundError):
            try:
                self._read(path.read_bytes())
            except (OSError, msgspec.DecodeError) as error:
                _log.error("which cards were cordoned is not known", path=str(path), error=str(error))
        self._written = dict(self._by_uuid)

    def note(self, resources: Iterable[ExtendedResource]) -> None:
        """What the objects say now; of those that are gone the last word stays."""
        for resource in resources:
            if resource.spec.unschedulable:
                self._by_uuid[resource.spec.uuid] = resource.spec.cordon
            else:
                self._by_uuid.pop(resource.spec.uuid, None)
        if self._by_uuid != self._written or (self._by_uuid and not self._path.exists()):
            self._write()

    def mark(self, uuid: str) -> dict[str, Any]:
        """What the spec of a new object says of it beside what the card is."""
        cordon = self._by_uuid.get(uuid)
        return {} if cordon is None else {"unschedulable": True, "cordon": msgspec.to_builtins(cordon)}

    def _read(self, text: bytes) -> None:
        """Raises OSError, msgspec.DecodeError."""
        try:
            entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            replace(self._path.with_name(f"{self._path.name}.unreadable"), text)
            raise
        for uuid, raw in entries.items():
            try:
                self._by_uuid[uuid] = msgspec.json.decode(raw, type=Cordon)
            except msgspec.DecodeError as error:
                _log.error("why a card was cordoned is not known", uuid=uuid, path=str(self._path), error=str(error))
                self._by_uuid[uuid] = Cordon(reason=_UNKNOWN)

    def _write(self) -> None:
        try:
            replace(self._path, msgspec.json.encode(self._by_uuid))
        except OSError as error:  # the cluster must hear of the cards all the same; the next round tries again
            _log.warning("which cards are cordoned was not written", path=str(self._path), error=str(error))
            return
        self._written = dict(self._by_uuid)
