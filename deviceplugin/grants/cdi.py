"""The CDI spec of a slot: the device nodes and the environment of the container that has the slot now.

The spec is written when the container is about to start, and the runtime reads it right after. The folder of the specs
is often a tmpfs, so missing specs are recreated from the grants. For a real card the edits (device nodes, driver
libraries, hooks) are copied from the node's own nvidia.com/gpu spec, which `nvidia-ctk cdi generate` has written. The
format is SPEC.md of github.com/cncf-tags/container-device-interface.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
import yaml
from msgspec import Struct

from cardwise.core.api import isolation, mps, names, shareagent
from cardwise.core.api.isolation import MemoryTier
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard
from cardwise.kube.wire import prepare_types
from cardwise.runtime import replacing
from deviceplugin.grants import environment
from deviceplugin.grants.grants import Grant

_log = structlog.get_logger(__name__)

Edits = dict[str, Any]
Spec = dict[str, Any]

CDI_VERSION = "0.6.0"
_NVIDIA_KIND = "nvidia.com/gpu"
_CARD_NODE_NAME = re.compile(r"nvidia\d+")
_GENERATE_REMEDY = (
    "create the spec again on the node with "
    "`nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml --device-name-strategy=uuid`"
)
_SAFE_MOUNT_OPTIONS = ("nosuid", "nodev", "noexec")
_READ_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError)
_LIST_FIELDS = ("deviceNodes", "hooks", "mounts", "additionalGids", "netDevices")


class NoDevice(Exception):
    """No container can get the card or device; the message names the reason and the remedy."""


def device_name(slot: str) -> str:
    """The CDI device name of a slot, as Allocate returns it."""
    return f"{names.CDI_KIND}={slot}"


def spec_path(folder: Path, slot: str) -> Path:
    return folder / f"{names.CDI_KIND.replace('/', '-')}-{slot}.json"


def card_node_edits(card: GpuCard) -> Edits:
    """The CDI edits that add only the card's device nodes. Raises NoDevice."""
    card_text = f"card {card.index} ({card.uuid})"
    return {"deviceNodes": [_device_node(card_text, node.host, node.container) for node in card.devices]}


def device_edits(device: OtherDevice) -> Edits:
    """The CDI edits for a device: its own device nodes, and the device nodes that all devices of its kind share. Raises
    NoDevice.
    """
    device_text = f"{device.kind} {device.index} ({device.uuid})"
    nodes = (*device.nodes, *device.common)
    return {"deviceNodes": [_device_node(device_text, node.host, node.container) for node in nodes]}


def mps_edits(grant: Grant) -> Edits:
    """The CDI edits that mount the socket of the grant's MPS daemon; for the share agent, folders with the daemon's
    state.

    A container sees only the daemon's socket. In the share agent's folders, an empty tmpfs hides the log and the pipe
    folder. The log names other pods, and the daemon locks and writes files of the pipe folder.
    """
    if grant.is_agent:
        folders = [(folder, f"{shareagent.MPS_ROOT}/{Path(folder).name}") for folder in grant.mps]
        mounts = []
        for folder, container_folder in folders:
            mounts += [
                _bind_mount(folder, container_folder, "ro"),
                *(_cover_mount(f"{container_folder}/{name}") for name in (mps.LOG_FOLDER, mps.PIPE_FOLDER)),
            ]
        return {"mounts": mounts}
    return {"mounts": [_bind_mount(f"{folder}/{mps.CLIENTS_FOLDER}", mps.CONTAINER_PIPE, "ro") for folder in grant.mps]}


def memory_tier_edits(grant: Grant, cards: Sequence[GpuCard]) -> Edits:
    """The CDI edits that tell a container its memory tier, and make the driver limit its memory, with or without MPS.
    Empty for a container without cards.

    The driver, as MPS, limits only a container with exactly one card. NVIDIA's container toolkit (1.20.1 and later)
    reads the driver's limit, in MiB, from the container's environment.
    """
    if not cards:
        return {}
    tier, limits = MemoryTier.ADVISORY, []
    if len(cards) == 1:
        (share,) = grant.shares
        if not share.whole and isolation.has_kernel_limit(cards[0].properties.get("driver", "")):
            tier, limits = MemoryTier.KERNEL, [f"{names.ENV_GPU_MEMORY_LIMIT}={share.mem}"]
        elif grant.mps:
            tier = MemoryTier.MPS
    return {"env": [f"{names.ENV_ISOLATION}={tier}", *limits]}


def _bind_mount(host: str, container: str, access: str) -> dict[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": ["bind", access, *_SAFE_MOUNT_OPTIONS]}


def _cover_mount(path: str) -> dict[str, Any]:
    return {
        "hostPath": "tmpfs",
        "containerPath": path,
        "type": "tmpfs",
        "options": ["ro", "size=4k", *_SAFE_MOUNT_OPTIONS],
    }


def _device_node(device_text: str, host: str, container: str) -> dict[str, Any]:
    try:
        status = Path(host).stat()
    except OSError as error:
        raise NoDevice(f"{device_text}: {host}: {error.strerror}") from error
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise NoDevice(f"{device_text}: {host} is not a device node; create one with mknod")
    return {
        "path": container,
        "hostPath": host,
        "type": "b" if stat.S_ISBLK(status.st_mode) else "c",
        "major": os.major(status.st_rdev),
        "minor": os.minor(status.st_rdev),
        "permissions": "rw",
    }


class _SpecEdits(Struct, rename="camel"):
    device_nodes: list[dict[str, Any]] | None = None
    env: list[str] | None = None
    mounts: list[Any] | None = None
    hooks: list[Any] | None = None
    additional_gids: list[Any] | None = None
    net_devices: list[Any] | None = None


class _SpecDevice(Struct, rename="camel"):
    name: Any
    container_edits: _SpecEdits | None = None


class _NvidiaSpec(Struct, rename="camel"):
    """The fields of NVIDIA's CDI spec that Cardwise reads."""

    kind: Literal["nvidia.com/gpu"]
    cdi_version: Any
    container_edits: _SpecEdits | None = None
    devices: list[_SpecDevice] | None = None


prepare_types(_NvidiaSpec)


def _parse_spec(content: str) -> dict[str, Any] | None:
    """Parse a CDI spec; returns None if its kind is not NVIDIA's.

    Raises one of `_READ_ERRORS` if the content is not a CDI spec, or cannot be encoded as JSON.
    """
    spec = yaml.safe_load(content)  # JSON is YAML
    if isinstance(spec, dict) and spec.get("kind") != _NVIDIA_KIND:
        return None
    msgspec.convert(spec, _NvidiaSpec)
    msgspec.json.encode(spec)
    return spec  # type: ignore[no-any-return]


class NvidiaSpecs:
    """The node's own CDI specs of NVIDIA's cards, read again when they change.

    A card's edits must contain the card's own device node, as the driver reports it, and no device node of another
    card. In a spec from before a change of the hardware, the same numbers may belong to other cards.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """paths: files, or folders whose *.json and *.yaml are read. As in CDI, later paths take precedence."""
        self._paths = tuple(paths)
        self._cache: dict[Path, tuple[tuple[int, int, int], dict[str, Any] | None]] = {}

    def card_edits(self, card: GpuCard) -> tuple[Edits, str]:
        """The card's edits together with the spec's common edits, and the CDI version that they need. Raises
        NoDevice.
        """
        file, spec, device = self._find_device(card)
        edits = merge_edits([spec.get("containerEdits") or {}, device.get("containerEdits") or {}])
        spec_nodes = {
            Path(str(node.get("hostPath") or node.get("path"))).name for node in edits.get("deviceNodes") or ()
        }
        spec_nodes = {name for name in spec_nodes if _CARD_NODE_NAME.fullmatch(name)}
        card_nodes = {Path(node.host).name for node in card.devices}
        if spec_nodes != card_nodes:
            raise NoDevice(
                f"card {card.index} ({card.uuid}) is {_join_sorted(card_nodes)}, but {file} has "
                f"{_join_sorted(spec_nodes)} for it; {_GENERATE_REMEDY}"
            )
        return edits, str(spec["cdiVersion"])

    def _find_device(self, card: GpuCard) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """The file and spec that contain the card, and its device entry. Raises NoDevice."""
        card_text = f"card {card.index} ({card.uuid})"
        for name in (card.uuid, str(card.index)):
            for path in reversed(self._paths):
                matches = [
                    (file, spec, device)
                    for file, spec in self._list_specs(path)
                    for device in spec.get("devices") or ()
                    if str(device.get("name")) == name
                ]
                if len(matches) > 1:
                    files = " and ".join(str(file) for file, _, _ in matches)
                    raise NoDevice(
                        f"{card_text}: {_NVIDIA_KIND}={name} is in {files}; remove one, since CDI accepts neither"
                    )
                if matches:
                    return matches[0]
        raise NoDevice(
            f"{card_text} is in no {_NVIDIA_KIND} CDI spec below {_join_sorted(map(str, self._paths))}; "
            f"{_GENERATE_REMEDY}"
        )

    def _list_specs(self, path: Path) -> Iterable[tuple[Path, dict[str, Any]]]:
        files = path.iterdir() if path.is_dir() else [path]
        # Skip our own specs: they are many, and contain none of NVIDIA's devices.
        for file in sorted(file for file in files if not file.name.startswith(_OWN_PREFIX)):
            if file.suffix in {".json", ".yaml", ".yml"}:
                spec = self._read_spec(file)
                if spec is not None:
                    yield file, spec

    def _read_spec(self, file: Path) -> dict[str, Any] | None:
        """Read the CDI spec in a file; returns None if the file has no spec of NVIDIA's cards.

        A file is parsed, and its failure logged, once for each change of the file.
        """
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
            if file in self._cache and self._cache[file][0] == stamp:
                return self._cache[file][1]
            content = file.read_bytes()
        except OSError:
            return None
        spec = None
        try:
            spec = _parse_spec(content.decode())
        except _READ_ERRORS as error:
            _log.warning("ignored a CDI spec that cannot be read", file=str(file), error=str(error))
        self._cache[file] = (stamp, spec)
        return spec


_OWN_PREFIX = names.CDI_KIND.replace("/", "-") + "-"


def _join_sorted(texts: Iterable[str]) -> str:
    return ", ".join(sorted(texts)) or "none"


def merge_edits(all_edits: Iterable[Edits]) -> Edits:
    """Merge edits in order, with each device node, mount and hook once."""
    merged_edits: Edits = {}
    for edits in all_edits:
        for key, entries in edits.items():
            if key in _LIST_FIELDS or key == "env":
                merged_edits.setdefault(key, [])
                merged_edits[key] += [entry for entry in entries or () if entry not in merged_edits[key]]
            else:
                merged_edits[key] = entries
    return merged_edits


def build_spec(
    slot: str, grant: Grant, edits: Edits, version: str = CDI_VERSION, devices: Sequence[OtherDevice] = ()
) -> Spec:
    """The CDI spec of one slot. Variables that Cardwise owns replace variables of the same name in `edits`.

    version: the CDI version that the edits need.
    devices: the devices of the grant, in its order.
    """
    own_env = environment.container_env(grant, devices)
    other_env = [entry for entry in edits.get("env") or () if entry.partition("=")[0] not in own_env]
    env = [*other_env, *(f"{key}={setting}" for key, setting in own_env.items())]
    return {
        "cdiVersion": max(version, CDI_VERSION, key=_version_number),
        "kind": names.CDI_KIND,
        "devices": [{"name": slot, "containerEdits": {**edits, "env": env}}],
    }


def build_blocking_spec(slot: str, reason: str) -> Spec:
    """The CDI spec of a slot whose container must not start: the runtime finds no device node at the given path, and
    shows the path, which is the reason.
    """
    path = f"/dev/cardwise: {reason}".replace("..", "…")  # a path that does not exist, whatever the reason contains
    return {
        "cdiVersion": CDI_VERSION,
        "kind": names.CDI_KIND,
        "devices": [
            {"name": slot, "containerEdits": {"deviceNodes": [{"path": "/dev/cardwise", "hostPath": path}]}},
        ],
    }


def write_spec(folder: Path, slot: str, content: Spec) -> None:
    """Write the spec atomically: the runtime never reads an incomplete spec. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    replacing.replace_file(spec_path(folder, slot), msgspec.json.encode(content))


def write_problem(folder: Path) -> str | None:
    """The obstacle to writing specs at present; None if there is no obstacle.

    Reads the file system's state and writes nothing: the runtime reads all specs again when the folder changes.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file_system = os.statvfs(folder)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        # Some file systems do not count inodes, and report 0.
        is_full = not file_system.f_bfree or (file_system.f_files and not file_system.f_ffree)
        code = errno.EROFS if file_system.f_flag & os.ST_RDONLY else errno.ENOSPC if is_full else 0
        if not code:
            return None
        reason = os.strerror(code)
    return f"CDI specs cannot be written to {folder}: {reason}"


def find_stale_specs(folder: Path, live_slots: set[str]) -> list[Path]:
    """The CDI specs and unfinished files of Cardwise that belong to none of the `live_slots`."""
    if not folder.is_dir():
        return []
    names_in_use = {spec_path(folder, slot).name for slot in live_slots}
    pattern = re.compile(rf"\.?{re.escape(_OWN_PREFIX)}.*\.json.*")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.name not in names_in_use]


def _version_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
