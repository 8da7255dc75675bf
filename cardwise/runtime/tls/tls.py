"""Renews a component's certificates, and writes them to the directory that servers and clients read.

`rotation` computes the next step, `certstore` stores the files, and `Rotator` runs both periodically. If cert-manager
issues the certificates, `ExternalCertificates` is used instead of `Rotator`: it copies the files of the Secret volume,
which have the same names.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors
from cardwise.runtime.loops import Loop
from cardwise.runtime.tls import filesets, rotation
from cardwise.runtime.tls.certstore import CertStore, DirStore, FilesWithVersion, SecretStore
from cardwise.runtime.tls.rotation import CertificateNeeds, Lifetimes

__all__ = [
    "CHECK_INTERVAL_SECONDS",
    "CertStore",
    "CertificateManager",
    "DirStore",
    "ExternalCertificates",
    "FilesWithVersion",
    "Lifetimes",
    "Rotator",
    "SecretStore",
    "UnusableCertificates",
    "server_hosts",
]

_log = structlog.get_logger("cardwise.runtime.tls")

_SERVER_FILES = (rotation.BUNDLE, rotation.SERVER_CERT, rotation.SERVER_KEY)
_CLIENT_FILES = (rotation.CLIENT_CERT, rotation.CLIENT_KEY)
_ATTEMPTS = 10
_SKEW_SECONDS = 60.0
# Seconds between two checks. Renewals alone would allow longer intervals. But a deleted Secret is restored only by the
# next check. A replica that starts before this check would create a new CA, which kube-scheduler would not trust until
# kube-scheduler is restarted.
CHECK_INTERVAL_SECONDS = 3600.0
_EXTERNAL_INTERVAL = 2.0
_MAX_WAIT_SECONDS = 30.0  # maximum seconds for which a certificate is held back because clients do not know its CA


def server_hosts(service: str, namespace: str, hosts: Sequence[str], *, is_shared: bool) -> tuple[str, ...]:
    """The names and addresses of a server's certificate: those of its Service and of loopback, and `hosts`.

    is_shared: whether replicas on several machines share the certificate; if not, this machine's name is included.
    """
    in_cluster = (f"{service}.{namespace}.svc", f"{service}.{namespace}", service)
    machine = () if is_shared else (socket.gethostname(),)
    return tuple(dict.fromkeys((*in_cluster, "localhost", "127.0.0.1", "::1", *machine, *hosts)))


class UnusableCertificates(Exception):
    """A file of an external issuer is not usable. The message names the file and the remedy."""


class CertificateManager(ABC):
    """Checks the certificates periodically.

    Call `ensure_certificates` in `main`: the files must exist when the server starts. Call `start` in the serving
    process, because threads do not survive gunicorn's fork.

    on_bundle: called with the CA bundle (PEM) after each check, also with an unchanged bundle, because another program
        may have removed the published bundle.
    interval: seconds between two checks.
    """

    def __init__(self, on_bundle: Callable[[bytes], None] | None, interval: float, clock: Clock) -> None:
        self._on_bundle = on_bundle
        self._clock = clock
        self._loop = Loop(
            "certificates",
            self._run_once,
            failed="failed to check the certificates; keeping them",
            expected=(UnusableCertificates, errors.KubeError, OSError),
            every=interval,
            cap=min(300.0, interval),
            clock=clock,
        )

    @abstractmethod
    def ensure_certificates(self) -> bytes:
        """Check the certificates once: afterwards the files are valid. Returns the CA bundle (PEM)."""

    def start(self) -> None:
        self._loop.start()

    def check_soon(self) -> None:
        """Wake the thread for a check, because a certificate may have changed."""
        self._loop.wake()

    def stop(self) -> None:
        self._loop.stop()

    def _run_once(self) -> None:
        bundle = self.ensure_certificates()
        if self._on_bundle is not None:
            self._on_bundle(bundle)


class Rotator(CertificateManager):
    """Creates and renews certificates of Cardwise's own CA.

    store: the store that replicas share.
    hosts: the DNS names and addresses of the server.
    out_dir: the directory of ca.crt, tls.crt, tls.key (and client.crt, client.key). All files are replaced together.
    need_client: whether a client certificate is needed.
    name: the common name of the CA.
    """

    def __init__(
        self,
        store: CertStore,
        hosts: Sequence[str],
        out_dir: Path,
        need_client: bool = False,
        lifetimes: Lifetimes | None = None,
        *,
        on_bundle: Callable[[bytes], None] | None = None,
        interval: float = CHECK_INTERVAL_SECONDS,
        name: str = "cardwise",
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(on_bundle, interval, clock)
        self._store = store
        self._needs = CertificateNeeds(hosts=tuple(hosts), client=need_client, name=name)
        self._out_dir = out_dir
        self._lifetimes = lifetimes or Lifetimes()
        self._last_files: dict[str, bytes] = {}  # the files that were last read from or written to the store

    def ensure_certificates(self) -> bytes:
        """Check the store and files once: afterwards both are valid. Returns the CA bundle (PEM).

        Replicas may check at the same time: one writes, the others read its files. Raises KubeError or OSError.
        """
        now = self._now()
        for _ in range(_ATTEMPTS):
            stored = self._store.load()
            files = rotation.advance_certificates(
                stored.files, self._needs, self._lifetimes, now, before=self._last_files
            )
            if files == stored.files or self._store.save(files, stored.version):
                self._last_files = files
                if not rotation.has_authority_key(files):
                    _log.warning(
                        "the key of the CA is lost; keeping its certificates while they are valid, and announcing a "
                        "new CA in the bundle",
                        lost=rotation.AUTHORITY_KEY,
                        bundle=rotation.BUNDLE,
                    )
                self._publish(files, changed=files != stored.files)
                return files[rotation.BUNDLE]
        raise errors.Conflict(
            409, "Conflict", f"the certificate store changed {_ATTEMPTS} times in a row during the check"
        )

    def _now(self) -> datetime:
        """The present time: by the API server's clock if the certificates are in a Secret, since the API server and
        kube-scheduler verify them. If the clock of its machine is wrong, a replica would replace a valid CA, or create
        certificates that are not valid yet.
        """
        machine_time, store_time = self._clock.wall(), self._store.current_time()
        if store_time is None:
            return machine_time
        ahead_seconds = (machine_time - store_time).total_seconds()
        if abs(ahead_seconds) > _SKEW_SECONDS:
            _log.warning(
                "clock skew: this machine's clock differs from the API server's, which certificates use; run NTP or "
                "chrony on this node",
                ahead_seconds=round(ahead_seconds),
            )
        return store_time

    def _publish(self, files: dict[str, bytes], *, changed: bool) -> None:
        names = _SERVER_FILES + (_CLIENT_FILES if self._needs.client else ())
        is_written = filesets.write_files(self._out_dir, {name: files[name] for name in names})
        if changed or is_written:
            _log.info("certificates renewed" if changed else "certificates taken over", directory=str(self._out_dir))


class ExternalCertificates(CertificateManager):
    """Copies ca.crt, tls.crt and tls.key of an external issuer (cert-manager) to the directory that servers read.

    A certificate of a new CA is copied only when clients know this CA, or after `_MAX_WAIT_SECONDS`. When
    `is_published` returns True for the first time, clients have until the next check to load the CA.

    directory: the directory that the issuer writes.
    out_dir: the directory that servers read.
    is_published: returns whether the last bundle that was passed to `on_bundle` is published.
    """

    def __init__(
        self,
        directory: Path,
        out_dir: Path,
        *,
        on_bundle: Callable[[bytes], None],
        is_published: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(on_bundle, _EXTERNAL_INTERVAL, clock)
        self._directory = directory
        self._out_dir = out_dir
        self._is_published = is_published
        self._next_bundle = b""  # the bundle of a new CA whose certificate is not served yet
        self._was_published = False  # whether this bundle was published at the last check
        self._since = 0.0

    def ensure_certificates(self) -> bytes:
        """Copy the files if they may be served. Returns the CA bundle. Raises UnusableCertificates or OSError."""
        files = self._read()
        served, bundle = filesets.read_files(self._out_dir).get(rotation.BUNDLE), files[rotation.BUNDLE]
        if served in (None, bundle) or self._can_serve(bundle):
            self._next_bundle = b""
            if filesets.write_files(self._out_dir, files):
                _log.info("certificates taken over", directory=str(self._directory))
        return bundle

    def _can_serve(self, bundle: bytes) -> bool:
        if bundle != self._next_bundle:
            self._next_bundle, self._was_published, self._since = bundle, False, self._clock.now()
            return False
        was_published, self._was_published = self._was_published, self._is_published()
        return (was_published and self._was_published) or self._clock.now() - self._since >= _MAX_WAIT_SECONDS

    def _read(self) -> dict[str, bytes]:
        path = self._directory / rotation.BUNDLE
        try:
            bundle = path.read_bytes()
            x509.load_pem_x509_certificates(bundle)
        except (OSError, ValueError) as error:
            raise UnusableCertificates(
                f"{path}: not a readable CA ({error}); write the CA that signed {rotation.SERVER_CERT} there, or leave "
                "the directory empty to have certificates created"
            ) from error
        files = {rotation.BUNDLE: bundle}
        try:
            files |= {name: (self._directory / name).read_bytes() for name in _SERVER_FILES[1:]}
            _check_pair(files[rotation.SERVER_CERT], files[rotation.SERVER_KEY])
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UnusableCertificates(
                f"{self._directory / rotation.SERVER_CERT}: not a readable certificate with its key ({error}); write "
                "both there, as PEM and without a password"
            ) from error
        return files


def _check_pair(cert: bytes, key: bytes) -> None:
    """Check that the key belongs to the certificate.

    Raises ValueError, TypeError (if the key has a password) or UnsupportedAlgorithm.
    """
    public_key = serialization.load_pem_private_key(key, None).public_key()
    if x509.load_pem_x509_certificate(cert).public_key() != public_key:
        raise ValueError("the key belongs to another certificate")
