"""The share agent: the sidecar that the webhook adds to a pod with a share, with its mounts, settings, cpu and memory.

The contract is docs/design/0007-share-agent.md. Pure, and idempotent. Runs before the request is read for the last
time: the agent is an init container, and its position changes the keys of containers with a share.

A copied or forged agent requests no GPU, whatever its manifest says. The agent is written again later. Otherwise the
agent's former requests would be part of the pod's request in the webhook's first call, but not in the second call.

The agent's cpu and memory: the pod keeps its QoS class, and every LimitRange and quota that admitted the pod still
admits it. The agent gets an amount only if all containers that run at the same time have this amount. Ordinary init
containers are ignored, because they end before the other containers start. A HorizontalPodAutoscaler ignores them, too.
"""

import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Final, get_args

from cardwise import share
from cardwise.core.api import names, shareagent
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import DaemonScope
from cardwise.core.api.request import Container
from cardwise.core.values import quantity, wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity
from cardwise.core.values.wording import quote_text
from webhook.cluster.limitranges import COUNTED_RESOURCES, Amount, Bounds
from webhook.pods import frameworks, slots
from webhook.pods.context import AgentChoice, AgentSettings, Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.refusals import changed_later_error
from webhook.pods.resources import env_from_annotation
from webhook.templates.containers import amount_lists

# Requests of the agent in pods whose containers all request cpu or memory: enough for two scrapes a second.
_AGENT_RESOURCES: Final[Mapping[str, Amount]] = MappingProxyType(
    {"cpu": Amount.parse_amount("50m"), "memory": Amount.parse_amount("64Mi")}
)
_SHARE_AGENT_FIELD: Final = f"metadata.annotations[{names.SHARE_AGENT}]"
_AGENT_PATHS: Final = (shareagent.FOLDER, share.MOUNT)  # mount paths of the agent's volume
_COMMAND: Final = "cardwise-agent"
# Both paths are reserved, because in nearly every image they are the same folder.
_RESERVED_PATHS: Final = ("/run/cardwise", "/var/run/cardwise")
_INIT_PREFIX: Final = "init-"
_AGENT_MOUNT: Final[Json] = {"name": shareagent.VOLUME_NAME, "mountPath": shareagent.FOLDER}
_VOLUME: Final[Json] = {"name": shareagent.VOLUME_NAME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
_AMOUNT_KINDS: Final = ("requests", "limits")


def mutate_copies(pod: PodUnderReview, context: Context) -> None:
    """Remove the share agent's requests for cards and devices, including resources of other device plugins, and warn
    the author.

    Raises KubeError.
    """
    for i, container in enumerate(pod.containers):
        if not _is_own_agent(container):
            continue
        resources, translator = dict(container.spec.get("resources") or {}), context.translator
        stored_names = {
            name: translator.translate_container_name(name, amount)
            for _, amounts in amount_lists(resources)
            for name, amount in amounts.items()
        }
        removed_names = sorted(
            name for name, stored in stored_names.items() if "/" in stored and stored not in slots.INTERNAL_RESOURCES
        )
        if removed_names:
            for kind, amounts in amount_lists(resources):
                resources[kind] = {name: amount for name, amount in amounts.items() if name not in removed_names}
            pod.put_resources(i, resources)
            pod.warnings.append(
                f"{container.path}.resources: removed {wording.enumerate_first(removed_names, 3)}; the share agent "
                "requests no GPU"
            )


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Add, update or remove the share agent, after annotating the namespace's default for the frameworks' hook.

    Raises InvalidRequest.
    """
    if not pod.cards:
        _remove_agent(pod)
        return
    if pod.defaults.frameworks and names.FRAMEWORKS not in pod.annotations:
        pod.annotations = pod.annotations | {names.FRAMEWORKS: pod.defaults.frameworks}
    _refuse_reserved_mounts(pod)
    settings = context.settings.share_agent
    hook = frameworks.read_hook(pod)
    annotated_choice = _read_choice(pod)
    choice = annotated_choice or settings.choice
    needs_agent = (
        choice == "always"
        or (choice == "mps" and _may_use_mps(pod, context))
        or (bool(hook) and annotated_choice != "never")
    )
    if not needs_agent:
        _remove_agent(pod)
        _warn_no_hook(pod, hook, f"{_SHARE_AGENT_FIELD} says never")
    elif not settings.image:
        reason = "the webhook has no image for the share agent (--share-agent-image)"
        if annotated_choice == "always":
            pod.warnings.append(f"{_SHARE_AGENT_FIELD}: {reason}, so the pod gets no share agent")
        _remove_agent(pod)
        _warn_no_hook(pod, hook, reason)
    else:
        _refuse_reserved_names(pod)
        _inject_agent(pod, settings, hook, context.cluster.bounds(context.namespace))


def _may_use_mps(pod: PodUnderReview, context: Context) -> bool:
    """Whether the pod may use MPS. If not, the agent has nothing to wait for or to report."""
    if not pod.isolation.uses_mps:
        return False
    scopes = context.cluster.mps_scopes()
    if pod.request is not None and pod.request.has_whole_cards_only:
        return DaemonScope.NODE in scopes
    return pod.isolation is Isolation.MPS or bool(scopes)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Check that agent, volume and mounts are as `mutate` leaves them. Raises InvalidRequest."""
    if not pod.cards:
        return
    _refuse_reserved_mounts(pod)
    agent = next((c for c in pod.containers if _is_own_agent(c)), None)
    for container in pod.containers:
        limits = (container.spec.get("resources") or {}).get("limits") or {}
        has_reserved_name = container.spec.get("name") == shareagent.CONTAINER_NAME
        if (
            has_reserved_name
            and not _is_own_agent(container)
            and any(name.startswith(names.CLASS_PREFIX) for name in limits)
        ):
            raise _reserved_name_error(container.path)
    if agent is None:
        return
    volume: Json = next(
        (entry for entry in pod.spec.get("volumes") or () if entry.get("name") == shareagent.VOLUME_NAME),
        {},
    )
    if "emptyDir" not in volume:
        raise _changed_error(f"spec.volumes[{shareagent.VOLUME_NAME}]")
    for container in pod.containers:
        mounts = [m for m in container.spec.get("volumeMounts") or () if m.get("name") == shareagent.VOLUME_NAME]
        expected_mounts = (
            [_AGENT_MOUNT] if container.key == agent.key else _agent_mounts(container.key, pod.cards, hook=False)
        )
        if [m for m in mounts if m != frameworks.HOOK_MOUNT or container.key not in pod.cards] != expected_mounts:
            raise _changed_error(f"{container.path}.volumeMounts[{shareagent.VOLUME_NAME}]")


def _inject_agent(pod: PodUnderReview, settings: AgentSettings, hook: str | None, bounds: Bounds) -> None:
    """Add the agent and its mounts, if the namespace's LimitRanges allow it."""
    is_agent = _find_own_agents(pod)
    specs = [container.spec for container in pod.containers]
    init, app_containers = specs[: len(is_agent)], specs[len(is_agent) :]
    sharing = {key: card.whole for key, card in pod.cards.items()}
    order = _order_containers(is_agent, sharing)
    other_init = [init[i] for i in order if i is not None]
    present_agent: Json = next((c for c, is_own in zip(init, is_agent, strict=True) if is_own), {})
    # With pod-level resources the agent keeps its amounts. Those of a copied agent may be too large in this namespace.
    for kept_agent in (present_agent, {}):
        agent_container = _agent_container(
            pod.spec,
            app_containers,
            other_init,
            present_agent=kept_agent,
            settings=settings,
            bounds=bounds,
            hook=bool(hook),
        )
        arranged = [agent_container if i is None else init[i] for i in order]
        misfit_reason = _limit_range_conflict(app_containers, agent_container, arranged, bounds)
        if not misfit_reason:
            break
    if misfit_reason:
        pod.warnings.append(
            f"spec.initContainers: the share agent is not injected, because {misfit_reason}; the pod runs without it"
        )
        _remove_agent(pod)
        _warn_no_hook(pod, hook, "the pod has no share agent")
        return
    pod.arrange_init_containers(order, agent_container)
    _set_volume(pod, needed=True)
    pod.agent = f"{_INIT_PREFIX}{order.index(None)}"
    new_keys = _new_key_by_former_key(order)
    _set_mounts(pod, {new_keys.get(key, key): whole for key, whole in sharing.items()}, hook)


def _read_choice(pod: PodUnderReview) -> str | None:
    """The choice in the pod's annotation; None without one. Raises InvalidRequest."""
    text = str(pod.annotations.get(names.SHARE_AGENT) or "")
    if text and text not in get_args(AgentChoice):
        raise InvalidRequest(
            _SHARE_AGENT_FIELD,
            f"{quote_text(text)} is not a choice",
            f"write one of: {', '.join(get_args(AgentChoice))}",
        )
    return text or None


def _warn_no_hook(pod: PodUnderReview, hook: str | None, reason: str) -> None:
    """Warn about a pod that requests the hook but gets no agent, which provides the hook's files."""
    if hook:
        pod.warnings.append(f"{frameworks.FIELD}: the hook is not installed, because {reason}")


def _is_own_agent(container: Container) -> bool:
    """Whether Cardwise added the container as an agent, to this pod or to a pod that was copied."""
    spec = container.spec
    sidecar = container.key.startswith(_INIT_PREFIX) and not container.ordinary_init
    return sidecar and spec.get("name") == shareagent.CONTAINER_NAME and spec.get("command") == [_COMMAND]


def _find_own_agents(pod: PodUnderReview) -> list[bool]:
    """For each init container, whether Cardwise added it as an agent, to this pod or to a pod that was copied."""
    return [_is_own_agent(container) for container in pod.containers if container.key.startswith(_INIT_PREFIX)]


def _order_containers(is_agent: Sequence[bool], sharing_keys: Collection[str]) -> list[int | None]:
    """The new order of the init containers, by their former positions; None stands for the agent.

    The agent keeps its position, but must come before each sidecar with a share.

    is_agent: for each init container, whether it is an agent of Cardwise.
    sharing_keys: the keys of the containers with a share.
    """
    other_positions: list[int | None] = [i for i, agent in enumerate(is_agent) if not agent]
    first_sharing = next((i for i in range(len(is_agent)) if f"{_INIT_PREFIX}{i}" in sharing_keys), len(is_agent))
    agent_position = min(
        is_agent.index(True) if True in is_agent else first_sharing, first_sharing - sum(is_agent[:first_sharing])
    )
    return [*other_positions[:agent_position], None, *other_positions[agent_position:]]


def _new_key_by_former_key(order: Sequence[int | None]) -> dict[str, str]:
    """The new key of each init container, by its former key."""
    return {
        f"{_INIT_PREFIX}{former}": f"{_INIT_PREFIX}{position}"
        for position, former in enumerate(order)
        if former is not None
    }


def _agent_container(
    spec: Json,
    app_containers: Sequence[Json],
    other_init: Sequence[Json],
    *,
    present_agent: Json,
    settings: AgentSettings,
    bounds: Bounds,
    hook: bool,
) -> Json:
    """The agent's container.

    app_containers, other_init: the pod's containers and its other init containers.
    """
    running = [*(container for container in other_init if container.get("restartPolicy") == "Always"), *app_containers]
    resources = _agent_amounts(spec, present_agent, running, bounds)
    return {
        "name": shareagent.CONTAINER_NAME,
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [_COMMAND],
        "restartPolicy": "Always",
        "env": [
            env_from_annotation(shareagent.ASSIGNMENT_ENV, names.ASSIGNMENT),
            *([{"name": shareagent.HOOK_ENV, "value": "true"}] if hook else []),
        ],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},  # `resources` adds the slot
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


def _agent_mounts(key: str, sharing: Collection[str], *, hook: bool) -> list[Json]:
    if key not in sharing:
        return []
    return [{**_AGENT_MOUNT, "subPath": key, "readOnly": True}, *([dict(frameworks.HOOK_MOUNT)] if hook else [])]


def _set_volume(pod: PodUnderReview, *, needed: bool) -> None:
    """Add the agent's volume, or remove it."""
    volumes = pod.spec.get("volumes") or []
    new_volumes = [volume for volume in volumes if volume.get("name") != shareagent.VOLUME_NAME]
    if needed:
        position = next(
            (i for i, volume in enumerate(volumes) if volume.get("name") == shareagent.VOLUME_NAME), len(new_volumes)
        )
        new_volumes.insert(position, dict(_VOLUME))
    pod.spec.pop("volumes", None)
    if new_volumes:
        pod.spec["volumes"] = new_volumes


def _set_mounts(pod: PodUnderReview, sharing: Mapping[str, bool], hook: str | None) -> None:
    """Add the agent's mounts to each container with a share, and remove them from others.

    sharing: for each key of a container with a share, whether its cards are whole.
    """
    for i, container in enumerate(pod.containers):
        if container.key == pod.agent:
            continue
        own_hook = hook if sharing.get(container.key) is False else None
        changed = dict(container.spec)
        mounts = changed.get("volumeMounts") or []
        agent_mounts = _agent_mounts(container.key, sharing, hook=own_hook is not None)
        if [m for m in mounts if m.get("name") == shareagent.VOLUME_NAME] != agent_mounts:
            changed["volumeMounts"] = [*(m for m in mounts if m.get("name") != shareagent.VOLUME_NAME), *agent_mounts]
        if own_hook is not None:
            changed["env"], hook_warnings = frameworks.add_hook_to_environment(
                changed.get("env") or [], own_hook, container.path
            )
            pod.warnings += hook_warnings
        if changed != container.spec:
            pod.replace_container(i, changed)


def _remove_agent(pod: PodUnderReview) -> None:
    """Remove a copied agent, which would get no cards: the pod would stay pending."""
    is_agent = _find_own_agents(pod)
    if True not in is_agent:
        return
    pod.arrange_init_containers([i for i, agent in enumerate(is_agent) if not agent])
    _set_volume(pod, needed=False)
    for i, container in enumerate(pod.containers):
        mounts = container.spec.get("volumeMounts") or []
        other_mounts = [m for m in mounts if m.get("name") != shareagent.VOLUME_NAME]
        if other_mounts != mounts:
            pod.replace_container(i, {**container.spec, "volumeMounts": other_mounts})


def _refuse_reserved_names(pod: PodUnderReview) -> None:
    """Refuse containers and volumes of users with the agent's names. Raises InvalidRequest."""
    for container in pod.containers:
        if container.spec.get("name") == shareagent.CONTAINER_NAME and not _is_own_agent(container):
            raise _reserved_name_error(container.path)
        for i, mount in enumerate(container.spec.get("volumeMounts") or ()):
            if mount.get("name") == shareagent.VOLUME_NAME and mount.get("mountPath") not in _AGENT_PATHS:
                raise _reserved_volume_error(f"{container.path}.volumeMounts[{i}].name")
    for i, volume in enumerate(pod.spec.get("volumes") or ()):
        if volume.get("name") == shareagent.VOLUME_NAME and "emptyDir" not in volume:
            raise _reserved_volume_error(f"spec.volumes[{i}].name")


def _refuse_reserved_mounts(pod: PodUnderReview) -> None:
    """Refuse users' mounts below the agent's folder, from which programs read the share. Raises InvalidRequest."""
    for container in pod.containers:
        if container.key not in pod.cards:
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
        is_agent_mount = mount.get("name") == shareagent.VOLUME_NAME and path in _AGENT_PATHS
        if not is_agent_mount and any(
            path == reserved or path.startswith(f"{reserved}/") for reserved in _RESERVED_PATHS
        ):
            yield i, path


def _reserved_name_error(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}.name", f"{shareagent.CONTAINER_NAME} is reserved for Cardwise's share agent", "rename the container"
    )


def _reserved_volume_error(field: str) -> InvalidRequest:
    return InvalidRequest(
        field,
        f"{shareagent.VOLUME_NAME} is reserved for the volume of Cardwise's share agent",
        f"rename your volume, or write {names.SHARE_AGENT}: never",
    )


def _changed_error(field: str) -> InvalidRequest:
    return changed_later_error(field, "is not as Cardwise wrote it for the share agent")


def _agent_amounts(
    spec: Json,
    present_agent: Json,
    running_containers: Sequence[Json],
    bounds: Bounds,
) -> dict[str, dict[str, str]]:
    """The requests and limits of the agent by field.

    present_agent: the present agent; empty without one.
    running_containers: the pod's other containers and sidecars, without ordinary init containers.
    """
    if spec.get("resources"):
        # The pod has pod-level resources. Amounts of the agent then come from a LimitRange, and stay.
        existing = {kind: (present_agent.get("resources") or {}).get(kind) or {} for kind in _AMOUNT_KINDS}
        return {
            kind: {name: str(text) for name, text in existing[kind].items() if name in COUNTED_RESOURCES}
            for kind in _AMOUNT_KINDS
        }
    resources: dict[str, dict[str, str]] = {kind: {} for kind in _AMOUNT_KINDS}
    for kind in _AMOUNT_KINDS:
        for name in COUNTED_RESOURCES:
            amounts = [_read_amount(container, kind, name) for container in running_containers]
            if all(amount is not None for amount in amounts):
                # If all amounts are 0, the agent's amount is 0, too: a request above 0 would change the QoS class.
                requests_nothing = not any(amounts)
                resources[kind][name] = "0" if requests_nothing else _raise_to_minimum(name, bounds).text
    return resources


def _limit_range_conflict(
    app_containers: Sequence[Json], agent: Json, init: Sequence[Json], bounds: Bounds
) -> str | None:
    """Why a LimitRange would refuse the pod with the agent; None if none does.

    Kubernetes writes the defaults of LimitRanges into the agent after the webhook has added it, and then calls the
    webhook again. They count from the first call, so that the second call has the same result.

    app_containers: the pod's containers.
    init: the pod's init containers, including the agent.
    """
    stored_agent = _with_limit_range_defaults(agent, bounds)
    stored_init = [stored_agent if container is agent else container for container in init]
    for name, maximum in bounds.maximum.items():
        if any((_read_amount(stored_agent, kind, name) or 0) > maximum.number for kind in _AMOUNT_KINDS):
            return f"a LimitRange allows a container {maximum.text} of {name} at most"
    for name, maximum in bounds.pod_maximum.items():
        for kind in _AMOUNT_KINDS:
            agent_amount = _read_amount(stored_agent, kind, name)
            if agent_amount and _sum_amounts(app_containers, stored_init, kind, name) > maximum.number:
                return f"a LimitRange allows a pod {maximum.text} of {name} at most"
    return None


def _with_limit_range_defaults(container: Json, bounds: Bounds) -> Json:
    """The container with the defaults of LimitRanges for amounts that it does not set."""
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    default_limits = {name: amount.text for name, amount in bounds.default_limits.items()}
    # A limit that the container sets is also its request.
    default_requests = {name: amount.text for name, amount in bounds.default_requests.items() if name not in limits}
    return container | {"resources": {"limits": default_limits | limits, "requests": default_requests | requests}}


def _raise_to_minimum(name: str, bounds: Bounds) -> Amount:
    minimum, default = bounds.minimum.get(name), _AGENT_RESOURCES[name]
    return minimum if minimum is not None and minimum.number > default.number else default


def _read_amount(container: Json, kind: str, name: str) -> Fraction | None:
    """The amount; None if the container sets none. If only the limit is set, it is also the request."""
    resources = container.get("resources") or {}
    amounts = resources.get(kind) or {}
    text = amounts.get(name)
    if text is None and kind == "requests":
        text = (resources.get("limits") or {}).get(name)
    try:
        return None if text is None else quantity.parse_amount(text).number
    except InvalidQuantity:
        return None  # Kubernetes refuses the pod


def _sum_amounts(app_containers: Sequence[Json], init: Sequence[Json], kind: str, name: str) -> Fraction:
    """The pod's amount as LimitRanges count it: the larger of the sum of all containers and sidecars, and the maximum
    of each init container plus the sidecars before it.
    """
    sidecars, largest = Fraction(0), Fraction(0)
    for container in init:
        amount = _read_amount(container, kind, name) or Fraction(0)
        if container.get("restartPolicy") == "Always":
            sidecars += amount
            largest = max(largest, sidecars)
        else:
            largest = max(largest, sidecars + amount)
    running_total = sum(
        (_read_amount(container, kind, name) or Fraction(0) for container in app_containers),
        sidecars,
    )
    return max(running_total, largest)
