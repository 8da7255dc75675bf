"""After a pod is fenced, no Binding that was posted for it before binds it."""

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from extender.leadership.fence import Fence, PodState
from extender.records.podref import PodRef
from tests.build import asking, binding
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.theory import theory_of


@pytest.fixture
def api() -> ApiServer:
    """An API server with a pending pod p."""
    server = ApiServer(FakeClock())
    server.write_object(paths.pods(), asking("p", gpu_mem=100))
    return server


def version(api: ApiServer) -> int:
    return int(api.get(paths.pods("default", "p"))["metadata"]["resourceVersion"])


def post_binding(api: ApiServer, resource_version: int) -> None:
    body = binding(resourceVersion=str(resource_version), annotations={names.ASSIGNMENT: "{}"})
    api.client().create(paths.pods("default", "p", "binding"), body)


def fence(api: ApiServer) -> PodState:
    return Fence(api.client(), api.clock).fence_pod(PodRef("uid-p", "default", "p"), "ns/lease/uid/2/b")


def test_the_example_of_the_docstring(api):
    theory = theory_of("extender.leadership.fence")
    posted = version(api)
    assert f"leader A reads pod P at version {posted} and posts a Binding with version {posted}" in theory
    state = fence(api)
    assert f"B becomes leader and fences P: version {version(api)}, without a node" in theory
    assert state is PodState.UNBOUND
    with pytest.raises(errors.Conflict) as refused:
        post_binding(api, posted)
    assert f"it refuses A's Binding with {refused.value.status}, since P is not at version {posted}" in theory
    assert not api.get(paths.pods("default", "p"))["spec"].get("nodeName")


def test_the_example_where_the_binding_comes_first(api):
    theory = theory_of("extender.leadership.fence")
    post_binding(api, version(api))
    assert f"P would be at version {version(api)} with a node, and B's fence would have found it bound" in theory
    assert fence(api) is PodState.BOUND
