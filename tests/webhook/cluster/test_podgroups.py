"""Whether PodGroups of Kubernetes are served: as the API server's list of the group's resources says."""

import math

import pytest

from cardwise.kube import errors
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock
from webhook.cluster.podgroups import PATH, PodGroups


@pytest.fixture
def groups(api: ApiServer, clock: FakeClock) -> PodGroups:
    return PodGroups(api.client(clock=clock), clock)


@pytest.mark.parametrize(
    ("resources", "served"), [([{"name": "podgroups"}, {"name": "workloads"}], True), ([{"name": "workloads"}], False)]
)
def test_it_is_asked_once_in_a_while(
    api: ApiServer, clock: FakeClock, groups: PodGroups, resources: list[dict[str, str]], served: bool
) -> None:
    api.answers[PATH] = {"resources": resources}
    assert [groups.served() for _ in range(5)] == [served] * 5
    assert len(api.sent()) == 1
    api.answers[PATH] = {"resources": []}
    clock.advance(31)
    assert not groups.served()


def test_without_the_api_there_are_none(api: ApiServer, groups: PodGroups) -> None:
    assert not groups.served()
    assert not groups.served()
    assert len(api.sent()) == 1


def test_an_api_server_that_does_not_answer_has_said_nothing(api: ApiServer, groups: PodGroups) -> None:
    silence = api.fault(Fault(status=500), times=math.inf)
    with pytest.raises(errors.KubeError):
        groups.served()
    silence.end()
    assert not groups.served()
