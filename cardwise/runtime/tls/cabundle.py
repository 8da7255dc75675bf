"""Keeps the CA bundle in the configurations of Cardwise's webhooks up to date.

The chart installs the configurations: they may be created after the webhook starts, replaced by an upgrade (without the
bundle), or edited. The chart leaves `caBundle` out on purpose.
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
_MAX_OTHER_CAS = 8  # maximum number of certificates of other CAs that stay in a bundle
FIELD_MANAGER = "cardwise-ca"


class CaBundle:
    """Writes the bundle into all webhooks of the configurations when the bundle or a configuration changes, and every
    `interval` seconds. Needs get, list, watch and patch on the configurations.

    Pass `set_bundle` to `tls.Rotator` as `on_bundle`.

    paths: the URL paths of the configurations.
    keep_others: whether valid certificates of other CAs stay in the configurations. Needed with an external issuer,
        because a new CA of the issuer reaches the replicas at different times.

    Attributes:
    asserted: set when all configurations have the bundle.
    on_other: called when a configuration has another bundle; must lead to a call of `set_bundle`. Only one of several
        replicas renews the certificates. Without this call the other replicas, which check the store once an hour,
        would overwrite the new bundle with the former bundle.
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
        self._is_current = False  # whether `set_bundle` was called since another bundle was seen
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
        """Set the bundle to write (PEM). Returns at once."""
        bundle = base64.b64encode(ca_pem).decode()
        if bundle != self._bundle:
            self._bundle = bundle
            self.asserted.clear()
        self._is_current = True
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
        """Write the bundle into configurations that do not have it. Returns False if a configuration does not exist
        yet, or if it has another bundle, which may be newer. Raises KubeError.
        """
        if not self._bundle:
            return False
        asserted = [self._assert_bundle(path, self._bundle) for path in self._paths]
        self._is_current = False
        return all(asserted)

    def _assert_bundle(self, path: str, bundle: str) -> bool:
        for attempt in range(_ATTEMPTS):
            try:
                configuration = self._client.get(path)
            except errors.NotFound:
                return False
            patch = bundle_patch(configuration, bundle, self._merge_bundles if self.keep_others else None)
            if not patch:
                return True
            if self.on_other is not None and not self._is_current and has_other_bundle(configuration, bundle):
                self.on_other()
                return False
            try:
                self._client.patch(path, patch, "json", FIELD_MANAGER)
            except (errors.Conflict, errors.Invalid) as error:
                # Another replica or a chart upgrade has changed the configuration (Invalid: the patch's version test).
                if attempt == _ATTEMPTS - 1:
                    raise
                _log.debug("the webhook configuration changed in the meantime", path=path, error=str(error))
            else:
                _log.info("wrote the CA bundle", path=path, webhooks=len(patch) - 1)
                return True
        return False

    def _merge_bundles(self, bundle: str, present: str) -> str:
        """The bundle for a webhook that has the bundle `present`; all are base64."""
        now = self._clock.wall()
        try:
            present_authorities = certs.parse_certificates(base64.b64decode(present))
        except ValueError:
            return bundle
        own_authorities = certs.parse_certificates(base64.b64decode(bundle))
        if all(
            authority in present_authorities for authority in own_authorities if authority.not_valid_after_utc > now
        ):
            return present
        other_authorities = [
            authority
            for authority in present_authorities
            if authority not in own_authorities and authority.not_valid_after_utc > now
        ]
        return base64.b64encode(
            base64.b64decode(bundle) + certs.encode_certificates(other_authorities[:_MAX_OTHER_CAS])
        ).decode()

    def _run_once(self) -> None:
        bundle = self._bundle
        if not self.ensure_bundle():
            # The loop is woken when the configuration is created.
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
    """The JSON patch that sets the base64 `bundle` in every webhook; empty if all have it.

    join: merges the bundle with the present bundle of a webhook, if they differ.
    """
    present_bundles = [webhook["clientConfig"].get("caBundle") or "" for webhook in configuration.get("webhooks") or []]
    desired = [join(bundle, present) if join is not None and present else bundle for present in present_bundles]
    changes = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": new}
        for index, (present, new) in enumerate(zip(present_bundles, desired, strict=True))
        if present != new
    ]
    if not changes:
        return []
    # The patch names webhooks by index, which is valid only for the version that was read.
    version = configuration["metadata"]["resourceVersion"]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *changes]


def has_other_bundle(configuration: dict[str, Any], bundle: str) -> bool:
    """Whether a webhook has a different bundle."""
    bundles = (webhook["clientConfig"].get("caBundle") for webhook in configuration.get("webhooks") or [])
    return any(other and other != bundle for other in bundles)


class _Versioned(msgspec.Struct):
    metadata: dict[str, Any]


_decode = msgspec.json.Decoder(_Versioned).decode


def _parse_version(raw: bytes) -> tuple[str, str]:
    metadata = _decode(raw).metadata
    return metadata["name"], metadata["resourceVersion"]
