"""Names that are no known class cost the API server one list a second, whoever brings how many of them."""

from typing import Any

import pytest

from cardwise.kube import errors
from tests.fakes.clock import FakeClock
from tests.webhook.reviews import resource_class
from webhook.newclasses import NewClasses

Json = dict[str, Any]


class Client:
    """Counts the calls, and answers each with `classes` or by raising `error`."""

    def __init__(self) -> None:
        self.classes: list[Json] = []
        self.error: errors.KubeError | None = None
        self.calls = 0

    def get(self, path: str, *, timeout: float) -> Json:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return {"items": self.classes}


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def new(client: Client, clock: FakeClock) -> NewClasses:
    return NewClasses(client, clock)  # type: ignore[arg-type]


def test_any_number_of_names_costs_one_list_a_second(client: Client, clock: FakeClock, new: NewClasses) -> None:
    assert [found for i in range(5000) if (found := new.get(f"none.{i}"))] == []
    assert client.calls == 1
    client.classes = [resource_class("late")]
    clock.advance(0.9)
    assert new.get("late") is None
    clock.advance(0.2)
    found = new.get("late")
    assert found is not None
    assert found["metadata"]["name"] == "late"
    assert client.calls == 2


def test_an_api_server_that_does_not_answer_is_asked_once_a_second(
    client: Client, clock: FakeClock, new: NewClasses
) -> None:
    client.error = errors.Unreachable("silence")
    for _ in range(100):
        with pytest.raises(errors.Unreachable):
            new.get("none")
    assert client.calls == 1
    client.error = None
    clock.advance(1.1)
    assert new.get("none") is None


def test_without_their_crd_there_are_none(client: Client, new: NewClasses) -> None:
    client.error = errors.NotFound(404, "NotFound", "no such kind")
    assert new.get("none") is None
