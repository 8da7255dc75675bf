"""Container images made on the spot, as OCI archives: no registry and no engine.

Source of the layout: OCI image spec, `image-layout.md`; containerd takes the name from an annotation.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

BUSYBOX = "cardwise.local/busybox:1"
EXAMPLE = "docker.io/library/busybox:1.37"  # what the examples name; here as everywhere on a machine without a network
PAUSE = "cardwise.local/pause:1"

# Where containerd and skopeo look for an image's name.
NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")

# PID 1 ignores TERM unless it says otherwise, and then a pod takes its whole grace period to end.
IDLE = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"
_BUSYBOX_BINARY = Path("/bin/busybox")


def write_usual(path: Path) -> None:
    """The archive of the image that every node has, by all its names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, [BUSYBOX, EXAMPLE, PAUSE], _busybox_layer(), ["/bin/sh", "-c", IDLE])


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob of an image; `blob` is a file where it is big and kept, `diff_id` the digest of the tar in it."""

    blob: bytes | Path
    diff_id: str
    digest: str
    media_type: str

    @classmethod
    def packed(cls, tar: bytes) -> Self:
        blob = gzip.compress(tar, compresslevel=1, mtime=0)
        return cls(blob, _digest(tar), _digest(blob), "application/vnd.oci.image.layer.v1.tar+gzip")

    @classmethod
    def plain(cls, tar: Path) -> Self:
        """A tar that is kept as it is: packing a hundred MB takes longer than it saves."""
        with tar.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        return cls(tar, digest, digest, "application/vnd.oci.image.layer.v1.tar")

    @property
    def size(self) -> int:
        return self.blob.stat().st_size if isinstance(self.blob, Path) else len(self.blob)


def write(path: Path, names: Sequence[str], layer: bytes, command: Sequence[str], **env: str) -> None:
    """An OCI archive of one image with one layer (a tar, not compressed), and this environment."""
    write_layers(path, names, [Layer.packed(layer)], command, **env)


def write_layers(path: Path, names: Sequence[str], layers: Sequence[Layer], command: Sequence[str], **env: str) -> None:
    """An OCI archive of one image, which has all these names."""
    variables = {"PATH": "/usr/local/bin:/bin:/sbin:/usr/bin:/usr/sbin"} | env
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command), "Env": [f"{key}={setting}" for key, setting in variables.items()]},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    config_blob = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config_blob),
        "layers": [{"mediaType": packed.media_type, "digest": packed.digest, "size": packed.size} for packed in layers],
    }
    manifest_blob = json.dumps(manifest).encode()
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest_blob)
    entry |= {"platform": {"architecture": "amd64", "os": "linux"}}
    entries = [entry | {"annotations": dict.fromkeys(NAME_ANNOTATIONS, name)} for name in names]
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
    with tarfile.open(path, "w") as archive:
        add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        add(archive, "index.json", json.dumps(index).encode())
        for blob in (config_blob, manifest_blob):
            add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        for packed in layers:
            inside = f"blobs/sha256/{packed.digest.removeprefix('sha256:')}"
            if isinstance(packed.blob, Path):
                archive.add(packed.blob, inside)
            else:
                add(archive, inside, packed.blob)


def busybox_with(folder: Path, name: str, **env: str) -> Path:
    """The archive of an image like busybox's with this environment, as images of CUDA have."""
    archive = folder / f"{name.replace('/', '_').replace(':', '_')}.tar"
    write(archive, [name], _busybox_layer(), ["/bin/sh", "-c", IDLE], **env)
    return archive


def _busybox_layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp", "var"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            layer.addfile(info)
        add(layer, "bin/busybox", _BUSYBOX_BINARY.read_bytes(), 0o755)
        add(layer, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
        for applet in _APPLETS:
            info = tarfile.TarInfo(f"bin/{applet}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            layer.addfile(info)
    return buffer.getvalue()


_APPLETS = [
    "sh",
    "cat",
    "ls",
    "sleep",
    "echo",
    "env",
    "printenv",
    "mknod",
    "dd",
    "head",
    "tail",
    "grep",
    "sed",
    "awk",
    "kill",
    "ps",
    "id",
    "date",
    "touch",
    "rm",
    "mkdir",
    "stat",
    "test",
    "true",
    "false",
    "wc",
    "sort",
    "tr",
    "cut",
    "nc",
    "wget",
    "timeout",
    "mount",
    "umount",
    "hexdump",
    "od",
]


def add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    """A file of root's."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    archive.addfile(info, io.BytesIO(data))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}
