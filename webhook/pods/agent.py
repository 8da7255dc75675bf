"""Adds the share agent to a pod that needs it, with its mounts and settings.

The contract is docs/design/0007-share-agent.md. Pure, and a fixed point. Runs before the request is read for the last
time: the agent is an init container, and its position changes the keys of containers with a share.
"""

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from cardwise import share
from cardwise.core.api import names, request, shareagent
from cardwise.core.api.mps import Mode
from cardwise.core.api.request import Container, PodRequest
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.cluster.limitranges import Amount, Bounds
from webhook.pods import agentresources, environment, frameworks, mpsmode
from webhook.pods.order import changed_later_error
from webhook.templates import containers

AgentChoice = Literal["always", "mps", "never"]

USER: Final = 65532
# Requests of the agent in pods whose containers all request cpu or memory: enough for two scrapes a second.
RESOURCES: Final[Mapping[str, Amount]] = MappingProxyType(
    {"cpu": Amount.parse_amount("50m"), "memory": Amount.parse_amount("64Mi")}
)
_FIELD: Final = f"metadata.annotations[{names.SHARE_AGENT}]"
_AGENT_PATHS: Final = (shareagent.FOLDER, share.MOUNT)  # mount paths of the agent's volume
_COMMAND: Final = "cardwise-agent"
# Both paths are reserved, because in nearly every image they are the same folder.
_RESERVED_PATHS: Final = ("/run/cardwise", "/var/run/cardwise")
_INIT_PREFIX: Final = "init-"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the share agent.

    image: the image of the agent; "" if pods get no agent.
    user: the user ID of the agent; 0 to set none, for clusters that assign a range of user IDs to each namespace.
    """

    choice: AgentChoice = "mps"
    image: str = ""
    user: int = USER


@dataclass(frozen=True, slots=True)
class Injection:
    """The rewritten pod; the caller's object if nothing changes. `key`: the key of the agent; "" without an agent."""

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
    _refuse_reserved_mounts(pod, pod_request)
    mode, hook = mpsmode.mode_of(pod), frameworks.read_hook(pod, pod_request)
    annotated_choice = _read_choice(pod)
    choice = annotated_choice or settings.choice
    # Without MPS on any node, the agent has nothing to wait for or to report.
    needs_mps = choice == "mps" and (mode is Mode.REQUIRED or (mode.uses_mps and bool(scopes())))
    needs_agent = choice == "always" or needs_mps or (bool(hook) and annotated_choice != "never")
    if not needs_agent:
        return Injection(_remove_agent(pod), warnings=_warn_no_hook(hook, f"{_FIELD} says never"))
    if not settings.image:
        reason = "the webhook has no image for the share agent (--share-agent-image)"
        warnings = (f"{_FIELD}: {reason}, so the pod gets no share agent",) if annotated_choice == "always" else ()
        return Injection(_remove_agent(pod), warnings=warnings + _warn_no_hook(hook, reason))
    _refuse_reserved_names(pod)
    spec = pod.get("spec") or {}
    init, order = spec.get("initContainers") or [], _order_containers(spec.get("initContainers") or [], pod_request)
    other_init = [init[i] for i in order if i is not None]
    present_agent: Json = next((c for c, is_own in zip(init, _find_own_agents(init), strict=True) if is_own), {})
    limit_range_bounds = bounds()
    agent_container = _agent_container(spec, present_agent, other_init, settings, limit_range_bounds, hook=bool(hook))
    misfit_reason = agentresources.misfit_reason(
        spec, agent_container, [agent_container if i is None else init[i] for i in order], limit_range_bounds
    )
    if misfit_reason:
        warnings = (
            f"spec.initContainers: the share agent is not injected, because {misfit_reason}; the pod runs without it",
        )
        return Injection(_remove_agent(pod), warnings=warnings + _warn_no_hook(hook, "the pod has no share agent"))
    return _add_mounts(
        _move_containers(pod, order, agent_container),
        pod_request,
        _map_keys(order),
        hook,
        f"{_INIT_PREFIX}{order.index(None)}",
    )


def check_agent(pod: Json, pod_request: PodRequest) -> None:
    """Check that agent, volume and mounts are as `inject_agent` leaves them. Raises InvalidRequest."""
    if not pod_request.containers:
        return
    _refuse_reserved_mounts(pod, pod_request)
    spec = pod.get("spec") or {}
    agent = next((c for c in request.containers(pod) if _is_own_agent(c)), None)
    for container in request.containers(pod):
        limits = (container.spec.get("resources") or {}).get("limits") or {}
        has_reserved_name = container.spec.get("name") == shareagent.CONTAINER
        if (
            has_reserved_name
            and not _is_own_agent(container)
            and any(name.startswith(names.CLASS_PREFIX) for name in limits)
        ):
            raise _reserved_name_error(container.path)
    if agent is None:
        return
    volume: Json = next(
        (volume_entry for volume_entry in spec.get("volumes") or () if volume_entry.get("name") == shareagent.VOLUME),
        {},
    )
    if "emptyDir" not in volume:
        raise _changed_error(f"spec.volumes[{shareagent.VOLUME}]")
    sharing_keys = {container.key for container in pod_request.containers}
    for container in request.containers(pod):
        mounts = [m for m in container.spec.get("volumeMounts") or () if m.get("name") == shareagent.VOLUME]
        expected_mounts = (
            [_AGENT_MOUNT] if container.key == agent.key else _agent_mounts(container.key, sharing_keys, hook=False)
        )
        if [m for m in mounts if m != frameworks.MOUNT or container.key not in sharing_keys] != expected_mounts:
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
    sidecar = container.key.startswith(_INIT_PREFIX) and not container.ordinary_init
    return sidecar and spec.get("name") == shareagent.CONTAINER and spec.get("command") == [_COMMAND]


def _find_own_agents(init: Sequence[Json]) -> list[bool]:
    """For each init container, whether Cardwise added it as an agent, to this pod or to a pod that was copied."""
    return [_is_own_agent(container) for container in request.containers({"spec": {"initContainers": init}})]


def _order_containers(init: Sequence[Json], pod_request: PodRequest) -> list[int | None]:
    """The new order of the init containers, by their former positions; None stands for the agent.

    The agent keeps its position, but must come before each sidecar with a share.
    """
    is_agent = _find_own_agents(init)
    other_positions: list[int | None] = [i for i, agent in enumerate(is_agent) if not agent]
    sharing_keys = {container.key for container in pod_request.containers}
    first_sharing = next((i for i in range(len(init)) if f"{_INIT_PREFIX}{i}" in sharing_keys), len(init))
    agent_position = min(
        is_agent.index(True) if True in is_agent else first_sharing, first_sharing - sum(is_agent[:first_sharing])
    )
    return [*other_positions[:agent_position], None, *other_positions[agent_position:]]


def _map_keys(order: Sequence[int | None]) -> dict[str, str]:
    """The new key of each init container, by its former key."""
    return {
        f"{_INIT_PREFIX}{former}": f"{_INIT_PREFIX}{position}"
        for position, former in enumerate(order)
        if former is not None
    }


def _agent_container(
    spec: Json, present_agent: Json, other_init: Sequence[Json], settings: AgentSettings, bounds: Bounds, *, hook: bool
) -> Json:
    """The agent's container. `other_init`: the pod's other init containers."""
    app_containers = spec.get("containers") or ()
    other_containers = [*other_init, *app_containers]
    running = [*(container for container in other_init if container.get("restartPolicy") == "Always"), *app_containers]
    port_used = any(
        port.get("containerPort") == shareagent.METRICS_PORT
        for container in other_containers
        for port in container.get("ports") or ()
    )
    port = 0 if spec.get("hostNetwork") or port_used else shareagent.METRICS_PORT
    resources = agentresources.agent_resources(spec, present_agent, running, RESOURCES, bounds)
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
        "volumeMounts": [dict(_AGENT_MOUNT)],
        "startupProbe": {
            "exec": {"command": [_COMMAND, "--probe"]},
            "periodSeconds": 1,
            "timeoutSeconds": 30,  # the probe runs for at most five seconds, but a busy node may start it late
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


_AGENT_MOUNT: Final[Json] = {"name": shareagent.VOLUME, "mountPath": shareagent.FOLDER}
_VOLUME: Final[Json] = {"name": shareagent.VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}


def _agent_mounts(key: str, sharing: set[str], *, hook: bool) -> list[Json]:
    if key not in sharing:
        return []
    return [{**_AGENT_MOUNT, "subPath": key, "readOnly": True}, *([dict(frameworks.MOUNT)] if hook else [])]


def _move_containers(pod: Json, order: Sequence[int | None], agent: Json | None) -> Json:
    """The pod with its init containers in this order, `agent` for None, and the agent's volume."""
    spec = pod.get("spec") or {}
    former_init, volumes = spec.get("initContainers") or [], spec.get("volumes") or []
    init = [agent if i is None else former_init[i] for i in order]
    new_volumes = [volume for volume in volumes if volume.get("name") != shareagent.VOLUME]
    if agent is not None:
        volume_position = next(
            (i for i, volume in enumerate(volumes) if volume.get("name") == shareagent.VOLUME), len(new_volumes)
        )
        new_volumes.insert(volume_position, dict(_VOLUME))
    lists = {"initContainers": init, "volumes": new_volumes}
    other_fields = {name: content for name, content in spec.items() if name not in lists}
    return pod | {"spec": other_fields | {name: entries for name, entries in lists.items() if entries}}


def _add_mounts(pod: Json, pod_request: PodRequest, new_keys: Mapping[str, str], hook: str, agent: str) -> Injection:
    """Add the agent's mounts to each container with a share, and remove them from others."""
    spec = dict(pod["spec"])
    warnings: list[str] = []
    sharing = {new_keys.get(container.key, container.key): container.whole for container in pod_request.containers}
    for container in request.containers(pod):
        if container.key == agent:
            continue
        gets_hook = bool(hook) and sharing.get(container.key) is False
        changed = dict(container.spec)
        mounts = changed.get("volumeMounts") or []
        agent_mounts = _agent_mounts(container.key, set(sharing), hook=gets_hook)
        if [m for m in mounts if m.get("name") == shareagent.VOLUME] != agent_mounts:
            changed["volumeMounts"] = [*(m for m in mounts if m.get("name") != shareagent.VOLUME), *agent_mounts]
        if gets_hook:
            changed["env"], hook_warnings = frameworks.environment(changed.get("env") or [], hook, container.path)
            warnings += hook_warnings
        if changed != container.spec:
            containers.put_container(spec, container, changed)
    return Injection(pod | {"spec": spec}, agent, tuple(warnings))


def _remove_agent(pod: Json) -> Json:
    """The pod without a copied agent, which would get no cards: the pod would stay pending."""
    spec = pod.get("spec") or {}
    init = spec.get("initContainers") or []
    is_agent = _find_own_agents(init)
    if True not in is_agent:
        return pod
    without_agent = _move_containers(pod, [i for i, agent in enumerate(is_agent) if not agent], None)
    spec_after = dict(without_agent["spec"])
    for container in request.containers(without_agent):
        mounts = container.spec.get("volumeMounts") or []
        other_mounts = [m for m in mounts if m.get("name") != shareagent.VOLUME]
        if other_mounts != mounts:
            containers.put_container(spec_after, container, {**container.spec, "volumeMounts": other_mounts})
    return without_agent | {"spec": spec_after}


def _refuse_reserved_names(pod: Json) -> None:
    """Refuse containers and volumes of users with the agent's names. Raises InvalidRequest."""
    for container in request.containers(pod):
        if container.spec.get("name") == shareagent.CONTAINER and not _is_own_agent(container):
            raise _reserved_name_error(container.path)
        for i, mount in enumerate(container.spec.get("volumeMounts") or ()):
            if mount.get("name") == shareagent.VOLUME and mount.get("mountPath") not in _AGENT_PATHS:
                raise _reserved_volume_error(f"{container.path}.volumeMounts[{i}].name")
    for i, volume in enumerate((pod.get("spec") or {}).get("volumes") or ()):
        if volume.get("name") == shareagent.VOLUME and "emptyDir" not in volume:
            raise _reserved_volume_error(f"spec.volumes[{i}].name")


def _refuse_reserved_mounts(pod: Json, pod_request: PodRequest) -> None:
    """Refuse users' mounts below the agent's folder, from which programs read the share. Raises InvalidRequest."""
    sharing_keys = {container.key for container in pod_request.containers}
    for container in request.containers(pod):
        if container.key not in sharing_keys:
            continue
        for i, path in _find_foreign_mounts(container.spec.get("volumeMounts") or ()):
            raise InvalidRequest(
                f"{container.path}.volumeMounts[{i}].mountPath",
                f"{path} is reserved for Cardwise's files about the container's share",
                "choose another mountPath",
            )


def _find_foreign_mounts(mounts: Sequence[Json]) -> Iterator[tuple[int, str]]:
    """Yield the index and path of each mount of a user that hides one of the agent's paths."""
    for i, mount in enumerate(mounts):
        path = posixpath.normpath("/" + str(mount.get("mountPath") or "").lstrip("/"))
        is_agent_mount = mount.get("name") == shareagent.VOLUME and path in _AGENT_PATHS
        if not is_agent_mount and any(
            path == reserved or path.startswith(f"{reserved}/") for reserved in _RESERVED_PATHS
        ):
            yield i, path


def _reserved_name_error(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}.name", f"{shareagent.CONTAINER} is reserved for Cardwise's share agent", "rename the container"
    )


def _reserved_volume_error(field: str) -> InvalidRequest:
    return InvalidRequest(
        field,
        f"{shareagent.VOLUME} is reserved for the volume of Cardwise's share agent",
        f"rename your volume, or write {names.SHARE_AGENT}: never",
    )


def _changed_error(field: str) -> InvalidRequest:
    return changed_later_error(field, "is not as Cardwise wrote it for the share agent")
