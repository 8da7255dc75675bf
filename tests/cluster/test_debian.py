"""tests.cluster.debian, with an apt-get that says what is told to it."""

import pytest

from tests.cluster import debian
from tests.cluster.processes import CommandFailed

# Each call takes the first line of `says`, if there is one, and fails with it.
APT_GET = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
read -r said < says || exit 0
sed -i 1d says
echo "$said" >&2
exit 100
"""
TAKEN = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)\n"


@pytest.fixture
def apt(tmp_path, monkeypatch):
    (tmp_path / "apt-get").write_text(APT_GET)
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "says").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_another_one_is_waited_for(apt):
    (apt / "says").write_text(TAKEN * 2)
    debian.install(lambda: ["runc"], print)
    assert (apt / "calls").read_text().splitlines() == [*["-qq update"] * 3, "-qq install -y runc"]


def test_what_another_process_installed_meanwhile_is_not_installed_again(apt):
    looks = iter([["runc"], []])
    debian.install(lambda: next(looks), print)
    assert not (apt / "calls").exists()


def test_lists_that_are_old_are_renewed_for_a_download(apt):
    (apt / "says").write_text("E: Unable to locate package prometheus\n")
    debian.download("prometheus", apt, print)
    assert (apt / "calls").read_text().splitlines() == [
        "-qq download prometheus",
        "-qq update",
        "-qq download prometheus",
    ]


def test_another_failure_is_told(apt):
    (apt / "says").write_text("E: no space left\n")
    with pytest.raises(CommandFailed, match="apt-get -qq update failed: E: no space left"):
        debian.install(lambda: ["runc"], print)
