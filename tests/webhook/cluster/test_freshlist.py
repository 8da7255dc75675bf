"""Names that are no known class cost the API server one list a second, whoever brings how many of them."""

import math

import pytest

from cardwise.kube import errors, paths
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock
from tests.webhook.reviews import resource_class
from webhook.cluster.freshlist import FreshList


@pytest.fixture
def new(api: ApiServer, clock: FakeClock) -> FreshList:
    return FreshList(api.client(clock=clock), paths.resourceclasses(), clock)


def test_any_number_of_names_costs_one_list_a_second(api: ApiServer, clock: FakeClock, new: FreshList) -> None:
    assert [found for i in range(5000) if (found := new.get(f"none.{i}"))] == []
    assert [request.verb for request in api.sent()] == ["list"]
    api.put(paths.resourceclasses(), resource_class("late"))
    clock.advance(0.9)
    assert new.get("late") is None
    clock.advance(0.2)
    found = new.get("late")
    assert found is not None
    assert found["metadata"]["name"] == "late"
    assert len(api.sent()) == 2


def test_an_api_server_that_does_not_answer_is_asked_once_a_second(
    api: ApiServer, clock: FakeClock, new: FreshList
) -> None:
    silence = api.fault(Fault(seconds=math.inf), "list", times=math.inf)
    for _ in range(100):
        with pytest.raises(errors.Unreachable):
            new.get("none")
    assert len(api.sent()) == 1
    silence.end()
    clock.advance(1.1)
    assert new.get("none") is None


def test_without_their_crd_there_are_none(api: ApiServer, new: FreshList) -> None:
    api.missing.add(paths.resourceclasses())
    assert new.get("none") is None
