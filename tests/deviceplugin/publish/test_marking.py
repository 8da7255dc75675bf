"""A granted pod is marked in the background, and one that cannot be marked delays no other."""

from cardwise.core.api import names
from cardwise.kube import paths
from deviceplugin.publish.marking import Marker
from tests.deviceplugin.records import pod_view
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock


def test_a_pod_that_takes_long_to_write_delays_the_marks_of_no_others():
    clock = FakeClock()
    api = ApiServer(clock)
    marker = Marker(api.client(), clock)
    pods = [f"p{i}" for i in range(5)]
    for name in pods:
        pod = {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": {names.ASSIGNED: "false"}}}
        api.put(paths.pods(), pod)
        marker.mark(pod_view(uid=f"uid-{name}", name=name, annotations=pod["metadata"]["annotations"]))
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
