"""Which containers and sandboxes of a node count as alive: the proof that a share is free (rule 3)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deviceplugin.api import cri_v1_pb2 as wire
from deviceplugin.sources.containers import CONTAINER_NAME_LABEL, UID_LABEL, RuntimeContainers


class Runtime(RuntimeContainers):
    """Answers with one sandbox and one container of pod u1, in these states."""

    def __init__(self, sandbox: int, container: int) -> None:
        super().__init__(Path("/none"))
        sandboxes, containers = wire.ListPodSandboxResponse(), wire.ListContainersResponse()
        sandboxes.items.add(id="s", state=sandbox, labels={UID_LABEL: "u1"})
        containers.containers.add(id="c", state=container, labels={UID_LABEL: "u1", CONTAINER_NAME_LABEL: "main"})
        self._answers = SimpleNamespace(ListPodSandbox=sandboxes, ListContainers=containers)

    def _call(self, method: str, message: Any) -> Any:
        return getattr(self._answers, method)


@pytest.mark.parametrize("state", [wire.CONTAINER_CREATED, wire.CONTAINER_RUNNING, wire.CONTAINER_UNKNOWN])
def test_a_container_counts_until_it_has_exited(state):
    assert Runtime(wire.SANDBOX_NOTREADY, state).live_containers({"u1"}) == {"u1": {"main"}}


def test_a_ready_sandbox_counts_without_containers():
    assert Runtime(wire.SANDBOX_READY, wire.CONTAINER_EXITED).live_containers({"u1"}) == {"u1": {""}}


def test_what_has_ended_and_what_is_of_others_does_not_count():
    assert Runtime(wire.SANDBOX_NOTREADY, wire.CONTAINER_EXITED).live_containers({"u1"}) == {}
    assert Runtime(wire.SANDBOX_READY, wire.CONTAINER_RUNNING).live_containers({"u2"}) == {}
