"""Which extender's pod a Service finds."""

from typing import Any

import pytest

from cardwise.core import names
from cardwise.kube import errors
from extender.marking import LeaderMark
from tests.fakes.clock import FakeClock


class Api:
    """Keeps the labels of one pod."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {"app": "x", names.LEADER: "true"}  # of a process that was killed
        self.writes = 0
        self.away = False

    def patch(self, path: str, change: dict[str, Any], kind: str) -> None:
        assert (path, kind) == ("/api/v1/namespaces/system/pods/extender-1", "merge")
        if self.away:
            raise errors.Unreachable("away")
        self.writes += 1
        for key, value in change["metadata"]["labels"].items():
            self.labels.pop(key, None) if value is None else self.labels.update({key: value})

    @property
    def marked(self) -> bool:
        assert self.labels["app"] == "x"
        return self.labels.get(names.LEADER) == "true"


@pytest.fixture
def api() -> Api:
    return Api()


def mark(api: Api, leads: list[bool]) -> LeaderMark:
    return LeaderMark(api, "system", "extender-1", lambda: leads[-1])  # type: ignore[arg-type]


def test_the_label_follows_the_lease_and_is_written_once(api: Api) -> None:
    leads = [False]
    one = mark(api, leads)
    assert one.step()
    assert not api.marked, "a label of before a crash goes"
    leads.append(True)
    assert one.step()
    assert one.step()
    assert api.marked
    leads.append(False)
    one.step()
    assert not api.marked
    assert api.writes == 3


def test_what_could_not_be_written_is_written_later(api: Api) -> None:
    leads = [True]
    one = mark(api, leads)
    api.away = True
    assert not one.step()
    api.away = False
    assert one.step()
    assert api.marked
    assert api.writes == 1


def test_who_stops_is_found_no_more(api: Api) -> None:
    leads = [True]
    clock = FakeClock()
    one = LeaderMark(api, "system", "extender-1", lambda: leads[-1], clock)  # type: ignore[arg-type]
    one.start()
    clock.step()
    clock.until_waiting()
    assert api.marked
    assert api.writes == 1
    one.stop()
    assert not api.marked
