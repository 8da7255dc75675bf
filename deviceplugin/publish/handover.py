"""Detects that the kubelet still counts gpu-mem for gpushare's device plugin, which served this node before.

It goes on so for five minutes after that plugin has ended, and for as long as a pod runs that got its share there. All
that time it fails each new pod that asks for gpu-mem (UnexpectedAdmissionError, for good), since nobody offers it
devices. So no card is shared until then: pods wait instead, and those that run stay.
"""

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cardwise.core.api import names
from deviceplugin.sources.kubelet import decode_checkpoint


@dataclass(frozen=True, slots=True)
class GpuMemRecord:
    """What the kubelet says of gpu-mem. `devices`: how many, None where no device plugin has it. `holders` are UIDs.

    `ours`: it knows our plugin.
    """

    devices: int | None = None
    holders: frozenset[str] = frozenset()
    ours: bool = False


def parse(content: bytes) -> GpuMemRecord:
    """From the kubelet's device checkpoint."""
    try:
        data = decode_checkpoint(content).data
    except msgspec.DecodeError:
        return GpuMemRecord()  # PreStartContainer reads the same file, and says so
    registered = data.registered_devices or {}
    return GpuMemRecord(
        len(registered[names.GPU_MEM] or ()) if names.GPU_MEM in registered else None,
        frozenset(entry.pod_uid for entry in data.pod_device_entries or () if entry.resource_name == names.GPU_MEM),
        names.SHARE in registered,
    )


def why_not(seen: GpuMemRecord, living: Collection[str]) -> str:
    """What keeps the cards from being shared, "" where nothing does. `living`: UIDs of the pods that are not finished.

    Other holders are old: the kubelet drops them before it next gives a device away. Pure.
    """
    if seen.devices:
        return f"another device plugin offers {names.GPU_MEM} on this node, as gpushare's does: end it there"
    left = len(seen.holders.intersection(living))
    if left:
        return f"pods that gpushare's device plugin gave a share run on this node ({left}): wait for their end"
    if seen.devices is None:
        return ""
    return (
        f"the kubelet has not forgotten gpushare's device plugin yet ({names.GPU_MEM}): it does so five minutes after "
        "the plugin's end, if it is not restarted meanwhile"
    )


class HandOver:
    """Looks into the checkpoint when it has changed: with gpushare's plugin it has megabytes.

    An admin who does not want to wait may stop the kubelet, remove the checkpoint, and start the kubelet again. Until
    our plugin has registered with it, such a kubelet starts containers without asking for our grant. So on a node that
    was gpushare's, no card is shared before that.
    """

    def __init__(self, kubelet_dir: Path) -> None:
        self._checkpoint = kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint"
        self._mark = (0, 0, 0)
        self._seen = GpuMemRecord()
        self._leaving = False
        self._lock = threading.Lock()

    def why_not(self, living: Iterable[str]) -> str:
        """As the function."""
        with self._lock:
            self._look()
            if not self._leaving and self._seen.devices is None and not self._seen.holders:
                return ""
            why = why_not(self._seen, frozenset(living))
            self._leaving = bool(why) or not self._seen.ours
            return why or ("the kubelet has restarted and does not know our device plugin yet" if self._leaving else "")

    def _look(self) -> None:
        try:
            found = self._checkpoint.stat()
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
            if mark != self._mark:
                self._seen, self._mark = parse(self._checkpoint.read_bytes()), mark
        except OSError:
            self._seen, self._mark = GpuMemRecord(), (0, 0, 0)  # no plugin has registered yet
