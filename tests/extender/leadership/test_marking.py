"""Which extender's pod a Service finds."""

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from extender.leadership.marking import LeaderMark
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

POD = paths.pods("system", "extender-1")


class Scene:
    """One extender's pod, which still has the label of a process that was killed; `leads` may be changed."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        labels = {"app": "x", names.LEADER: "true"}
        self.api.put(paths.pods(), {"metadata": {"name": "extender-1", "namespace": "system", "labels": labels}})
        self.leads = False
        self.mark = LeaderMark(self.api.client(), "system", "extender-1", lambda: self.leads, self.clock)

    @property
    def marked(self) -> bool:
        labels = self.api.get(POD)["metadata"]["labels"]
        assert labels["app"] == "x"
        return labels.get(names.LEADER) == "true"


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_label_follows_the_lease_and_is_written_once(scene: Scene) -> None:
    scene.mark.step()
    assert not scene.marked, "a label of before a crash goes"
    scene.leads = True
    scene.mark.step()
    scene.mark.step()
    assert scene.marked
    scene.leads = False
    scene.mark.step()
    assert not scene.marked
    assert len(scene.api.requests) == 3


def test_what_could_not_be_written_is_written_later(scene: Scene) -> None:
    scene.leads = True
    scene.api.down = True
    with pytest.raises(errors.KubeError):
        scene.mark.step()
    scene.api.down = False
    scene.mark.step()
    assert scene.marked
    assert len(scene.api.requests) == 1


def test_who_stops_is_found_no_more(scene: Scene) -> None:
    scene.leads = True
    scene.api.edit(POD, metadata={"labels": {names.LEADER: None}})
    scene.mark.start()
    scene.clock.step()
    scene.clock.until_waiting()
    assert scene.marked
    scene.mark.stop()
    assert not scene.marked
