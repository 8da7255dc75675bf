"""Detects that the kubelet still accounts gpu-mem to gpushare's device plugin, which served this node before.

The kubelet does so for five minutes after that plugin has ended, and longer if a pod with a share from that plugin
still runs. In that time the kubelet fails each new pod that requests gpu-mem (UnexpectedAdmissionError, permanently),
since no plugin offers devices for gpu-mem. So no card is shared in that time: new pods wait, and running pods stay.
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
    """The kubelet's record of gpu-mem.

    devices: number of devices; None if no device plugin is registered for gpu-mem.
    holders: UIDs of the pods that hold devices.
    has_our_plugin: whether Cardwise's device plugin is registered.
    """

    devices: int | None = None
    holders: frozenset[str] = frozenset()
    has_our_plugin: bool = False


def parse_checkpoint(content: bytes) -> GpuMemRecord:
    """Parse the kubelet's device checkpoint."""
    try:
        data = decode_checkpoint(content).data
    except msgspec.DecodeError:
        return GpuMemRecord()  # PreStartContainer reads the same file, and reports the error
    registered = data.registered_devices or {}
    return GpuMemRecord(
        len(registered[names.GPU_MEM] or ()) if names.GPU_MEM in registered else None,
        frozenset(entry.pod_uid for entry in data.pod_device_entries or () if entry.resource_name == names.GPU_MEM),
        names.SHARE in registered,
    )


def sharing_problem(record: GpuMemRecord, living_uids: Collection[str]) -> str | None:
    """Why the cards cannot be shared yet; None if they can be shared. Pure.

    living_uids: UIDs of the pods that are not finished. The kubelet drops holders outside this list before it allocates
        the next device.
    """
    if record.devices:
        return f"another device plugin offers {names.GPU_MEM} on this node, as gpushare's does: remove it there"
    running_uids = record.holders & frozenset(living_uids)
    if running_uids:
        pods = f"pods with a share from gpushare's device plugin run on this node ({len(running_uids)})"
        return f"{pods}: wait until they have ended"
    if record.devices is None:
        return None
    return (
        f"the kubelet has not forgotten gpushare's device plugin yet ({names.GPU_MEM}): it does so five minutes after "
        "that plugin's end, unless the kubelet is restarted before"
    )


class GpushareHandover:
    """Checks whether the kubelet has forgotten gpushare's device plugin.

    Reads the checkpoint only after a change, since with gpushare's plugin the file has megabytes.

    Instead of waiting, an administrator may stop the kubelet, remove the checkpoint, and start the kubelet again. Such
    a kubelet starts containers without a grant until our plugin has registered with it. So on a node that gpushare
    served, no card is shared before the registration.
    """

    def __init__(self, kubelet_dir: Path) -> None:
        self._checkpoint = kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint"
        self._file_identity = (0, 0, 0)
        self._record = GpuMemRecord()
        self._is_waiting = False
        self._lock = threading.Lock()

    def sharing_problem(self, living_uids: Iterable[str]) -> str | None:
        """Why the cards cannot be shared yet, according to the present checkpoint; None if they can be shared."""
        with self._lock:
            self._read_checkpoint()
            if not self._is_waiting and self._record.devices is None and not self._record.holders:
                return None
            problem = sharing_problem(self._record, frozenset(living_uids))
            self._is_waiting = bool(problem) or not self._record.has_our_plugin
            return problem or (
                "the kubelet has restarted and does not know our device plugin yet" if self._is_waiting else None
            )

    def _read_checkpoint(self) -> None:
        try:
            status = self._checkpoint.stat()
            file_identity = (status.st_ino, status.st_mtime_ns, status.st_size)
            if file_identity != self._file_identity:
                self._record, self._file_identity = parse_checkpoint(self._checkpoint.read_bytes()), file_identity
        except OSError:
            self._record, self._file_identity = GpuMemRecord(), (0, 0, 0)  # no plugin has registered yet
