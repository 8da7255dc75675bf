"""Keeps a part's certificates good: makes them, renews them, and puts them where servers and clients read them.

The thin outer part: `rotation` decides, `certstore` keeps, this carries out and repeats. With cert-manager in the
cluster none of it runs; servers then read the Secret volume, whose files have the same names.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog

from cardwise.kube import errors
from cardwise.kube.backoff import Backoff
from cardwise.runtime import filesets, rotation
from cardwise.runtime.certstore import CertStore, DirStore, SecretStore, Stored
from cardwise.runtime.rotation import Lifetimes, Wanted

__all__ = ["CertStore", "DirStore", "Lifetimes", "Rotator", "SecretStore", "Stored"]

_log = structlog.get_logger(__name__)

_SERVER_FILES = (rotation.BUNDLE, rotation.SERVER_CERT, rotation.SERVER_KEY)
_CLIENT_FILES = (rotation.CLIENT_CERT, rotation.CLIENT_KEY)
_ATTEMPTS = 10


class Rotator:
    """Writes ca.crt, tls.crt, tls.key (and client.crt, client.key with `need_client`) into `out_dir`, together.

    `on_bundle` gets the CA bundle (PEM) after every check, also when it is the same: whoever publishes it may have to
    assert it again. `interval` is in seconds. Call `ensure` in `main`, so that the files are there when the server
    starts, and `start` in the process that lives on (threads do not survive gunicorn's fork).
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
        interval: float = 12 * 3600.0,
        name: str = "cardwise",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._wanted = Wanted(hosts=tuple(hosts), client=need_client, name=name)
        self._out_dir = out_dir
        self._lifetimes = lifetimes or Lifetimes()
        self._on_bundle = on_bundle
        self._interval = interval
        self._now = now
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure(self) -> bytes:
        """One check: store and files are good afterwards. Returns the CA bundle (PEM).

        Replicas may do it at once: one writes, the others take what it wrote. Raises KubeError or OSError.
        """
        for _ in range(_ATTEMPTS):
            stored = self._store.load()
            files = rotation.advance(stored.files, self._wanted, self._lifetimes, self._now())
            if files == stored.files or self._store.save(files, stored.version):
                self._publish(files, changed=files != stored.files)
                return files[rotation.BUNDLE]
        raise errors.Conflict(409, "Conflict", f"the certificate store kept changing, {_ATTEMPTS} times in a row")

    def start(self) -> None:
        """Runs `run` in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="tls-rotator", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def run(self) -> None:
        """Checks now and every `interval`, sooner after a failure; returns after `stop`."""
        backoff = Backoff(initial=1.0, cap=min(300.0, self._interval))
        while not self._stopping.is_set():
            delay = self._interval
            try:
                bundle = self.ensure()
                if self._on_bundle is not None:
                    self._on_bundle(bundle)
                backoff.reset()
            except Exception:  # noqa: BLE001 - outermost loop; certificates must go on being checked
                delay = backoff.next()
                _log.exception("certificate check failed", retry_in=round(delay, 1))
            self._stopping.wait(delay)

    def _publish(self, files: dict[str, bytes], *, changed: bool) -> None:
        names = _SERVER_FILES + (_CLIENT_FILES if self._wanted.client else ())
        written = filesets.write(self._out_dir, {name: files[name] for name in names})
        if changed or written:
            _log.info("certificates renewed" if changed else "certificates taken over", directory=str(self._out_dir))
