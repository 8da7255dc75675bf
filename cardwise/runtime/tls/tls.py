"""Renews a part's certificates, and puts them where servers and clients read them.

The thin outer part: `rotation` decides, `certstore` keeps, `Rotator` carries out and repeats. With cert-manager in the
cluster `ExternalCertificates` takes its place, which takes over the files of the Secret volume, of the same names.
"""

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
from cardwise.runtime.tls.certstore import CertStore, DirStore, SecretStore, Stored
from cardwise.runtime.tls.rotation import Lifetimes, WantedCertificates

__all__ = [
    "INTERVAL",
    "CertStore",
    "CertificateChecks",
    "DirStore",
    "ExternalCertificates",
    "Lifetimes",
    "Rotator",
    "SecretStore",
    "Stored",
    "UnusableCertificates",
]

_log = structlog.get_logger("cardwise.runtime.tls")

_SERVER_FILES = (rotation.BUNDLE, rotation.SERVER_CERT, rotation.SERVER_KEY)
_CLIENT_FILES = (rotation.CLIENT_CERT, rotation.CLIENT_KEY)
_ATTEMPTS = 10
_SKEW_SECONDS = 60.0
# Seconds between two checks. Renewals would need fewer. But the next check saves a deleted Secret again, and a replica
# that starts before that makes a new authority, which kube-scheduler learns by a restart only.
INTERVAL = 3600.0
_GIVEN_INTERVAL = 2.0
_UNKNOWN_SECONDS = 30.0  # for which a certificate is not served whose CA is not known


class UnusableCertificates(Exception):
    """Files of somebody else that cannot be used; the text names the file and the remedy."""


class CertificateChecks(ABC):
    """Repeats a check of the certificates. `on_bundle` gets the CA bundle (PEM) after every check, also when it is the
    same: whoever publishes it may have to assert it again. `interval` is in seconds.

    Call `ensure` in `main`, so that the files are there when the server starts, and `start` in the process that lives
    on (threads do not survive gunicorn's fork).
    """

    def __init__(self, on_bundle: Callable[[bytes], None] | None, interval: float, clock: Clock) -> None:
        self._on_bundle = on_bundle
        self._clock = clock
        self._loop = Loop(
            "certificates",
            self._run_once,
            failed="the certificates were not checked: they stay as they are",
            expected=(UnusableCertificates, errors.KubeError, OSError),
            every=interval,
            cap=min(300.0, interval),
            clock=clock,
        )

    @abstractmethod
    def ensure_certificates(self) -> bytes:
        """One check: the files are good afterwards. Returns the CA bundle (PEM)."""

    def start(self) -> None:
        self._loop.start()

    def check_soon(self) -> None:
        """Wakes the thread for another check, because a certificate may have changed."""
        self._loop.wake()

    def stop(self) -> None:
        self._loop.stop()

    def _run_once(self) -> None:
        bundle = self.ensure_certificates()
        if self._on_bundle is not None:
            self._on_bundle(bundle)


class Rotator(CertificateChecks):
    """Makes and renews them: ca.crt, tls.crt, tls.key (and client.crt, client.key with `need_client`) are written into
    `out_dir`, together.
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
        interval: float = INTERVAL,
        name: str = "cardwise",
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(on_bundle, interval, clock)
        self._store = store
        self._wanted = WantedCertificates(hosts=tuple(hosts), client=need_client, name=name)
        self._out_dir = out_dir
        self._lifetimes = lifetimes or Lifetimes()
        self._before: dict[str, bytes] = {}  # what the store last had

    def ensure_certificates(self) -> bytes:
        """One check: store and files are good afterwards. Returns the CA bundle (PEM).

        Replicas may do it at once: one writes, the others take what it wrote. Raises KubeError or OSError.
        """
        now = self._now()
        for _ in range(_ATTEMPTS):
            stored = self._store.load()
            files = rotation.advance_certificates(stored.files, self._wanted, self._lifetimes, now, before=self._before)
            if files == stored.files or self._store.save(files, stored.version):
                self._before = files
                if not rotation.has_authority_key(files):
                    _log.warning(
                        "the key of the certificate authority is lost; its certificates are kept while they are valid, "
                        "and a new authority is announced in the CA bundle",
                        lost=rotation.AUTHORITY_KEY,
                        bundle=rotation.BUNDLE,
                    )
                self._publish(files, changed=files != stored.files)
                return files[rotation.BUNDLE]
        raise errors.Conflict(409, "Conflict", f"the certificate store kept changing, {_ATTEMPTS} times in a row")

    def _now(self) -> datetime:
        """By the API server's clock where the certificates are in a Secret: it and kube-scheduler verify them. By that
        of a machine whose clock is wrong a good CA would be replaced at once, or a certificate be good too late.
        """
        ours, theirs = self._clock.wall(), self._store.store_time()
        if theirs is None:
            return ours
        ahead = (ours - theirs).total_seconds()
        if abs(ahead) > _SKEW_SECONDS:
            _log.warning(
                "clock skew: this machine's clock differs from the API server's, by which certificates are made; "
                "run NTP or chrony on this node",
                ahead_seconds=round(ahead),
            )
        return theirs

    def _publish(self, files: dict[str, bytes], *, changed: bool) -> None:
        names = _SERVER_FILES + (_CLIENT_FILES if self._wanted.client else ())
        written = filesets.write_files(self._out_dir, {name: files[name] for name in names})
        if changed or written:
            _log.info("certificates renewed" if changed else "certificates taken over", directory=str(self._out_dir))


class ExternalCertificates(CertificateChecks):
    """Follows ca.crt, tls.crt and tls.key of somebody else (cert-manager), who writes them into `directory`.

    Servers read them in `out_dir`. A certificate of another CA comes there only when clients know that CA: `is_known`
    says so of the bundle that `on_bundle` got last, and they have the time until the next check to hear of it. Where
    that never comes true, it is served all the same after a while.
    """

    def __init__(
        self,
        directory: Path,
        out_dir: Path,
        *,
        on_bundle: Callable[[bytes], None],
        is_known: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(on_bundle, _GIVEN_INTERVAL, clock)
        self._directory = directory
        self._out_dir = out_dir
        self._is_known = is_known
        self._coming = b""  # the CA that is told and not served yet
        self._known = False  # at the last check
        self._since = 0.0

    def ensure_certificates(self) -> bytes:
        """Raises Unusable or OSError."""
        files = self._read()
        served, bundle = filesets.read_files(self._out_dir).get(rotation.BUNDLE), files[rotation.BUNDLE]
        if served in (None, bundle) or self._may_serve(bundle):
            self._coming = b""
            if filesets.write_files(self._out_dir, files):
                _log.info("certificates taken over", directory=str(self._directory))
        return bundle

    def _may_serve(self, bundle: bytes) -> bool:
        if bundle != self._coming:
            self._coming, self._known, self._since = bundle, False, self._clock.now()
            return False
        was_known, self._known = self._known, self._is_known()
        return (was_known and self._known) or self._clock.now() - self._since >= _UNKNOWN_SECONDS

    def _read(self) -> dict[str, bytes]:
        path = self._directory / rotation.BUNDLE
        try:
            bundle = path.read_bytes()
            x509.load_pem_x509_certificates(bundle)
        except (OSError, ValueError) as error:
            raise UnusableCertificates(
                f"{path}: there is no CA that can be read ({error}); put there the CA that signed "
                f"{rotation.SERVER_CERT}, or leave the directory empty to have certificates made"
            ) from error
        files = {rotation.BUNDLE: bundle}
        try:
            files |= {name: (self._directory / name).read_bytes() for name in _SERVER_FILES[1:]}
            _check_pair(files[rotation.SERVER_CERT], files[rotation.SERVER_KEY])
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UnusableCertificates(
                f"{self._directory / rotation.SERVER_CERT}: there is no certificate with its key that can be read "
                f"({error}); put both there, as PEM and without a password"
            ) from error
        return files


def _check_pair(cert: bytes, key: bytes) -> None:
    """Raises ValueError, TypeError (the key has a password) or UnsupportedAlgorithm."""
    public_key = serialization.load_pem_private_key(key, None).public_key()
    if x509.load_pem_x509_certificate(cert).public_key() != public_key:
        raise ValueError("the key is of another certificate")
