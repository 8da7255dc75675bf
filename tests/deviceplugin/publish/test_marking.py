"""A granted pod is marked in the background, and one that cannot be marked delays no other."""

from cardwise.core.api import names
from cardwise.kube import paths
from deviceplugin.publish.marking import PodMarker
from tests.deviceplugin.records import pod_view
from tests.fakes.apiserver import Fault


def test_a_pod_that_takes_long_to_write_delays_the_marks_of_no_others(clock, api):
    marker = PodMarker(api.client(), clock)
    pods = [f"p{i}" for i in range(5)]
    for name in pods:
        pod = {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": {names.ASSIGNED: "false"}}}
        api.write_object(paths.pods(), pod)
        marker.queue_mark(pod_view(uid=f"uid-{name}", name=name, annotations=pod["metadata"]["annotations"]))
    slow = api.fault(Fault(seconds=60.0), path=paths.pods("default", "p0"), times=1_000_000)

    def marked(name):
        return api.get(paths.pods("default", name))["metadata"]["annotations"][names.ASSIGNED] == "true"

    began = clock.now()
    marker.start()
    clock.step_until(lambda: all(marked(name) for name in pods[1:]))
    assert clock.now() - began <= 5.0
    slow.end()
    clock.step()
    clock.until_waiting()
    assert marked("p0"), "it is tried again"
    marker.stop()


def test_a_pod_of_which_each_write_fails_delays_the_marks_of_no_others(clock, api):
    """A webhook that fails on one pod is a 500 of the API server: all marks paused for up to 5 s each time."""
    marker = PodMarker(api.client(), clock)
    api.fault(Fault(status=500), path=paths.pods("default", "p0"), times=1_000_000)
    for name in [f"p{i}" for i in range(20)]:
        pod = {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": {names.ASSIGNED: "false"}}}
        api.write_object(paths.pods(), pod)
        marker.queue_mark(pod_view(uid=f"uid-{name}", name=name, annotations=pod["metadata"]["annotations"]))
    for _ in range(20):
        assert marker._loop.run_once() is None
    marked = [pod["metadata"]["annotations"][names.ASSIGNED] for pod in api.all(paths.pods())]
    assert sorted(marked) == ["false", *["true"] * 19]
    assert marker._loop.run_once() is not None, "it alone is left: now it pauses"


def test_while_the_api_server_fails_the_marks_pause(clock, api):
    marker = PodMarker(api.client(), clock)
    api.fault(Fault(status=500), times=1_000_000)
    for name in [f"p{i}" for i in range(20)]:
        marker.queue_mark(pod_view(uid=f"uid-{name}", name=name, annotations={names.ASSIGNED: "false"}))
    assert [marker._loop.run_once() is None for _ in range(6)] == [True, True, False] * 2
