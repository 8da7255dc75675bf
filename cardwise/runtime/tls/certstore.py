"""Stores of certificates and keys: a directory of one machine, or a Secret that all replicas share.

A save names the version that was read, and fails if another replica has saved since. Then the caller reads again, and
gets the certificates that the other replica has renewed.
"""

import base64
import binascii
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.tls import filesets


@dataclass(frozen=True, slots=True)
class FilesWithVersion:
    """The stored files. `version` is opaque; None if nothing is stored yet."""

    files: Mapping[str, bytes]
    version: str | None


class CertStore(Protocol):
    """A store. `load` and `save` raise OSError or KubeError if the store is not available."""

    def load(self) -> FilesWithVersion: ...

    def save(self, files: Mapping[str, bytes], version: str | None) -> bool:
        """Replace all files. If the version of the store is no longer `version`, changes nothing and returns False."""

    def current_time(self) -> datetime | None:
        """The time by the store's clock; None if it is unknown."""


class DirStore:
    """A store on disk, which processes of one machine may share. Key files have mode 0600."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> FilesWithVersion:
        files = filesets.read_files(self._path)
        return FilesWithVersion(files, _digest(files) if files else None)

    def save(self, files: Mapping[str, bytes], version: str | None) -> bool:
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self.load().version != version:
                return False
            filesets.write_files(self._path, files)
        finally:
            os.close(descriptor)  # and with it the lock
        return True

    def current_time(self) -> datetime | None:
        return None  # this machine's clock


class SecretStore:
    """A store in a Secret, which is created if missing. Needs get and update on this Secret, and create on secrets."""

    def __init__(
        self, client: KubeClient, namespace: str, name: str, *, labels: Mapping[str, str] | None = None
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._labels = dict(labels or {"app.kubernetes.io/managed-by": "cardwise"})

    def load(self) -> FilesWithVersion:
        try:
            secret = self._client.get(paths.secrets(self._namespace, self._name))
        except errors.NotFound:
            return FilesWithVersion({}, None)
        files = {}
        for name, encoded in (secret.get("data") or {}).items():
            try:
                files[name] = base64.b64decode(encoded)
            except (binascii.Error, TypeError, ValueError):
                continue  # a damaged entry: rotation recreates the file
        return FilesWithVersion(files, str(secret["metadata"]["resourceVersion"]))

    def save(self, files: Mapping[str, bytes], version: str | None) -> bool:
        data = {name: base64.b64encode(content).decode() for name, content in files.items()}
        try:
            if version is not None:
                # PUT replaces the whole object. Fields other than the data, which other clients wrote, must stay.
                current = self._client.get(paths.secrets(self._namespace, self._name))
                if current["metadata"]["resourceVersion"] != version:
                    return False
                if current.get("immutable"):
                    raise errors.Invalid(422, "Invalid", self._immutable_remedy())
                self._client.update(paths.secrets(self._namespace, self._name), current | {"data": data})
            else:
                metadata = {"name": self._name, "namespace": self._namespace, "labels": self._labels}
                secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
                self._client.create(paths.secrets(self._namespace), secret)
        except (errors.Conflict, errors.NotFound):
            return False
        return True

    def _immutable_remedy(self) -> str:
        return (
            f"Secret {self._namespace}/{self._name}: immutable: true, so no certificate in it can be renewed; "
            "replace the Secret by one with the same data and without `immutable` (kubectl replace --force)"
        )

    def current_time(self) -> datetime | None:
        with contextlib.suppress(errors.KubeError):
            return self._client.fetch_server_time()
        return None


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(b"%d %d " % (len(name), len(content)) + name.encode() + content)
    return digest.hexdigest()
