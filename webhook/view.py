"""What the webhook knows of the cluster: namespaces that opted in to defaults, cards, their classes, and quotas.

Fed by reflectors. A stale view refuses little: a namespace or a class that it does not know yet is asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog

from cardwise.core import classes, names
from cardwise.core.classes import DeviceClass
from cardwise.core.invalid import InvalidRequest
from cardwise.core.quantity import MiB
from cardwise.core.selectors import Selector
from cardwise.kube import errors, paths, survey, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.reflector import Reflector, Woken
from webhook import defaults, gpuquotas
from webhook.cards import CardFacts, CardSums
from webhook.defaults import Defaults
from webhook.gpuquotas import Standing
from webhook.validate import Cards

Json = dict[str, Any]

# Failed calls after which a list that we can do without holds nobody up: its CRD is not installed, or not ours to read.
_PATIENCE = 3

_log = structlog.get_logger(__name__)

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_namespace = msgspec.json.Decoder(wire.Namespace).decode
_decode_card = msgspec.json.Decoder(wire.ExtendedResource).decode


class ClusterView:
    """Implements `decisions.View`. Methods may be called from any thread."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._sums = CardSums()
        self._standings = _ByNamespace()
        self._unreadable: dict[str, str] = {}
        selector = {"labelSelector": f"{names.DEFAULTS_LABEL}={defaults.ENABLED}"}
        self._namespaces: Reflector[Defaults] = Reflector(
            client, paths.namespaces(), _project_namespace, Woken(), query=selector
        )
        self._cards_known: Reflector[CardFacts] = Reflector(
            client, paths.extendedresources(), _project_card, Woken(self._sums.forget)
        )
        self._classes_known: Reflector[DeviceClass] = Reflector(
            client, paths.resourceclasses(), self._project_class, Woken()
        )
        self._quotas_known: Reflector[Standing] = Reflector(
            client, paths.gpuquotas(), self._project_quota, self._standings
        )

    def start(self) -> None:
        for reflector in (self._namespaces, self._cards_known, self._classes_known, self._quotas_known):
            reflector.start()

    def stop(self) -> None:
        for reflector in (self._namespaces, self._cards_known, self._classes_known, self._quotas_known):
            reflector.stop()

    def problems(self) -> list[str]:
        """Why the view is not whole yet."""
        needed = (self._namespaces, self._cards_known)
        # Clusters without types and quotas by type work without them.
        wanted = (r for r in (self._classes_known, self._quotas_known) if r.errors < _PATIENCE)
        return [
            f"{reflector.name} are not listed yet" for reflector in (*needed, *wanted) if not reflector.synced.is_set()
        ]

    def defaults(self, namespace: str) -> Defaults | None:
        return self._namespaces.store.get(namespace)

    def fresh_defaults(self, namespace: str) -> Defaults | None:
        known = self._namespaces.store.get(namespace)
        if known is not None:
            return known
        # The API server says that it carries the label, so the watch is behind.
        try:
            return defaults.of(self._client.get(paths.namespaces(namespace), timeout=2.0)["metadata"])
        except errors.NotFound:
            return None

    def cards(self, device_class: DeviceClass | None = None) -> Cards:
        return self._sums.of(device_class, self._cards_known.store.snapshot)

    def selects(self, selector: Selector) -> bool:
        return any(selector.matches(card.labels) for card in self._cards_known.store.snapshot().values())

    def classes(self) -> Mapping[str, DeviceClass]:
        return self._classes_known.store.snapshot()

    def device_class(self, name: str) -> DeviceClass | None:
        known = self._classes_known.store.get(name)
        if known is not None:
            return known
        # It may have been made a moment ago. The name is a user's, and becomes part of a path.
        try:
            classes.check_name(name)
            return classes.parse(self._client.get(paths.resourceclasses(name), timeout=2.0))
        except (errors.NotFound, InvalidRequest):
            return None

    def quotas(self, namespace: str) -> Sequence[Standing]:
        return self._standings.of(namespace)

    def pod(self, namespace: str, name: str) -> Json | None:
        try:
            return self._client.get(paths.pods(namespace, name), timeout=2.0)
        except errors.NotFound:
            return None
        except errors.KubeError as error:
            # As if we were down: others' Bindings must go on (failurePolicy Ignore).
            _log.warning("a Binding passes unseen", namespace=namespace, pod=name, error=str(error))
            return None

    def _project_class(self, raw: bytes) -> tuple[str, DeviceClass] | None:
        obj = _decode_object(raw)
        name = obj["metadata"]["name"]
        try:
            parsed = classes.parse(obj)
        except InvalidRequest as error:
            self._skipped(f"ResourceClass {name}", error)
            return None
        return name, parsed

    def _project_quota(self, raw: bytes) -> tuple[str, Standing] | None:
        obj = _decode_object(raw)
        key = f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"
        try:
            parsed = gpuquotas.parse(obj)
        except InvalidRequest as error:
            self._skipped(f"GPUQuota {key}", error)
            return None
        return key, parsed

    def _skipped(self, what: str, error: InvalidRequest) -> None:
        """It was made while nobody checked. Its status changes often, so this is said once."""
        if self._unreadable.get(what) != str(error):
            self._unreadable[what] = str(error)
            _log.warning("cannot be read, so it does not count", object=what, error=str(error))


class _ByNamespace:
    """Handler of the reflector of GPUQuotas: those of one namespace at a glance, of maybe thousands."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Standing]] = {}

    def of(self, namespace: str) -> Sequence[Standing]:
        # A copy in one step: the reflector's thread changes it meanwhile.
        return list(self._found.get(namespace, {}).values())

    def on_change(self, key: str, old: Standing | None, new: Standing) -> None:  # noqa: ARG002
        namespace = new.quota.namespace
        self._found[namespace] = self._found.get(namespace, {}) | {key: new}

    def on_delete(self, key: str, old: Standing) -> None:
        namespace = old.quota.namespace
        left = {name: standing for name, standing in self._found.get(namespace, {}).items() if name != key}
        if left:
            self._found[namespace] = left
        else:
            self._found.pop(namespace, None)

    def on_synced(self) -> None:
        pass


def _project_namespace(raw: bytes) -> tuple[str, Defaults]:
    metadata = _decode_namespace(raw).metadata
    annotations = metadata.annotations
    return metadata.name, Defaults(annotations.get(names.DEFAULT_GPU_MEM, ""), annotations.get(names.POLICY, ""))


def _project_card(raw: bytes) -> tuple[str, CardFacts]:
    card = _decode_card(raw)
    spec = card.spec
    memory = MiB(spec.memory_mib)
    return card.metadata.name, CardFacts(spec.node, memory, survey.labels_of(card))
