"""The CDI spec of a slot: the device nodes and the environment of the container that has it now.

Written when the container is about to start and read by the runtime right after; the folder is often a tmpfs, so
specs are made from the grants again whenever they are missing. On real cards the edits are those of the node's own
nvidia.com/gpu spec for that card (device nodes, driver libraries, hooks), made by `nvidia-ctk cdi generate`.
The format: SPEC.md of github.com/cncf-tags/container-device-interface.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cardwise.core.api import mps, names, shareagent
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard
from cardwise.runtime import replacing
from deviceplugin.grants import environment
from deviceplugin.grants.grants import Grant

Edits = dict[str, Any]

CDI_VERSION = "0.6.0"
_NVIDIA_KIND = "nvidia.com/gpu"
_CARD_NODE = re.compile(r"nvidia\d+")
_REMEDY = (
    "make the spec anew on the node with "
    "`nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml --device-name-strategy=uuid`"
)
_KERNEL_LIMIT_SINCE = 615
_TAME = ("nosuid", "nodev", "noexec")
_LISTS = ("deviceNodes", "hooks", "mounts", "additionalGids", "netDevices")


class NoDevice(Exception):
    """A card or device that cannot be given to a container; the message says why and what to do."""


def device_name(slot: str) -> str:
    """What Allocate answers."""
    return f"{names.CDI_KIND}={slot}"


def spec_path(folder: Path, slot: str) -> Path:
    return folder / f"{names.CDI_KIND.replace('/', '-')}-{slot}.json"


def plain_edits(card: GpuCard) -> Edits:
    """The card's device nodes as this machine has them. Raises NoDevice."""
    what = f"card {card.index} ({card.uuid})"
    return {"deviceNodes": [_device_node(what, node.host, node.container) for node in card.devices]}


def device_edits(device: OtherDevice) -> Edits:
    """The device's own nodes and those that it shares with others. Raises NoDevice."""
    what = f"{device.kind} {device.index} ({device.uuid})"
    nodes = (*device.nodes, *device.common)
    return {"deviceNodes": [_device_node(what, node.host, node.container) for node in nodes]}


def mps_edits(grant: Grant, cards: Sequence[GpuCard]) -> Edits:
    """The way to the daemon of the grant's cards; for the share agent, what says how that daemon is.

    `cards` are those of the grant. A container sees the daemon's socket and nothing else of it. Of an agent's folder
    the log is covered, since it names neighbours, and so are the files that the daemon locks and writes.
    """
    if grant.is_agent:
        homes = [(home, f"{shareagent.MPS_ROOT}/{Path(home).name}") for home in grant.mps]
        mounts = []
        for home, inside in homes:
            mounts += [_bind(home, inside, "ro"), *(_cover(f"{inside}/{name}") for name in (mps.LOG, mps.PIPE))]
        return {"mounts": mounts}
    edits: Edits = {"mounts": [_bind(f"{home}/{mps.CLIENTS}", mps.CONTAINER_PIPE, "ro") for home in grant.mps]}
    if grant.mps and len(cards) == 1 and not grant.shares[0].whole and _limits_in_the_kernel(cards[0]):
        edits["env"] = [f"{names.ENV_GPU_MEMORY_LIMIT}={grant.shares[0].mem}"]
    return edits


def _bind(host: str, container: str, access: str) -> dict[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": ["bind", access, *_TAME]}


def _cover(path: str) -> dict[str, Any]:
    return {"hostPath": "tmpfs", "containerPath": path, "type": "tmpfs", "options": ["ro", "size=4k", *_TAME]}


def _limits_in_the_kernel(card: GpuCard) -> bool:
    """Whether the driver can; NVIDIA's container toolkit (1.20.1 and later) then sets the variable's limit."""
    major = card.properties.get("driver", "").partition(".")[0]
    return major.isdigit() and int(major) >= _KERNEL_LIMIT_SINCE


def _device_node(what: str, host: str, container: str) -> dict[str, Any]:
    try:
        found = Path(host).stat()
    except OSError as error:
        raise NoDevice(f"{what}: {host}: {error.strerror}") from error
    if not (stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        raise NoDevice(f"{what}: {host} is no device node; make one with mknod")
    return {
        "path": container,
        "hostPath": host,
        "type": "b" if stat.S_ISBLK(found.st_mode) else "c",
        "major": os.major(found.st_rdev),
        "minor": os.minor(found.st_rdev),
        "permissions": "rw",
    }


class NvidiaSpecs:
    """The node's own CDI specs of NVIDIA's cards, read again when they change.

    They say a card's name and what it comes with; which card it is, the driver says: its own device node, and no other
    card's, must be among the edits. A spec that is older than the machine's cards names others by the same numbers.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths` are files, or folders whose *.json and *.yaml are looked through; as in CDI, the later ones win."""
        self._paths = tuple(paths)
        self._cache: dict[Path, tuple[tuple[int, int], dict[str, Any] | None]] = {}

    def edits(self, card: GpuCard) -> tuple[Edits, str]:
        """The card's edits with the spec's common ones, and the CDI version they need. Raises NoDevice."""
        file, spec, device = self._find(card)
        edits = merged([spec.get("containerEdits") or {}, device.get("containerEdits") or {}])
        given = {Path(str(node.get("hostPath") or node.get("path"))).name for node in edits.get("deviceNodes") or ()}
        given = {name for name in given if _CARD_NODE.fullmatch(name)}
        own = {Path(node.host).name for node in card.devices}
        if given != own:
            raise NoDevice(
                f"card {card.index} ({card.uuid}) is {_listed(own)}, {file} gives {_listed(given)} for it; {_REMEDY}"
            )
        return edits, str(spec["cdiVersion"])

    def _find(self, card: GpuCard) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """The device of the card, the spec that it is in, and where that is."""
        what = f"card {card.index} ({card.uuid})"
        for wanted in (card.uuid, str(card.index)):
            for path in reversed(self._paths):
                found = [
                    (file, spec, device)
                    for file, spec in self._specs(path)
                    for device in spec.get("devices") or ()
                    if str(device.get("name")) == wanted
                ]
                if len(found) > 1:
                    both = " and ".join(str(file) for file, _, _ in found)
                    raise NoDevice(f"{what}: {_NVIDIA_KIND}={wanted} is in {both}; remove one, since CDI takes neither")
                if found:
                    return found[0]
        raise NoDevice(f"{what} is in no {_NVIDIA_KIND} CDI spec below {_listed(map(str, self._paths))}; {_REMEDY}")

    def _specs(self, path: Path) -> Iterable[tuple[Path, dict[str, Any]]]:
        files = path.iterdir() if path.is_dir() else [path]
        # Our own are many, and none of them is NVIDIA's.
        for file in sorted(file for file in files if not file.name.startswith(_OWN_PREFIX)):
            if file.suffix in {".json", ".yaml", ".yml"}:
                spec = self._read(file)
                if spec is not None:
                    yield file, spec

    def _read(self, file: Path) -> dict[str, Any] | None:
        try:
            found = file.stat()
            stamp = found.st_mtime_ns, found.st_size
            if file in self._cache and self._cache[file][0] == stamp:
                return self._cache[file][1]
            spec = yaml.safe_load(file.read_text())  # JSON is YAML
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return None
        usable = isinstance(spec, dict) and spec.get("kind") == _NVIDIA_KIND and "cdiVersion" in spec
        self._cache[file] = (stamp, spec if usable else None)
        return self._cache[file][1]


_OWN_PREFIX = names.CDI_KIND.replace("/", "-") + "-"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted(texts)) or "none"


def merged(all_edits: Iterable[Edits]) -> Edits:
    """Edits one after the other, each device node, mount and hook once."""
    result: Edits = {}
    for edits in all_edits:
        for key, value in edits.items():
            if key in _LISTS or key == "env":
                result.setdefault(key, [])
                result[key] += [entry for entry in value or () if entry not in result[key]]
            else:
                result[key] = value
    return result


def spec(
    slot: str, grant: Grant, edits: Edits, version: str = CDI_VERSION, devices: Sequence[OtherDevice] = ()
) -> dict[str, Any]:
    """The spec of one slot. What Cardwise owns in the environment replaces what `edits` set.

    `devices` are those of the grant, in its order.
    """
    ours = environment.of(grant, devices)
    theirs = [entry for entry in edits.get("env") or () if entry.partition("=")[0] not in ours]
    env = [*theirs, *(f"{key}={value}" for key, value in ours.items())]
    return {
        "cdiVersion": max(version, CDI_VERSION, key=_version_number),
        "kind": names.CDI_KIND,
        "devices": [{"name": slot, "containerEdits": {**edits, "env": env}}],
    }


def write(folder: Path, slot: str, content: dict[str, Any]) -> None:
    """In one step: the runtime reads a whole spec or none. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    replacing.replace(spec_path(folder, slot), msgspec.json.encode(content))


def trouble(folder: Path) -> str:
    """Why no spec can be written at present, "" when one can.

    It looks and does not try: the runtime reads all specs anew when something in the folder has changed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = os.statvfs(folder)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        # Some file systems count no files, and say that they have none.
        full = not found.f_bfree or (found.f_files and not found.f_ffree)
        code = errno.EROFS if found.f_flag & os.ST_RDONLY else errno.ENOSPC if full else 0
        why = os.strerror(code) if code else ""
    return why and f"CDI specs cannot be written to {folder}: {why}"


def remove(folder: Path, slot: str) -> None:
    """Raises OSError."""
    spec_path(folder, slot).unlink(missing_ok=True)


def stale(folder: Path, living: set[str]) -> list[Path]:
    """Specs and unfinished files of ours that belong to none of the `living` slots."""
    if not folder.is_dir():
        return []
    kept = {spec_path(folder, slot).name for slot in living}
    pattern = re.compile(rf"\.?{re.escape(_OWN_PREFIX)}.*\.json.*")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.name not in kept]


def _version_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
