"""Which Kubernetes, containerd and CRI-O the tests run on, and the Go module that a version gets."""

import json
from pathlib import Path

import pytest

from tests.cluster import versions

UPSTREAM = {
    "Go": "1.26.0",
    "GoDebug": [{"Key": "default", "Value": "go1.26"}],
    "Require": [
        {"Path": "go.etcd.io/etcd/client/v3", "Version": "v3.7.0"},
        {"Path": "k8s.io/api", "Version": "v0.0.0"},
    ],
    "Replace": [
        {"Old": {"Path": "k8s.io/api"}, "New": {"Path": "./staging/src/k8s.io/api"}},
        {"Old": {"Path": "example.com/fork"}, "New": {"Path": "example.com/other", "Version": "v1.0.0"}},
    ],
}


def test_a_module_has_the_parts_of_its_kubernetes_and_the_etcd_of_its_client():
    text = versions.module("v1.37.2", UPSTREAM)
    assert "go 1.26.0\ngodebug default=go1.26\n" in text
    assert "\tk8s.io/kubernetes v1.37.2\n\tgo.etcd.io/etcd/server/v3 v3.7.0\n" in text
    assert "\tk8s.io/api => k8s.io/api v0.37.2\n" in text
    assert "example.com" not in text


@pytest.fixture
def kube(tmp_path, monkeypatch) -> Path:
    """The folder of the tests' minors, and a Go that answers."""

    def go(_: str, folder: Path, *words: str) -> str:
        (folder / "go.sum").touch()
        return json.dumps({"GoMod": "go.mod"} if words[:2] == ("mod", "download") else UPSTREAM)

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "_run", go)
    return tmp_path


@pytest.mark.parametrize("wanted", ["1.38.0", "v1.38.0"])
def test_a_minor_is_added(kube, monkeypatch, wanted):
    monkeypatch.delenv(versions.CHOSEN, raising=False)
    with versions.added(wanted, "go") as minor:
        assert (minor, versions.version()) == ("1.38", "v1.38.0")
    assert sorted(path.name for path in (kube / "1.38").iterdir()) == ["go.mod", "go.sum"]


@pytest.mark.parametrize("wanted", ["1.38.0-rc.1", "1.38", "newest", "1.38.0/../.."])
def test_what_is_no_release_is_refused_before_anything_is_written(kube, wanted):
    with (
        pytest.raises(versions.UnknownVersion, match="write a release with its patch"),
        versions.added(wanted, "go"),
    ):
        pytest.fail("it is built")
    assert list(kube.iterdir()) == []


def test_a_version_that_does_not_build_or_run_leaves_what_was_there(kube):
    with versions.added("1.37.2", "go"):
        pass
    had = {path.name: path.read_text() for path in (kube / "1.37").iterdir()}
    for wanted in ("1.37.3", "1.38.0"):
        with pytest.raises(KeyboardInterrupt), versions.added(wanted, "go"):
            raise KeyboardInterrupt
    assert [path.name for path in kube.iterdir()] == ["1.37"]
    assert {path.name: path.read_text() for path in (kube / "1.37").iterdir()} == had


def test_the_newest_minor_is_that_of_the_greatest_number(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.delenv(versions.CHOSEN, raising=False)
    for minor in ("1.9", "1.37", "1.101"):
        (tmp_path / minor).mkdir()
        (tmp_path / minor / "go.mod").write_text(f"require (\n\tk8s.io/kubernetes v{minor}.4\n)\n")
    assert versions.minors() == ["1.9", "1.37", "1.101"]
    assert versions.version() == "v1.101.4"
    monkeypatch.setenv(versions.CHOSEN, "1.37")
    assert versions.version() == "v1.37.4"
    monkeypatch.setenv(versions.CHOSEN, "1.38")
    with pytest.raises(versions.UnknownVersion, match=r"1\.9, 1\.37, 1\.101"):
        versions.version()


def test_containerd_is_chosen_likewise(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "CONTAINERD", tmp_path)
    monkeypatch.delenv(versions.CHOSEN_CONTAINERD, raising=False)
    for minor in ("1.7", "2.1"):
        (tmp_path / minor).mkdir()
        (tmp_path / minor / "go.mod").touch()
    assert versions.containerd() == "2.1"
    monkeypatch.setenv(versions.CHOSEN_CONTAINERD, "1.7")
    assert versions.containerd() == "1.7"
    monkeypatch.setenv(versions.CHOSEN_CONTAINERD, "1.6")
    with pytest.raises(versions.UnknownVersion, match=r"1\.7, 2\.1"):
        versions.containerd()


def test_crio_is_there_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(versions.CHOSEN_CRIO, raising=False)
    assert versions.crio() is None
    assert versions.runtime() == "containerd"
    monkeypatch.setenv(versions.CHOSEN_CRIO, "1.34")
    assert versions.crio() == "1.34"
    assert versions.runtime() == "crio"
    monkeypatch.setenv(versions.CHOSEN_CRIO, "1.1")
    with pytest.raises(versions.UnknownVersion, match=r"1\.34"):
        versions.crio()
