"""Adds the share agent to a pod: whether, at which position, and with which mounts and settings.

The contract is docs/design/0007-share-agent.md. Pure, and a fixed point. Runs before the request is read for the last
time: the agent is an init container, and the keys of containers with a share depend on its position.
"""

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

from cardwise import share
from cardwise.core.api import names, request, shareagent
from cardwise.core.api.mps import Mode
from cardwise.core.api.request import Container, PodRequest
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods import agentresources, environment, frameworks, mpsmode
from webhook.pods.limitranges import Amount, Bounds
from webhook.pods.order import changed_later_error
from webhook.templates import containers

AgentChoice = Literal["always", "mps", "never"]

USER: Final = 65532
RESOURCES: Final[Mapping[str, Amount]] = MappingProxyType(
    {"cpu": Amount.parse_amount("50m"), "memory": Amount.parse_amount("64Mi")}
)
_FIELD: Final = f"metadata.annotations[{names.SHARE_AGENT}]"
_PLACES: Final = (shareagent.FOLDER, share.MOUNT)  # where containers have the agent's volume
_COMMAND: Final = "cardwise-agent"
_OURS: Final = ("/run/cardwise", "/var/run/cardwise")  # the same place in nearly every image
_INIT: Final = "init-"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the share agent.

    image: "" for no agent.
    user: user ID; 0 for none, for clusters that assign a range to each namespace.
    """

    choice: AgentChoice = "mps"
    image: str = ""
    user: int = USER
    resources: Mapping[str, Amount] = field(default_factory=lambda: RESOURCES)


@dataclass(frozen=True, slots=True)
class Injection:
    """The rewritten pod; the caller's object if nothing changes. `key`: the agent's key; "" without an agent."""

    pod: Json
    key: str = ""
    warnings: tuple[str, ...] = ()


def inject_agent(
    pod: Json,
    pod_request: PodRequest | None,
    settings: AgentSettings,
    bounds: Callable[[], Bounds],
    scopes: mpsmode.Scopes,
) -> Injection:
    """Add, update or remove the share agent. Raises InvalidRequest.

    pod_request: the request of the present pod.
    bounds: returns the bounds of the namespace's LimitRanges.
    scopes: returns the scopes of the MPS daemons.
    """
    if pod_request is None or not pod_request.containers:
        return Injection(_remove_agent(pod))
    _refuse_mounts(pod, pod_request)
    mode, hook = mpsmode.mode_of(pod), frameworks.hook_of(pod, pod_request)
    annotated = _read_choice(pod)
    choice = annotated or settings.choice
    # Where no node has MPS there is nothing that it could wait for or tell.
    by_mps = choice == "mps" and (mode is Mode.REQUIRED or (mode.uses_mps and bool(scopes())))
    wanted = choice == "always" or by_mps or (bool(hook) and annotated != "never")
    if not wanted:
        return Injection(_remove_agent(pod), warnings=_warn_no_hook(hook, f"{_FIELD} says never"))
    if not settings.image:
        reason = "the webhook has no image for the share agent (--share-agent-image)"
        warnings = (f"{_FIELD}: {reason}, so the pod gets no share agent",) if annotated == "always" else ()
        return Injection(_remove_agent(pod), warnings=warnings + _warn_no_hook(hook, reason))
    _refuse_names(pod)
    spec = pod.get("spec") or {}
    init, order = spec.get("initContainers") or [], _order_containers(spec.get("initContainers") or [], pod_request)
    other_init = [init[i] for i in order if i is not None]
    before: Json = next((c for c, ours in zip(init, _find_own_agents(init), strict=True) if ours), {})
    known = bounds()
    agent_container = _agent_container(spec, before, other_init, settings, known, hook=bool(hook))
    misfit = agentresources.misfit(
        spec, agent_container, [agent_container if i is None else init[i] for i in order], known
    )
    if misfit:
        warnings = (f"spec.initContainers: the share agent is not injected, because {misfit}; the pod runs without it",)
        return Injection(_remove_agent(pod), warnings=warnings + _warn_no_hook(hook, "the pod has no share agent"))
    return _add_mounts(
        _move_containers(pod, order, agent_container),
        pod_request,
        _map_keys(order),
        hook,
        f"{_INIT}{order.index(None)}",
    )


def check_agent(pod: Json, pod_request: PodRequest) -> None:
    """Check that agent, volume and mounts are as `inject_agent` leaves them. Raises InvalidRequest."""
    if not pod_request.containers:
        return
    _refuse_mounts(pod, pod_request)
    spec = pod.get("spec") or {}
    agent = next((c for c in request.containers(pod) if _is_own_agent(c)), None)
    for container in request.containers(pod):
        limits = (container.spec.get("resources") or {}).get("limits") or {}
        named_so = container.spec.get("name") == shareagent.CONTAINER
        if named_so and not _is_own_agent(container) and any(name.startswith(names.CLASS_PREFIX) for name in limits):
            raise _reserved_name_error(container.path)
    if agent is None:
        return
    volume: Json = next(
        (volume_entry for volume_entry in spec.get("volumes") or () if volume_entry.get("name") == shareagent.VOLUME),
        {},
    )
    if "emptyDir" not in volume:
        raise _changed_error(f"spec.volumes[{shareagent.VOLUME}]")
    sharing = {container.key for container in pod_request.containers}
    for container in request.containers(pod):
        mounts = [m for m in container.spec.get("volumeMounts") or () if m.get("name") == shareagent.VOLUME]
        right = [_SHARED] if container.key == agent.key else _mounts(container.key, sharing, hook=False)
        if [m for m in mounts if m != frameworks.MOUNT or container.key not in sharing] != right:
            raise _changed_error(f"{container.path}.volumeMounts[{shareagent.VOLUME}]")


def _read_choice(pod: Json) -> str:
    text = str(annotations_of(pod).get(names.SHARE_AGENT, ""))
    if text and text not in get_args(AgentChoice):
        raise InvalidRequest(
            _FIELD, f"{quote_text(text)} is not a choice", f"write one of: {', '.join(get_args(AgentChoice))}"
        )
    return text


def _warn_no_hook(hook: str, reason: str) -> tuple[str, ...]:
    """The warning for a pod that requests the hook but gets no agent, which provides the hook's files."""
    return (f"{frameworks.FIELD}: the hook is not installed, because {reason}",) if hook else ()


def _is_own_agent(container: Container) -> bool:
    spec = container.spec
    sidecar = container.key.startswith(_INIT) and not container.ordinary_init
    return sidecar and spec.get("name") == shareagent.CONTAINER and spec.get("command") == [_COMMAND]


def _find_own_agents(init: Sequence[Json]) -> list[bool]:
    """Which init containers are agents of Cardwise, added now or in the pod that this one was copied from."""
    return [_is_own_agent(container) for container in request.containers({"spec": {"initContainers": init}})]


def _order_containers(init: Sequence[Json], pod_request: PodRequest) -> list[int | None]:
    """The former positions of the init containers, with None for the agent: at its present position, but before a
    sidecar with a share.
    """
    ours = _find_own_agents(init)
    kept: list[int | None] = [i for i, stale in enumerate(ours) if not stale]
    sharing = {container.key for container in pod_request.containers}
    first = next((i for i in range(len(init)) if f"{_INIT}{i}" in sharing), len(init))
    place = min(ours.index(True) if True in ours else first, first - sum(ours[:first]))
    return [*kept[:place], None, *kept[place:]]


def _map_keys(order: Sequence[int | None]) -> dict[str, str]:
    """The new keys of the init containers by the former keys."""
    return {f"{_INIT}{was}": f"{_INIT}{now}" for now, was in enumerate(order) if was is not None}


def _agent_container(
    spec: Json, before: Json, other_init: Sequence[Json], settings: AgentSettings, bounds: Bounds, *, hook: bool
) -> Json:
    """The agent's container. `other_init`: the pod's init containers without it."""
    containers_of = spec.get("containers") or ()
    others = [*other_init, *containers_of]
    running = [*(container for container in other_init if container.get("restartPolicy") == "Always"), *containers_of]
    port_used = any(
        port.get("containerPort") == shareagent.METRICS_PORT
        for container in others
        for port in container.get("ports") or ()
    )
    port = 0 if spec.get("hostNetwork") or port_used else shareagent.METRICS_PORT
    resources = agentresources.agent_resources(spec, before, running, settings.resources, bounds)
    limits = {**resources["limits"], names.SHARE: "1"}
    return {
        "name": shareagent.CONTAINER,
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [_COMMAND],
        "restartPolicy": "Always",
        "env": [
            environment.from_annotation(shareagent.ASSIGNMENT_ENV, names.ASSIGNMENT),
            {"name": shareagent.METRICS_PORT_ENV, "value": str(port)},
            *([{"name": shareagent.HOOK_ENV, "value": "true"}] if hook else []),
        ],
        "resources": {"limits": limits} | ({"requests": resources["requests"]} if resources["requests"] else {}),
        "volumeMounts": [dict(_SHARED)],
        "startupProbe": {
            "exec": {"command": [_COMMAND, "--probe"]},
            "periodSeconds": 1,
            "timeoutSeconds": 30,  # the probe gives up after five; a busy node may take that long to start it
            "failureThreshold": 43200,
        },
        "securityContext": {
            "runAsNonRoot": True,
            **({"runAsUser": settings.user} if settings.user else {}),
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


_SHARED: Final[Json] = {"name": shareagent.VOLUME, "mountPath": shareagent.FOLDER}
_VOLUME: Final[Json] = {"name": shareagent.VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}


def _mounts(key: str, sharing: set[str], *, hook: bool) -> list[Json]:
    if key not in sharing:
        return []
    return [{**_SHARED, "subPath": key, "readOnly": True}, *([dict(frameworks.MOUNT)] if hook else [])]


def _move_containers(pod: Json, order: Sequence[int | None], agent: Json | None) -> Json:
    """The pod with its init containers in this order, `agent` for None, and the agent's volume."""
    spec = pod.get("spec") or {}
    before, volumes = spec.get("initContainers") or [], spec.get("volumes") or []
    init = [agent if i is None else before[i] for i in order]
    others = [volume for volume in volumes if volume.get("name") != shareagent.VOLUME]
    if agent is not None:
        at = next((i for i, volume in enumerate(volumes) if volume.get("name") == shareagent.VOLUME), len(others))
        others.insert(at, dict(_VOLUME))
    lists = {"initContainers": init, "volumes": others}
    other_fields = {name: content for name, content in spec.items() if name not in lists}
    return pod | {"spec": other_fields | {name: entries for name, entries in lists.items() if entries}}


def _add_mounts(pod: Json, pod_request: PodRequest, renamed: Mapping[str, str], hook: str, agent: str) -> Injection:
    """Add the agent's mounts to each container with a share, and remove them from others."""
    spec = dict(pod["spec"])
    warnings: list[str] = []
    sharing = {renamed.get(container.key, container.key): container.whole for container in pod_request.containers}
    for container in request.containers(pod):
        if container.key == agent:
            continue
        hooked = bool(hook) and sharing.get(container.key) is False
        changed = dict(container.spec)
        existing = changed.get("volumeMounts") or []
        wanted = _mounts(container.key, set(sharing), hook=hooked)
        if [m for m in existing if m.get("name") == shareagent.VOLUME] != wanted:
            changed["volumeMounts"] = [*(m for m in existing if m.get("name") != shareagent.VOLUME), *wanted]
        if hooked:
            changed["env"], hook_warnings = frameworks.environment(changed.get("env") or [], hook, container.path)
            warnings += hook_warnings
        if changed != container.spec:
            containers.put_container(spec, container, changed)
    return Injection(pod | {"spec": spec}, agent, tuple(warnings))


def _remove_agent(pod: Json) -> Json:
    """The pod without a copied agent, which would get no cards: the pod would stay pending."""
    spec = pod.get("spec") or {}
    init = spec.get("initContainers") or []
    ours = _find_own_agents(init)
    if True not in ours:
        return pod
    stripped = _move_containers(pod, [i for i, stale in enumerate(ours) if not stale], None)
    after = dict(stripped["spec"])
    for container in request.containers(stripped):
        existing = container.spec.get("volumeMounts") or []
        other_mounts = [m for m in existing if m.get("name") != shareagent.VOLUME]
        if other_mounts != existing:
            containers.put_container(after, container, {**container.spec, "volumeMounts": other_mounts})
    return stripped | {"spec": after}


def _refuse_names(pod: Json) -> None:
    """Refuse containers and volumes of users with the agent's names. Raises InvalidRequest."""
    for container in request.containers(pod):
        if container.spec.get("name") == shareagent.CONTAINER and not _is_own_agent(container):
            raise _reserved_name_error(container.path)
        for i, mount in enumerate(container.spec.get("volumeMounts") or ()):
            if mount.get("name") == shareagent.VOLUME and mount.get("mountPath") not in _PLACES:
                raise _reserved_volume(f"{container.path}.volumeMounts[{i}].name")
    for i, volume in enumerate((pod.get("spec") or {}).get("volumes") or ()):
        if volume.get("name") == shareagent.VOLUME and "emptyDir" not in volume:
            raise _reserved_volume(f"spec.volumes[{i}].name")


def _refuse_mounts(pod: Json, pod_request: PodRequest) -> None:
    """Refuse users' mounts below the agent's folder, from which programs read the share. Raises InvalidRequest."""
    sharing = {container.key for container in pod_request.containers}
    for container in request.containers(pod):
        if container.key not in sharing:
            continue
        for i, path in _find_foreign_mounts(container.spec.get("volumeMounts") or ()):
            raise InvalidRequest(
                f"{container.path}.volumeMounts[{i}].mountPath",
                f"{path} is reserved for Cardwise's files about the container's share",
                "choose another mountPath",
            )


def _find_foreign_mounts(mounts: Sequence[Json]) -> Iterator[tuple[int, str]]:
    """Mounts of users at the agent's paths."""
    for i, mount in enumerate(mounts):
        path = posixpath.normpath("/" + str(mount.get("mountPath") or "").lstrip("/"))
        of_agent = mount.get("name") == shareagent.VOLUME and path in _PLACES
        if not of_agent and any(path == ours or path.startswith(f"{ours}/") for ours in _OURS):
            yield i, path


def _reserved_name_error(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}.name", f"{shareagent.CONTAINER} is reserved for Cardwise's share agent", "rename the container"
    )


def _reserved_volume(field: str) -> InvalidRequest:
    return InvalidRequest(
        field,
        f"{shareagent.VOLUME} is reserved for the volume of Cardwise's share agent",
        f"rename your volume, or write {names.SHARE_AGENT}: never",
    )


def _changed_error(field: str) -> InvalidRequest:
    return changed_later_error(field, "is not as Cardwise wrote it for the share agent")
