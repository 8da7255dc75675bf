"""What we make of answers that the contract tests cannot bring about."""

import pytest

from mps.host.control import Client, Control, ControlProgram, NoDaemon

SECONDS = 60.0


@pytest.fixture
def program(tmp_path):
    """A front end that says this."""

    def says(script: str) -> ControlProgram:
        path = tmp_path / "control"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return ControlProgram(path, {"PATH": "/usr/bin:/bin"})

    return says


def test_a_daemon_that_is_going_down_is_none(program):
    front = program("echo Cannot send command to MPS control daemon process >&2; exit 1")
    with pytest.raises(NoDaemon, match="Cannot send command"):
        front.send("get_server_list", SECONDS)


def test_clients_of_another_pid_namespace_are_nobody(program):
    """Without hostPID a client has the number 0, and terminate_client of it would mean nothing."""
    assert Control(program("printf '0\\n4711\\n0\\n'"), SECONDS).clients(7) == [Client(7, 4711)]
