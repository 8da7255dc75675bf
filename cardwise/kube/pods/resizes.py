"""Loads of pods that are being resized in place, as kube-scheduler counts them.

The load of such a pod is the larger of its current load and its requested load. A request that the node can never
fulfil does not count: otherwise a user could keep gangs off a node by resizing a running pod to a million CPUs.
"""

from collections.abc import Callable, Iterable, Mapping

from cardwise.core.api.request import Load
from cardwise.kube.objects.pods import Amounts, Container, ContainerStatus, Pod, PodSpec, PodStatus, Resources
from cardwise.kube.pods import loads

_AmountsOf = Callable[[ContainerStatus | PodStatus], Amounts | None]


def load_of_pod(pod: Pod) -> Load:
    """The load of a pod, resized or not."""
    resizes = {
        condition.type: condition.reason
        for condition in pod.status.conditions or ()
        if condition.type in ("PodResizePending", "PodResizeInProgress")
    }
    if not resizes:
        return loads.load_of_pod(pod.spec)
    is_infeasible = resizes.get("PodResizePending") == "Infeasible"
    possible_loads = [
        _load_with(pod, _allocated_resources, is_infeasible=is_infeasible),
        _load_with(pod, _actuated_resources, is_infeasible=is_infeasible),
    ]
    if not is_infeasible:
        possible_loads.append(loads.load_of_pod(pod.spec))
    return Load(max(load.cpu for load in possible_loads), max(load.memory for load in possible_loads), 1)


def _allocated_resources(reported: ContainerStatus | PodStatus) -> Amounts | None:
    return reported.allocated_resources


def _actuated_resources(reported: ContainerStatus | PodStatus) -> Amounts | None:
    actual = reported.resources.requests if reported.resources is not None else None
    return reported.allocated_resources if actual is None else actual


def _load_with(pod: Pod, amounts_of: _AmountsOf, *, is_infeasible: bool) -> Load:
    """The pod's load by the resources that the kubelet reports. Containers without a report count with their requests,
    unless the resize is infeasible.
    """
    spec, status = pod.spec, pod.status
    statuses_by_name: Mapping[str, ContainerStatus] = {
        container_status.name: container_status for container_status in status.all_containers()
    }

    def resources_of(
        reported: ContainerStatus | PodStatus | None, spec_resources: Resources | None
    ) -> Resources | None:
        amounts = amounts_of(reported) if reported is not None else None
        return Resources(requests=amounts) if amounts is not None else None if is_infeasible else spec_resources

    def resized_containers(specs: Iterable[Container] | None) -> tuple[Container, ...]:
        return tuple(
            Container(
                resources=resources_of(statuses_by_name.get(container.name), container.resources),
                restart_policy=container.restart_policy,
            )
            for container in specs or ()
        )

    pod_resources = (
        resources_of(status, spec.resources) if spec.resources is not None and status.resources is not None else None
    )
    return loads.load_of_pod(
        PodSpec(
            containers=resized_containers(spec.containers),
            init_containers=resized_containers(spec.init_containers),
            overhead=spec.overhead,
            resources=pod_resources or spec.resources,
        )
    )
