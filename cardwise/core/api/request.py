"""Parses a pod's request of cards and devices: from its JSON to a `PodRequest`.

No other module reads these requests. `parse` returns a complete request; None if the pod requests nothing of Cardwise.
It raises `InvalidRequest` with the field and the remedy.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Final, NamedTuple

from cardwise.core.api import lookalikes, mpsprofile, names, policies
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.isolation import Isolation, isolation_of
from cardwise.core.api.mpsprofile import MpsClient
from cardwise.core.api.sharing import ANY_TENANT, Tenant, tenant_of
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB, Percent
from cardwise.core.values.wording import quote_text

# Cards, devices or units of a class that one container may request. No node has as many; the limit bounds loops.
MAX_CARDS: Final = 4096
# Card requests of a pod (`_card_request_key`). Each card request adds to the time of a filter call. More than 16 cannot
# be needed: the largest nodes have 16 GPUs.
MAX_CARD_REQUESTS: Final = 16
_MAX_SPLIT_SHARES: Final = 1024  # split shares in the annotation of a pod; pods have fewer containers


class Load(NamedTuple):
    """The CPU (in thousandths), memory (in bytes) and pod slots that a pod uses on its node."""

    cpu: int = 0
    memory: int = 0
    pods: int = 1

    def add(self, other: "Load", sign: int = 1) -> "Load":
        """The sum; with sign -1 the difference."""
        return Load(self.cpu + sign * other.cpu, self.memory + sign * other.memory, self.pods + sign * other.pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """One container's request of cards.

    key: the container's key, see `containers`.
    cards: the number of cards.
    mem: MiB over all these cards; 0 for whole cards.
    core: percent of the SMs over all these cards, where 100 is one card; 0 for no limit.
    resource_class: the ResourceClass of the cards; "" for any card.
    """

    key: str
    name: str
    cards: int
    mem: MiB = MiB(0)
    core: Percent = Percent(0)
    resource_class: str = ""

    @property
    def whole(self) -> bool:
        return self.mem == 0

    @property
    def is_split(self) -> bool:
        """Whether the container has a share of several cards."""
        return self.cards > 1 and not self.whole

    @property
    def mem_per_card(self) -> MiB:
        return MiB(self.mem // self.cards)

    @property
    def core_per_card(self) -> Percent:
        return Percent(self.core // self.cards)


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A number of whole devices of one class, for the container with this key."""

    key: str
    resource_class: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRequest:
    """A pod's request of at least one card or device.

    containers: one request for each container that uses a card, in the pod's order.
    policy: the placement policy that the pod names; None for the default.
    devices: requests of devices other than GPUs, by container and then by class.
    priority: the pod's priority.
    isolation: what the pod demands.
    user: the user as which the containers with cards run (`mpsprofile`).
    tenant: the pod as a tenant of its cards.
    peer_key: `policies.peer_key` of the pod; None if it has no peers. Pods with the same key are peers.
    """

    containers: tuple[ContainerRequest, ...]
    policy: str | None = None
    devices: tuple[DeviceRequest, ...] = ()
    priority: int = 0
    isolation: Isolation = Isolation.ADVISORY
    user: int = mpsprofile.IMAGE_USER
    tenant: Tenant = ANY_TENANT
    peer_key: str | None = None
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Computed once: the gang planner uses requests as keys, hundreds of them in each pass.
        if not self._hash:
            object.__setattr__(self, "_hash", hash(tuple([getattr(self, name) for name in _COMPARED_FIELDS])))
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., "PodRequest"], tuple[()]]:
        # The hash is not pickled, because hashes differ between processes.
        return partial(PodRequest, **{name: getattr(self, name) for name in _COMPARED_FIELDS}), ()

    @property
    def has_whole_cards_only(self) -> bool:
        """Whether no other pod can use a card of the pod. Such a pod meets each demand of isolation. It runs without
        MPS, unless a daemon serves all cards of the node.
        """
        return all(container.whole for container in self.containers)

    @property
    def mps_client(self) -> MpsClient:
        """The pod as a client of MPS."""
        return mpsprofile.mps_client(self.isolation, self.user, self.tenant)

    @property
    def mem(self) -> MiB:
        """The sum of the requested MiB; whole cards count as 0."""
        return MiB(sum(container.mem for container in self.containers))

    @property
    def largest_share(self) -> MiB:
        """The MiB of the largest share that the pod needs on one card; 0 if it requests only whole cards."""
        together: dict[str, int] = {}
        for container in self.containers:
            if container.cards == 1:
                together[container.resource_class] = together.get(container.resource_class, 0) + container.mem
        split = (container.mem_per_card for container in self.containers if container.cards > 1)
        return MiB(max([*together.values(), *split], default=0))


def _card_request_key(container: ContainerRequest) -> tuple[str, str]:
    """The key of the container's card request. A container with whole cards or several cards has a card request of its
    own; the other containers with the same class have one together (`fitting.card_requests`).
    """
    return ("key", container.key) if container.whole or container.cards > 1 else ("class", container.resource_class)


_COMPARED_FIELDS: Final = tuple(field.name for field in fields(PodRequest) if field.compare)


class NotRewritten(InvalidRequest):
    """The pod's request is in a form that the webhook would have rewritten: the webhook has not processed the pod."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod.

    key: "0" for the first container, "init-0" for the first init container.
    path: the container's field in the pod, for messages.
    ordinary_init: an init container that is not a native sidecar.
    """

    key: str
    path: str
    spec: Json
    ordinary_init: bool


def containers(pod: Json) -> Iterator[Container]:
    """The pod's containers, native sidecars and ordinary init containers, init containers first."""
    spec = pod.get("spec") or {}
    for i, container in enumerate(spec.get("initContainers") or ()):
        yield Container(f"init-{i}", f"spec.initContainers[{i}]", container, container.get("restartPolicy") != "Always")
    for i, container in enumerate(spec.get("containers") or ()):
        yield Container(str(i), f"spec.containers[{i}]", container, ordinary_init=False)


def names_claim(container: Container) -> bool:
    """Whether the container gets devices of the pod's ResourceClaim (scheduler.mode=claims)."""
    entries = (container.spec.get("resources") or {}).get("claims") or ()
    return any(entry.get("name") == names.POD_CLAIM for entry in entries)


def has_slot(container: Container) -> bool:
    """Whether the webhook has given the container a slot: the node gives it the GPUs or devices that it requests."""
    return str(_get_resources(container, "limits").get(names.SHARE)) == "1" or names_claim(container)


def write_device_classes(classes: Iterable[str]) -> str:
    """The value of the annotation `names.DEVICE_CLASSES`.

    classes: the classes of devices other than GPUs in the pod's limits.
    """
    return ",".join(sorted(set(classes)))


def read_device_classes(annotations: Mapping[str, str]) -> frozenset[str]:
    """The classes in the annotation that `write_device_classes` wrote."""
    return frozenset(filter(None, annotations.get(names.DEVICE_CLASSES, "").split(",")))


def write_counts(containers: Iterable[ContainerRequest]) -> str:
    """The value of the annotation `names.GPU_COUNTS`: the number of cards of each split share, such as
    `train=2,eval=4`; empty without split shares.

    The annotation uses the containers' names, because keys change when another webhook inserts a container. The number
    is also in the container's variable `names.ENV_GPU_COUNT`, since other webhooks may drop annotations and rename
    containers.
    """
    return ",".join(
        f"{container.name}={container.cards}" for container in containers if not container.whole and container.cards > 1
    )


def read_counts(annotations: Mapping[str, str]) -> dict[str, int]:
    """The numbers of cards in the annotation that `write_counts` wrote, by container name. Raises InvalidRequest."""
    counts = {}
    field, entries = f"metadata.annotations[{names.GPU_COUNTS}]", annotations.get(names.GPU_COUNTS, "").split(",")
    if len(entries) > _MAX_SPLIT_SHARES:
        raise InvalidRequest(field, f"has {len(entries)} entries, and a pod has fewer containers", "leave it out")
    for entry in filter(None, entries):
        name, _, number = entry.partition("=")
        try:
            counts[name] = quantity.parse_count(number, maximum=MAX_CARDS)
        except quantity.InvalidQuantity as error:
            raise InvalidRequest(field, f"{quote_text(entry)}: {error.problem}", error.remedy) from error
    return counts


def parse(pod: Json) -> PodRequest | None:
    """The request of a pod as written by a user or as rewritten by the webhook. Raises InvalidRequest."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    device_classes = read_device_classes(annotations)
    read_split_counts = cache(partial(read_counts, annotations))  # only if needed, and once for all containers
    container_requests: list[ContainerRequest] = []
    devices: list[DeviceRequest] = []
    # By class, the total percent of the SMs of the containers that share one card.
    shares_by_class: dict[str, int] = {}
    class_containers: set[tuple[str, str]] = set()
    for container in containers(pod):
        if device_classes:
            devices += _device_requests(container, device_classes)
        container_request = _container_request(container, annotations, device_classes, read_split_counts)
        if container_request is None:
            continue
        container_requests.append(container_request)
        class_containers.add(_card_request_key(container_request))
        if len(class_containers) > MAX_CARD_REQUESTS:
            raise InvalidRequest(
                f"{container.path}.resources.limits",
                f"the pod has more than {MAX_CARD_REQUESTS} separate GPU requests",
                "use fewer containers with several or whole GPUs, or several pods; "
                "shares of one GPU of the same type count as one request",
            )
        if container_request.cards == 1 and container_request.core:
            others = shares_by_class.get(container_request.resource_class, 0)
            _check_core(container, container_request.core, cards=1, others=others)
            shares_by_class[container_request.resource_class] = others + container_request.core
    if not container_requests and not devices:
        return None
    policy = annotations.get(names.POLICY)
    if policy is not None:
        policies.find_policy(policy, f"metadata.annotations[{names.POLICY}]")
    priority = (pod.get("spec") or {}).get("priority") or 0
    return PodRequest(
        containers=tuple(container_requests),
        policy=policy,
        devices=tuple(devices),
        priority=priority,
        isolation=isolation_of(annotations),
        user=_common_mps_user(pod, {container_request.key for container_request in container_requests}),
        tenant=tenant_of(annotations, (pod.get("metadata") or {}).get("namespace") or ""),
        peer_key=peer_key(pod, policy),
    )


def peer_key(pod: Json, policy: str | None) -> str | None:
    """`PodRequest.peer_key` of a pod with this policy; None if it has none."""
    if policy is None:
        return None
    metadata = pod.get("metadata") or {}
    controllers = (owner.get("uid") for owner in metadata.get("ownerReferences") or () if owner.get("controller"))
    return policies.peer_key(
        policy,
        namespace=metadata.get("namespace") or "",
        gang=(metadata.get("labels") or {}).get(names.GANG),
        controller=next(controllers, None),
    )


def parse_mutated(pod: Json) -> PodRequest | None:
    """As `parse`, for a pod that the webhook must have rewritten. Raises NotRewritten if the webhook has not."""
    request = parse(pod)
    if request is None:
        return None
    card_containers = {container.key for container in request.containers}
    slots = card_containers | {device.key for device in request.devices}
    for c in containers(pod):
        limits = _get_resources(c, "limits")
        # The webhook writes amounts without a binary suffix such as Gi; the API server returns 8000 as 8k.
        canonical = (
            names.GPU_COUNT not in limits
            and (names.GPU_MEM in limits or names.WHOLE_GPU in limits)
            and not quantity.parse_amount(limits.get(names.GPU_MEM, "0")).is_bytes
        )
        if (c.key in slots and not has_slot(c)) or (c.key in card_containers and not canonical):
            raise NotRewritten(
                f"{c.path}.resources.limits",
                "the pod was not rewritten by the Cardwise webhook",
                "run cardwise explain for the cause and the remedy",
            )
    return request


def _common_mps_user(pod: Json, keys: Collection[str]) -> int:
    spec = pod.get("spec") or {}
    pod_user = _run_as_user(spec)
    if spec.get("hostUsers") is False:
        return mpsprofile.OWN_USERS
    return mpsprofile.user(
        pod_user, [_run_as_user(container.spec) for container in containers(pod) if container.key in keys]
    )


def _run_as_user(spec: Json) -> int | None:
    """The `runAsUser` in the spec of a pod or container; None if it is not set."""
    number = (spec.get("securityContext") or {}).get("runAsUser")
    return number if isinstance(number, int) else None


def _get_resources(container: Container, kind: str) -> Json:
    return (container.spec.get("resources") or {}).get(kind) or {}


def _device_requests(container: Container, classes: Collection[str]) -> list[DeviceRequest]:
    limits, requests = _get_resources(container, "limits"), _get_resources(container, "requests")
    class_by_resource = {name: names.class_of(name) for name in (*limits, *requests)}
    resources = sorted(
        (name, class_name)
        for name, class_name in class_by_resource.items()
        if class_name is not None and class_name in classes
    )
    if resources and container.ordinary_init:
        raise _init_container_error(container, resources[0][0], "a device")
    return [
        DeviceRequest(container.key, class_name, _read_amount(container, name, limits, requests))
        for name, class_name in resources
    ]


def _init_container_error(container: Container, resource: str, noun: str) -> InvalidRequest:
    return InvalidRequest(
        f"{container.path}.resources.limits[{resource}]",
        f"an ordinary init container cannot hold {noun}",
        "request it in an ordinary container, or set restartPolicy: Always on this one",
    )


def _container_request(
    container: Container,
    annotations: Json,
    device_classes: Collection[str],
    read_split_counts: Callable[[], Mapping[str, int]],
) -> ContainerRequest | None:
    limits, requests = _get_resources(container, "limits"), _get_resources(container, "requests")
    classes = {name: names.class_of(name) for name in (*limits, *requests)}
    class_names = sorted(
        name for name, class_name in classes.items() if class_name and class_name not in device_classes
    )
    resources = [*(name for name in names.REQUESTED if name in limits or name in requests), *class_names]
    if not resources:
        return None
    if container.ordinary_init:
        raise _init_container_error(container, resources[0], "a GPU share")
    field = f"{container.path}.resources.limits"
    if len(class_names) > 1:
        raise InvalidRequest(
            f"{field}[{class_names[1]}]", f"{class_names[0]} is also requested", "request one class in each container"
        )
    amounts_by_name = {name: _read_amount(container, name, limits, requests) for name in resources}
    mem, core = amounts_by_name.get(names.GPU_MEM, 0), amounts_by_name.get(names.GPU_CORE, 0)
    # After the webhook has rewritten the container, only the limits count: the annotation is ignored, since it may have
    # been added later.
    rewritten = _is_rewritten(container)
    class_annotation = annotations.get(names.CLASS) if not rewritten else None
    resource_class = (names.class_of(class_names[0]) if class_names else class_annotation) or ""
    counts = _read_counts_annotation(field, amounts_by_name, class_names, has_share=bool(mem) and rewritten)
    cards = next(iter(counts.values()), 1)
    if not mem:
        if not counts:
            raise InvalidRequest(
                f"{field}[{names.GPU_CORE}]",
                "a share of the SMs needs a share of the memory",
                f"add {names.GPU_MEM} with the memory that the container needs, such as 8Gi",
            )
        if core:
            raise InvalidRequest(f"{field}[{names.GPU_CORE}]", "a whole GPU includes all its SMs", "leave it out")
        return ContainerRequest(
            key=container.key, name=container.spec.get("name", ""), cards=cards, resource_class=resource_class
        )
    if names.WHOLE_GPU in counts:
        raise InvalidRequest(
            f"{field}[{names.WHOLE_GPU}]",
            f"whole GPUs and {names.GPU_MEM} cannot be combined",
            f"write {names.GPU_COUNT} to split the memory over several GPUs, or leave {names.GPU_MEM} out",
        )
    if not counts and rewritten:
        cards = split_cards(container, read_split_counts)
    if class_names and cards > 1 and amounts_by_name[class_names[0]] != cards:  # a ResourceQuota counts this limit
        raise InvalidRequest(
            f"{field}[{class_names[0]}]", f"differs from the number of GPUs, {cards}", f"write {cards}"
        )
    for name, amount, unit in ((names.GPU_MEM, mem, "Mi"), (names.GPU_CORE, core, "")):
        if amount % cards:
            low = amount - amount % cards
            divisible_amounts = f"{low}{unit} or {low + cards}{unit}" if low else f"{cards}{unit}"
            raise InvalidRequest(
                f"{field}[{name}]",
                f"{amount}{unit} cannot be divided equally over {cards} GPUs",
                f"write {divisible_amounts}",
            )
    _check_core(container, core, cards=cards, others=0)
    return ContainerRequest(
        key=container.key,
        name=container.spec.get("name", ""),
        cards=cards,
        mem=MiB(mem),
        core=Percent(core),
        resource_class=resource_class,
    )


def split_cards(container: Container, read_split_counts: Callable[[], Mapping[str, int]]) -> int:
    """The number of cards over which the webhook has split the container's share. Raises InvalidRequest.

    read_split_counts: returns what `read_counts` returns for the pod's annotations.

    The container's variable takes precedence over the annotation: if the annotation is missing or wrong, the whole
    share must not be put on one card.
    """
    for entry in container.spec.get("env") or ():
        if entry.get("name") == names.ENV_GPU_COUNT:
            number = str(entry.get("value"))
            try:
                return quantity.parse_count(number, maximum=MAX_CARDS)
            except quantity.InvalidQuantity as error:
                field = f"{container.path}.env[{names.ENV_GPU_COUNT}]"
                raise InvalidRequest(field, f"{quote_text(number)}: {error.problem}", "leave it out") from error
    return read_split_counts().get(container.spec.get("name", ""), 1)


def _is_rewritten(container: Container) -> bool:
    """Whether the webhook has rewritten the container: the container requests a slot or names the pod's claim, or, if
    another webhook removed the slot, has the variable NVIDIA_VISIBLE_DEVICES with the webhook's source.
    """
    if names.SHARE in _get_resources(container, "limits") or names_claim(container):
        return True
    path = f"metadata.annotations['{names.DEVICES_OF}"
    return any(
        entry.get("name") == names.ENV_VISIBLE_DEVICES
        and str(((entry.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")).startswith(path)
        for entry in container.spec.get("env") or ()
    )


def _read_counts_annotation(
    field: str, amounts_by_name: Mapping[str, int], class_names: Sequence[str], *, has_share: bool
) -> dict[str, int]:
    """The number of cards that the container requests, by each resource that gives this number. Raises InvalidRequest
    if the numbers differ.

    amounts_by_name: the requested amounts by resource.
    class_names: the resources of classes.
    has_share: the webhook has rewritten the container, which has a share. Then the amount of a class is ignored: it may
        be units of shares on one card.
    """
    names_of_counts = [names.GPU_COUNT, names.WHOLE_GPU, *(() if has_share else class_names)]
    counts = {name: amounts_by_name[name] for name in names_of_counts if name in amounts_by_name}
    if len(set(counts.values())) > 1:
        first, *other_counts = counts
        other = next(name for name in other_counts if counts[name] != counts[first])
        keep = other if other in class_names else first
        raise InvalidRequest(f"{field}[{first}]", f"differs from {other}", f"write only {keep}")
    return counts


def _check_core(container: Container, core: int, *, cards: int, others: int) -> None:
    """Check that the percentage is available on the cards. Raises InvalidRequest.

    others: the percent that earlier containers use of the same card.
    """
    available = FULL_CORE * cards - others
    if core <= available:
        return
    field = f"{container.path}.resources.limits[{names.GPU_CORE}]"
    if not others:
        capacity_phrase = "one GPU" if cards == 1 else f"{cards} GPUs together"
        problem = f"{core} percent is more than the {FULL_CORE * cards} percent of {capacity_phrase}"
        raise InvalidRequest(field, problem, f"write at most {FULL_CORE * cards}")
    raise InvalidRequest(
        field,
        f"the containers of the pod share a GPU and request {others + core} percent of its SMs in total",
        f"write at most {available}" if available else f"write at most {FULL_CORE} in total, or leave it out",
    )


def _read_amount(container: Container, name: str, limits: Json, requests: Json) -> int:
    """The amount of one resource, from the container's limits. Raises InvalidRequest if the request differs from the
    limit: Kubernetes requires the same for all extended resources.
    """
    field = f"{container.path}.resources.limits[{name}]"
    if name not in limits:
        raise InvalidRequest(field, "is missing although there is a request", f"write {name} in limits only")
    limit = _parse_amount(field, name, limits[name])
    if name in requests:
        request_field = f"{container.path}.resources.requests[{name}]"
        request = _parse_amount(request_field, name, requests[name])
        if request != limit:
            raise InvalidRequest(
                request_field,
                f"{requests[name]} differs from the limit {limits[name]}",
                f"write {name} in limits only",
            )
    return limit


def _parse_amount(field: str, name: str, text: str | int) -> int:
    try:
        if name == names.GPU_MEM:
            return quantity.parse_mib(text)
        if name == names.GPU_CORE:
            return quantity.parse_count(text, maximum=6400)
        return quantity.parse_count(text, maximum=MAX_CARDS)
    except quantity.InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, _amount_remedy(name, text, error.remedy)) from error


def _amount_remedy(name: str, text: str | int, remedy: str) -> str:
    """The remedy for an invalid amount.

    remedy: the general remedy, used if there is none for this resource or this amount.
    """
    if name == names.GPU_MEM:
        return remedy
    if names.class_of(name) and (suggested_name := lookalikes.suggest_resource(name)):
        return f"did you mean {suggested_name}? The amount of a class must be a whole number"
    if name == names.GPU_CORE:
        remedy = f"write a percentage from 1 to {FULL_CORE} for each GPU"
    try:
        number, _ = quantity.parse_amount(text)
    except quantity.InvalidQuantity:
        return remedy
    if number == 0:
        return f"{remedy}, or leave it out"
    if name != names.GPU_CORE and number > 0 and number.denominator != 1:
        return f"{remedy}; for a part of a GPU write {names.GPU_MEM}, such as 8Gi"
    return remedy
