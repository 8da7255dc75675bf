"""Loads of pods that are being resized in place, as kube-scheduler counts them.

The load of such a pod is the larger of its current load and its requested load. A request that the node can never
fulfil does not count: otherwise a user could keep gangs off a node by resizing a running pod to a million CPUs.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from cardwise.core.api.request import Load
from cardwise.kube.pods import loads
from cardwise.kube.pods.loads import ContainerLoad, PodSpec, ResourceList, Resources

# Every pod with the condition PodResizePending or PodResizeInProgress has this text in its JSON.
_SIGN: Final = b'"PodResize'


class _NamedContainer(ContainerLoad):
    name: str = ""


class _Spec(PodSpec, rename="camel"):
    containers: Sequence[_NamedContainer] | None = None
    init_containers: Sequence[_NamedContainer] | None = None


class _ReportedResources(Struct, rename="camel"):
    """The allocated and actual resources of a container or pod, as the kubelet reports them."""

    name: str = ""
    allocated_resources: ResourceList | None = None
    resources: Resources | None = None


class _Condition(Struct):
    type: str = ""
    reason: str = ""


class _Status(_ReportedResources, rename="camel"):
    container_statuses: Sequence[_ReportedResources] | None = None
    init_container_statuses: Sequence[_ReportedResources] | None = None
    conditions: Sequence[_Condition] | None = None


class _Pod(Struct):
    spec: _Spec
    status: _Status


_decode = msgspec.json.Decoder(_Pod).decode


def load_of_resized_pod(raw: bytes, spec: PodSpec) -> Load:
    """The load of a pod, resized or not.

    raw: the pod's JSON.
    spec: the pod's decoded spec.
    """
    if _SIGN not in raw:
        return loads.load_of_pod(spec)
    pod = _decode(raw)
    conditions = pod.status.conditions or ()
    is_infeasible = any(
        condition.type == "PodResizePending" and condition.reason == "Infeasible" for condition in conditions
    )
    possible_loads = [
        _load_with(pod, _allocated_resources, is_infeasible=is_infeasible),
        _load_with(pod, _actuated_resources, is_infeasible=is_infeasible),
    ]
    if not is_infeasible:
        possible_loads.append(loads.load_of_pod(pod.spec))
    return Load(
        max(condition.cpu for condition in possible_loads), max(condition.memory for condition in possible_loads), 1
    )


def _allocated_resources(reported: _ReportedResources) -> ResourceList | None:
    return reported.allocated_resources


def _actuated_resources(reported: _ReportedResources) -> ResourceList | None:
    runs = reported.resources.requests if reported.resources is not None else None
    return reported.allocated_resources if runs is None else runs


def _load_with(
    pod: _Pod, amounts_of: Callable[[_ReportedResources], ResourceList | None], *, is_infeasible: bool
) -> Load:
    """The pod's load by the resources that the kubelet reports. Containers without a report count with their requests,
    unless the resize is infeasible.
    """
    spec, status = pod.spec, pod.status
    statuses_by_name = {
        container_status.name: container_status
        for container_status in (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
    }

    def resources_of(reported: _ReportedResources | None, spec_resources: Resources | None) -> Resources | None:
        amounts = amounts_of(reported) if reported is not None else None
        return Resources(amounts) if amounts is not None else None if is_infeasible else spec_resources

    def containers(specs: Sequence[_NamedContainer] | None) -> list[ContainerLoad]:
        return [
            ContainerLoad(
                resources_of(statuses_by_name.get(container.name), container.resources), container.restart_policy
            )
            for container in specs or ()
        ]

    pod_resources = (
        resources_of(status, spec.resources) if spec.resources is not None and status.resources is not None else None
    )
    return loads.load_of_pod(
        PodSpec(
            containers=containers(spec.containers),
            init_containers=containers(spec.init_containers),
            overhead=spec.overhead,
            resources=pod_resources or spec.resources,
        )
    )
