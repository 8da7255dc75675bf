"""What `helm test` says: the causes as doctor knows them."""

import math
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import event
from tests.cli.clusters import Cluster, card
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock
from tests.helm.scripts import load

check = load("check")


def plugin(desired: int) -> dict[str, Any]:
    metadata = {"namespace": names.NAMESPACE, "name": "cardwise-deviceplugin"}
    status = {"desiredNumberScheduled": desired}
    return {"metadata": metadata, "spec": {"template": {"spec": {"containers": []}}}, "status": status}


def failure_of(api: Cluster) -> str:
    with pytest.raises(LookupError) as raised:
        check.check_gpus(api.kube, names.NAMESPACE, FakeClock())
    return str(raised.value)


def test_where_no_card_is_known_it_says_which_value_is_wrong() -> None:
    nvidia = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    api = Cluster({"daemonsets": [plugin(0)], "runtimeclasses": [nvidia]})
    assert "no node has the labels of nodes.selector; set nodes.selector, or run: kubectl label" in failure_of(api)
    api.replace("daemonsets", plugin(2))
    assert "runs without NVIDIA's RuntimeClass nvidia" in failure_of(api)
    assert "with nodes.runtimeClass=nvidia" in failure_of(api)
    api.replace("runtimeclasses")
    assert "no GPU is known; check that the device plugin runs" in failure_of(api)


def test_a_device_plugin_that_crashes_is_the_cause() -> None:
    error = "cannot start: NVML does not start (NVML Shared Library Not Found)"
    crashing = {
        "name": "deviceplugin",
        "restartCount": 5,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"reason": "Error", "exitCode": 1, "message": error}},
    }
    labels = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "deviceplugin"}
    pod = {
        "metadata": {"namespace": "gpu", "name": "cardwise-deviceplugin-x", "labels": labels},
        "spec": {"nodeName": "n1", "containers": [{"name": "deviceplugin"}]},
        "status": {"phase": "Running", "containerStatuses": [crashing]},
    }
    api = Cluster({"daemonsets": [in_gpu(plugin(1))], "pods": [pod]})
    with pytest.raises(LookupError, match="NVML Shared Library Not Found") as raised:
        check.check_gpus(api.kube, "gpu", FakeClock())
    assert "nodes.runtimeClass" in str(raised.value)
    assert names.NAMESPACE not in str(raised.value)


def refusal() -> dict[str, Any]:
    now = FakeClock().wall().strftime("%Y-%m-%dT%H:%M:%SZ")
    message = 'Error creating: pods "cardwise-deviceplugin-x" is forbidden: violates PodSecurity "baseline"'
    about = "DaemonSet/cardwise-deviceplugin"
    return event("FailedCreate", message, about=about, namespace=names.NAMESPACE, at=now, type="Warning")


def test_a_device_plugin_whose_pods_are_refused_is_the_cause() -> None:
    api = Cluster({"daemonsets": [plugin(1)], "events": [refusal()]})
    assert "DaemonSet cardwise-deviceplugin cannot create pods: violates PodSecurity" in failure_of(api)


def in_gpu(workload: dict[str, Any]) -> dict[str, Any]:
    """The object in the namespace `gpu`, of the Helm release `gpushare`."""
    annotations = {"meta.helm.sh/release-name": "gpushare", "meta.helm.sh/release-namespace": "gpu"}
    return workload | {"metadata": workload["metadata"] | {"namespace": "gpu", "annotations": annotations}}


def test_without_rights_to_look_for_the_cause_it_says_that_no_card_is_known() -> None:
    api = Cluster({"daemonsets": [plugin(0)]})
    refused = Fault(status=403, message="no daemonsets for you")
    api.before_request(lambda request: api.fault(refused, "list"), "list")
    assert failure_of(api).startswith("no GPU is known")


def test_cards_that_are_there_are_counted() -> None:
    api = Cluster({"extendedresources": [card("n1", 0)]})
    assert "1 of 1 healthy" in check.check_gpus(api.kube, names.NAMESPACE)


def test_a_device_plugin_that_has_just_been_installed_is_waited_for() -> None:
    """`helm install --wait` of Helm 3 may end before the only device plugin has started."""
    api, clock = Cluster({"daemonsets": [plugin(1)]}), FakeClock()
    looks: list[float] = []

    def start(_: object) -> None:
        looks.append(clock.now())
        if len(looks) == 20:
            api.add("extendedresources", card("n1", 0))

    api.before_request(start, "list", paths.extendedresources(), times=math.inf)
    assert check.check_gpus(api.kube, names.NAMESPACE, clock) == "1 of 1 healthy"
    api.replace("extendedresources")
    before = clock.now()
    with pytest.raises(LookupError, match="no GPU is known"):
        check.check_gpus(api.kube, names.NAMESPACE, clock)
    assert clock.now() - before == check.REPORT_TIMEOUT_SECONDS


def test_a_cause_that_is_known_is_not_waited_for(clock: FakeClock) -> None:
    before = clock.now()
    api = Cluster({"daemonsets": [plugin(1)], "events": [refusal()]})
    with pytest.raises(LookupError, match="violates PodSecurity"):
        check.check_gpus(api.kube, names.NAMESPACE, clock)
    assert clock.now() == before
