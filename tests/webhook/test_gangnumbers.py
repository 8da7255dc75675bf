"""What the living members of a gang say of its number, by the API server."""

import json
from typing import Any

import pytest

from cardwise.core import names
from cardwise.kube import errors, paths
from tests.fakes.clock import FakeClock
from webhook.gangnumbers import GangNumbers

Json = dict[str, Any]


class Client:
    """Answers with `pods`; None: it does not answer."""

    def __init__(self, *pods: Json) -> None:
        self.pods: list[Json] | None = list(pods)
        self.asked: list[tuple[str, Json]] = []

    def request(self, method: str, path: str, *, query: Json, timeout: float) -> bytes:
        self.asked.append((path, query))
        if self.pods is None:
            raise errors.Unreachable("away")
        return json.dumps({"metadata": {}, "items": self.pods}).encode()


def member(name: str, number: str | None, **metadata: Any) -> Json:
    annotations = {names.GROUP_NAME: "slurp"} | ({} if number is None else {names.GROUP_NUM: number})
    return {"metadata": {"name": name, "annotations": annotations} | metadata, "spec": {"containers": []}}


def numbers(client: Client, clock: FakeClock | None = None) -> GangNumbers:
    return GangNumbers(client, clock or FakeClock())  # type: ignore[arg-type]


def test_a_member_that_says_another_number_is_found_among_those_of_the_gang() -> None:
    client = Client(member("a", "3"), member("b", "4"))
    assert numbers(client).other("default", "slurp", 3) == ("b", 4)
    ((path, query),) = client.asked
    assert path == paths.pods("default")
    assert query["labelSelector"] == f"{names.GANG}=slurp"
    assert "Failed" in query["fieldSelector"]


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [member("a", "3")],
        [member("a", None)],
        [member("a", "4", deletionTimestamp="2026-11-21T12:00:00Z")],
        [member("a", "many")],
        [{"metadata": {"name": "a"}}],
    ],
    ids=["none", "agrees", "says none", "goes", "nonsense", "bare"],
)
def test_nobody_says_another_number(pods: list[Json]) -> None:
    assert numbers(Client(*pods)).other("default", "slurp", 3) is None


def test_an_api_server_that_does_not_answer_holds_nobody_up() -> None:
    client = Client()
    client.pods = None
    assert numbers(client).other("default", "slurp", 3) is None


def test_a_gang_of_hundreds_is_looked_up_once_in_a_while() -> None:
    client, clock = Client(member("a", "3")), FakeClock()
    seen = numbers(client, clock)
    assert [seen.other("default", "slurp", 3) for _ in range(100)] == [None] * 100
    assert len(client.asked) == 1
    assert seen.other("default", "slurp", 4) == ("a", 3), "another number is always compared"
    assert seen.other("team", "slurp", 3) is None
    assert len(client.asked) == 3
    clock.advance(11)
    client.pods = [member("a", "5")]
    assert seen.other("default", "slurp", 3) == ("a", 5)


def test_the_first_of_a_gang_says_nothing_of_those_that_follow() -> None:
    client = Client()
    seen = numbers(client)
    assert seen.other("default", "slurp", 3) is None
    client.pods = [member("a", "4")]
    assert seen.other("default", "slurp", 3) == ("a", 4)
