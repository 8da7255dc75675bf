"""Keeps the CA bundle of our webhooks' configurations up to date in the API server.

The configurations belong to the chart: they may come later than we do, be replaced by an upgrade (which drops what we
wrote), or be edited. The chart leaves `caBundle` out on purpose.
"""

import base64
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.reflector import Reflector, WakeHandler
from cardwise.runtime.loops import Loop
from cardwise.runtime.tls import certs

_log = structlog.get_logger("cardwise.runtime.cabundle")

_ATTEMPTS = 5
_MOST_OTHERS = 8  # certificates that a bundle keeps beside ours
FIELD_MANAGER = "cardwise-ca"


class CaBundle:
    """Writes the bundle into every webhook of the configurations with these `paths`: at once when it changes, when
    somebody else changes a configuration, and every `interval` seconds. Needs get, list, watch and patch on them.

    `set_bundle` is what `tls.Rotator` wants as `on_bundle`. `asserted` is set when all configurations carry the bundle.

    `on_other` (if given) is called when another bundle is found, and has `set_bundle` called: of several replicas one
    renews, and the others, which look into the store once an hour, would write the former bundle over its, and it over
    theirs.

    `keep_others`: beside ours, a configuration keeps the certificates that it has while they are valid. For those of
    somebody else, whose new CA reaches each replica at another time.
    """

    def __init__(
        self,
        client: KubeClient,
        paths: Sequence[str],
        *,
        interval: float = 300.0,
        keep_others: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self.keep_others = keep_others
        self.asserted = threading.Event()
        self.on_other: Callable[[], None] | None = None
        self._sure = False  # the bundle has come since another one was found
        self._client = client
        self._paths = list(paths)
        self._clock = clock
        self._bundle = ""
        self._loop = Loop(
            "ca-bundle",
            self._run_once,
            failed="CA bundle not written",
            expected=(errors.KubeError,),
            every=interval,
            cap=30.0,
            clock=clock,
        )
        self._reflectors = [self._make_reflector(path) for path in self._paths]

    def set_bundle(self, ca_pem: bytes) -> None:
        """The bundle to assert from now on (PEM). Returns at once."""
        bundle = base64.b64encode(ca_pem).decode()
        if bundle != self._bundle:
            self._bundle = bundle
            self.asserted.clear()
        self._sure = True
        self._loop.wake()

    def start(self) -> None:
        for reflector in self._reflectors:
            reflector.start()
        self._loop.start()

    def stop(self) -> None:
        for reflector in self._reflectors:
            reflector.stop()
        self._loop.stop()

    def ensure_bundle(self) -> bool:
        """One round. False when a configuration does not exist (yet), or has another bundle that may be newer than
        ours. Raises KubeError.
        """
        if not self._bundle:
            return False
        asserted = [self._assert_bundle(path, self._bundle) for path in self._paths]
        self._sure = False
        return all(asserted)

    def _assert_bundle(self, path: str, bundle: str) -> bool:
        for attempt in range(_ATTEMPTS):
            try:
                configuration = self._client.get(path)
            except errors.NotFound:
                return False
            patch = bundle_patch(configuration, bundle, self._with_others if self.keep_others else None)
            if not patch:
                return True
            if self.on_other is not None and not self._sure and has_other_bundle(configuration, bundle):
                self.on_other()
                return False
            try:
                self._client.patch(path, patch, "json", FIELD_MANAGER)
            except (errors.Conflict, errors.Invalid) as error:
                # Another replica or a chart upgrade was first (Invalid: the patch's own test of the version failed).
                if attempt == _ATTEMPTS - 1:
                    raise
                _log.debug("the webhook configuration changed in the meantime", path=path, error=str(error))
            else:
                _log.info("wrote the CA bundle", path=path, webhooks=len(patch) - 1)
                return True
        return False

    def _with_others(self, bundle: str, present: str) -> str:
        """The base64 bundle that a webhook should have which has `present`."""
        now = self._clock.wall()
        try:
            there = certs.parse_certificates(base64.b64decode(present))
        except ValueError:
            return bundle
        ours = certs.parse_certificates(base64.b64decode(bundle))
        if all(authority in there for authority in ours if authority.not_valid_after_utc > now):
            return present
        others = [authority for authority in there if authority not in ours and authority.not_valid_after_utc > now]
        return base64.b64encode(base64.b64decode(bundle) + certs.encode_certificates(others[:_MOST_OTHERS])).decode()

    def _run_once(self) -> None:
        bundle = self._bundle
        if not self.ensure_bundle():
            # Not there yet: its creation wakes us.
            _log.debug("a webhook configuration or the CA bundle does not exist", paths=self._paths)
        elif bundle == self._bundle:
            self.asserted.set()

    def _make_reflector(self, path: str) -> Reflector[str]:
        collection, _, name = path.rpartition("/")
        return Reflector(
            self._client,
            collection,
            _parse_version,
            WakeHandler(self._loop.wake),
            query=paths.field_query("metadata.name", name),
            name=f"ca-bundle-{name}",
            clock=self._clock,
        )


def bundle_patch(
    configuration: dict[str, Any], bundle: str, join: Callable[[str, str], str] | None = None
) -> list[dict[str, Any]]:
    """The JSON patch that gives every webhook the base64 `bundle`; empty when all have it. `join`: makes what a webhook
    should have of it and another one.
    """
    present = [webhook["clientConfig"].get("caBundle") or "" for webhook in configuration.get("webhooks") or []]
    wanted = [join(bundle, there) if join is not None and there else bundle for there in present]
    changes = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": new}
        for index, (there, new) in enumerate(zip(present, wanted, strict=True))
        if there != new
    ]
    if not changes:
        return []
    # Positions are only right for the version that was read.
    version = configuration["metadata"]["resourceVersion"]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *changes]


def has_other_bundle(configuration: dict[str, Any], bundle: str) -> bool:
    """Whether a webhook has a bundle that is not this one. The chart leaves it out."""
    bundles = (webhook["clientConfig"].get("caBundle") for webhook in configuration.get("webhooks") or [])
    return any(other and other != bundle for other in bundles)


class _Versioned(msgspec.Struct):
    metadata: dict[str, Any]


_decode = msgspec.json.Decoder(_Versioned).decode


def _parse_version(raw: bytes) -> tuple[str, str]:
    metadata = _decode(raw).metadata
    return metadata["name"], metadata["resourceVersion"]
