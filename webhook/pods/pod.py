"""The pod under review: parsed once, then changed by one rule after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cardwise.core.api import request
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.request import Container, ContainerRequest, PodRequest
from cardwise.core.gangs.gangs import Membership
from cardwise.core.values.decoded import Json
from webhook.cluster.namespaces import Defaults

_NO_DEFAULTS: Final = Defaults()
_INIT_PREFIX: Final = "init-"


class PodUnderReview:
    """A pod on its way through the rules.

    The original manifest is never changed: a rule replaces each object that it would change. Not thread-safe.

    metadata, spec: the pod's fields. The annotations, labels and containers in them may be older than those below.
    annotations, labels: rules assign new ones.
    containers: as `request.containers` lists them.
    request: the request of cards and devices, after a rule has called `read_request`; None without a request.
    cards: the request of each container that requests cards, by its key; empty until `read_request`.
    gang: the gang of the pod; None until a rule has found it, and if there is none.
    isolation: what the pod demands, after a rule has found it; `none` until then, and if the pod requests no cards.
    names_unserved_podgroup: whether the pod names a PodGroup of Kubernetes that the cluster does not serve.
    defaults: the namespace's defaults that the pod takes.
    has_status: whether the manifest has a status, which Kubernetes ignores at creation: rules may remove it.
    agent: the key of the share agent's container; "" without an agent.
    warnings: the warnings for the author.
    """

    __slots__ = (
        "_is_read",
        "_parse",
        "agent",
        "annotations",
        "cards",
        "containers",
        "defaults",
        "gang",
        "has_status",
        "isolation",
        "labels",
        "manifest",
        "metadata",
        "names_unserved_podgroup",
        "request",
        "spec",
        "warnings",
    )

    def __init__(self, manifest: Json, parse: Callable[[Json], PodRequest | None] = request.parse) -> None:
        """parse: the function that reads the request, `request.parse` or, for a pod that must be rewritten,
        `request.parse_mutated`.
        """
        self.manifest = manifest
        self.metadata: Json = dict(manifest.get("metadata") or {})
        self.spec: Json = dict(manifest.get("spec") or {})
        self.annotations: Json = self.metadata.get("annotations") or {}
        self.labels: Json = self.metadata.get("labels") or {}
        self.containers = list(request.containers(manifest))
        self.request: PodRequest | None = None
        self.cards: Mapping[str, ContainerRequest] = {}
        self.gang: Membership | None = None
        self.isolation = Isolation.NONE
        self.names_unserved_podgroup = False
        self.defaults = _NO_DEFAULTS
        self.agent = ""
        self.has_status = "status" in manifest
        self.warnings: list[str] = []
        self._parse = parse
        self._is_read = False

    def to_json(self) -> Json:
        """The pod as it is now."""
        for field, present in (("annotations", self.annotations), ("labels", self.labels)):
            if present is not self.metadata.get(field) and (present or field in self.metadata):
                self.metadata[field] = present
        for field, is_init in (("initContainers", True), ("containers", False)):
            specs = [c.spec for c in self.containers if c.key.startswith(_INIT_PREFIX) is is_init]
            if specs:
                self.spec[field] = specs
        others = {field: content for field, content in self.manifest.items() if field != "status" or self.has_status}
        return others | {"metadata": self.metadata, "spec": self.spec}

    def read_request(self) -> PodRequest | None:
        """Read the request, once. Raises InvalidRequest."""
        if not self._is_read:
            self._set_request(self._parse(self.to_json()))
            self._is_read = True
        return self.request

    def forget_request(self) -> None:
        """Let the next `read_request` read the request again: a rule has added a share."""
        self._is_read = False

    def replace_container(self, position: int, spec: Json) -> None:
        """Replace the container at this position in `containers`."""
        container = self.containers[position]
        self.containers[position] = Container(container.key, container.path, spec, container.ordinary_init)

    def put_resources(self, position: int, resources: Json) -> None:
        """Replace the resources of the container at this position in `containers`, if they differ."""
        spec = self.containers[position].spec
        if resources != (spec.get("resources") or {}):
            self.replace_container(position, {**spec, "resources": resources})

    def arrange_init_containers(self, order: Sequence[int | None], added: Json | None = None) -> None:
        """Give the init containers this order. Those that `order` does not name are removed, with their requests.

        order: the former positions; None stands for `added`.
        """
        former = [container.spec for container in self.containers if container.key.startswith(_INIT_PREFIX)]
        specs = [container.spec for container in self.containers[len(former) :]]
        arranged = [added if position is None else former[position] for position in order]
        self.spec.pop("initContainers", None)
        if arranged:
            self.spec["initContainers"] = arranged
        self.containers = list(request.containers({"spec": {"initContainers": arranged, "containers": specs}}))
        if self.request is not None:
            new_keys = {
                f"{_INIT_PREFIX}{position}": f"{_INIT_PREFIX}{i}"
                for i, position in enumerate(order)
                if position is not None
            }
            self._set_request(_with_keys(self.request, new_keys))

    def _set_request(self, pod_request: PodRequest | None) -> None:
        self.request = pod_request
        self.cards = {container.key: container for container in pod_request.containers} if pod_request else {}


def _with_keys(pod_request: PodRequest, init_keys: Mapping[str, str]) -> PodRequest | None:
    """The request with other keys of init containers; None if no container with a request is left."""
    containers = tuple(
        replace(container, key=init_keys.get(container.key, container.key))
        for container in pod_request.containers
        if container.key in init_keys or not container.key.startswith(_INIT_PREFIX)
    )
    devices = tuple(
        replace(device, key=init_keys.get(device.key, device.key))
        for device in pod_request.devices
        if device.key in init_keys or not device.key.startswith(_INIT_PREFIX)
    )
    return replace(pod_request, containers=containers, devices=devices) if containers or devices else None


def container_path(key: str) -> str:
    """The field of the container with this key."""
    return f"spec.initContainers[{key.removeprefix('init-')}]" if key.startswith("init-") else f"spec.containers[{key}]"
