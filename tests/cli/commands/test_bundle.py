"""bundle: all that a helper needs, and nothing that people keep to themselves."""

import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cardwise.cli.commands import bundle
from cardwise.cli.doctor.facts import KIND_COUNT
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cli.clusters import Cluster, card, run, waiting
from tests.fakes.apiobjects import Refused
from tests.fakes.apiserver import Request

SECRET = "s3cr3t"
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
TOLD = {
    names.ASSIGNED: "true",
    names.GPU_CORE: "50",
    f"{names.GPUSHARE_PREFIX}IDX": "0",
    names.GPUSHARE_ALLOCATION: "{}",
    names.GROUP_NAME: "g",
}


def users_pod() -> Json:
    pod = waiting("team-a", "train", {names.GPU_MEM: "8138"})
    pod["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": SECRET,
        "team.example/webhook-token": SECRET,
        "container.apparmor.security.beta.kubernetes.io/main": SECRET,
    } | TOLD
    pod["metadata"]["managedFields"] = [{"manager": SECRET}]
    container = pod["spec"]["containers"][0]
    container["env"] = [{"name": "TOKEN", "value": SECRET}, {"name": "CARDWISE_MEM_LIMIT_MIB", "value": "8138"}]
    hook = {"exec": {"command": ["curl", SECRET]}}
    probe = {"httpGet": {"path": f"/{SECRET}", "port": 80, "httpHeaders": [{"name": "Authorization", "value": SECRET}]}}
    container |= {
        "command": ["run", SECRET],
        "args": [SECRET],
        "workingDir": f"/{SECRET}",
        "lifecycle": {"postStart": hook, "preStop": probe},
        "livenessProbe": hook,
        "readinessProbe": probe,
        "startupProbe": {"grpc": {"port": 1, "service": SECRET}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": {"runAsUser": 1000},
        "somethingOfTomorrow": SECRET,
    }
    pod["spec"]["initContainers"] = [{"name": "init", "image": "i", "args": [SECRET], "livenessProbe": hook}]
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "d", "command": [SECRET], "lifecycle": hook}]
    pod["spec"]["volumes"] = [
        {"name": "data", "csi": {"driver": "d", "volumeAttributes": {"password": SECRET}}},
        {"name": "flex", "flexVolume": {"driver": "d", "options": {"password": SECRET}}},
        {"name": "share", "nfs": {"server": SECRET, "path": "/"}},
    ]
    pod["spec"] |= {
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": [SECRET]}],
        "dnsConfig": {"searches": [SECRET]},
        "somethingOfTomorrow": SECRET,
    }
    ended = {"terminated": {"exitCode": 3, "message": SECRET}}
    # What containerd says of a command that is not there has the command in it.
    refused = {"waiting": {"reason": "RunContainerError", "message": f'exec: "{SECRET}": executable file not found'}}
    statuses = [
        {"name": "main", "state": ended, "lastState": ended},
        {"name": "second", "state": refused, "lastState": ended},
    ]
    pod["status"] = {"phase": "Running", "containerStatuses": statuses}
    return pod


def log(request: Request) -> bytes:
    if request.query["previous"] == "true":
        raise Refused(400, "previous terminated container not found")
    return f"log of {request.path.split('/')[-2]} {request.query['container']}".encode()


@pytest.fixture
def api() -> Cluster:
    ours = {"app.kubernetes.io/name": "cardwise"}
    part = {
        "metadata": {"namespace": names.NAMESPACE, "name": "extender-0", "labels": ours},
        "spec": {"containers": [{"name": "main"}, {"name": "steady"}]},
        "status": {
            "containerStatuses": [{"name": "main", "restartCount": 2}, {"name": "steady", "restartCount": 0}],
        },
    }
    other = {"metadata": {"namespace": "team-a", "name": "web"}, "spec": {"containers": [{"name": "c"}]}}
    manifest = {"metadata": {"namespace": "team-a", "name": "of-users", "annotations": {"team.example/token": SECRET}}}
    pods = [users_pod(), other, part]
    cluster = Cluster(
        {"podgroups": [manifest], "gpuquotas": [manifest], "pods": pods, "extendedresources": [card("n1", 0)]}
    )
    for kind in ("daemonsets", "deployments"):
        cluster.add(
            kind, {"metadata": {"namespace": names.NAMESPACE, "name": f"of-{kind}", "labels": ours}, "spec": {}}
        )
    cluster.answers[paths.pods(names.NAMESPACE, "extender-0", "log")] = log
    return cluster


@pytest.fixture
def neighbour(api: Cluster) -> None:
    """Somebody else's workload in Cardwise's namespace."""
    container = {"name": "c", "env": [{"name": "TOKEN", "value": SECRET}]}
    metadata = {"namespace": names.NAMESPACE, "name": "theirs"}
    api.add("pods", {"metadata": metadata, "spec": {"containers": [container]}})
    for kind in ("daemonsets", "deployments"):
        api.add(kind, {"metadata": metadata, "spec": {"template": {"spec": {"containers": [container]}}}})
    api.answers[paths.pods(names.NAMESPACE, "theirs", "log")] = SECRET.encode()


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2]: archive.extractfile(name) for name in archive.getnames()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_it_has_findings_objects_and_logs_and_no_secret(api, tmp_path):
    target = tmp_path / "b.tar.gz"
    missing, _ = bundle.write_bundle(api.kube, target, [Finding("cards", Severity.OK, "fine")], names.NAMESPACE, NOW)
    files_by_name = contents(target)
    assert all(SECRET.encode() not in content for content in files_by_name.values())
    (pod,) = json.loads(files_by_name["pods.json"])
    container = pod["spec"]["containers"][0]
    assert (pod["metadata"]["name"], container["env"][1]["value"]) == ("train", "8138")
    assert container["command"] == container["args"] == container["env"][0]["value"] == bundle.HIDDEN_TEXT
    assert pod["metadata"]["annotations"] == TOLD
    assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert container["securityContext"] == {"runAsUser": 1000}
    assert [set(volume) for volume in pod["spec"]["volumes"]] == [
        {"name", "csi"},
        {"name", "flexVolume"},
        {"name", "nfs"},
    ]
    first, second = pod["status"]["containerStatuses"]
    assert first["state"]["terminated"]["exitCode"] == second["lastState"]["terminated"]["exitCode"] == 3
    assert second["state"]["waiting"] == {"reason": "RunContainerError", "message": bundle.HIDDEN_TEXT}
    assert [container["name"] for container in pod["spec"]["initContainers"] + pod["spec"]["ephemeralContainers"]] == [
        "init",
        "debug",
    ]
    assert json.loads(files_by_name["extendedresources.json"])[0]["spec"]["uuid"] == "GPU-n1-0"
    assert json.loads(files_by_name["doctor.json"])["worst"] == "ok"
    assert files_by_name["parts/extender-0.main.log"] == b"log of extender-0 main"
    assert missing == json.loads(files_by_name["missing.json"])
    assert [line.partition(":")[0] for line in missing] == ["parts/extender-0.main.previous.log"], (
        "what never restarted"
    )


@pytest.mark.usefixtures("neighbour")
def test_of_what_others_run_in_the_namespace_of_cardwise_nothing_is_packed(api, tmp_path):
    bundle.write_bundle(api.kube, tmp_path / "b.tar.gz", [], names.NAMESPACE, NOW)
    files_by_name = contents(tmp_path / "b.tar.gz")
    assert all(SECRET.encode() not in content for content in files_by_name.values())
    assert {name for name in files_by_name if name.startswith("parts/")} == {
        "parts/pods.json", "parts/extender-0.main.log", "parts/extender-0.steady.log",
    }  # fmt: skip
    for kind in ("daemonsets", "deployments"):
        assert [manifest["metadata"]["name"] for manifest in json.loads(files_by_name[f"{kind}.json"])] == [
            f"of-{kind}"
        ]


def test_what_may_not_be_read_is_named_and_the_rest_is_there(api, tmp_path):
    api.forbid("nodes", "pods")
    missing, wanted = bundle.write_bundle(api.kube, tmp_path / "b.tar.gz", [], names.NAMESPACE, NOW)
    assert wanted == len(missing) + len(contents(tmp_path / "b.tar.gz").keys() - {"doctor.json", "missing.json"})
    assert [line.partition(":")[0] for line in missing] == ["nodes.json", "pods.json", "parts/pods.json"]
    assert "extendedresources.json" in contents(tmp_path / "b.tar.gz")


def test_an_archive_that_is_there_is_not_overwritten(api, monkeypatch, tmp_path):
    target = tmp_path / "b.tar.gz"
    assert run(monkeypatch, api, "bundle", str(target)).exit_code == 0
    before = target.read_bytes()
    refused = run(monkeypatch, api, "bundle", str(target))
    assert refused.exit_code == 1
    assert "exists already; name another file" in refused.stderr
    assert target.read_bytes() == before
    assert "cannot be written" in run(monkeypatch, api, "bundle", str(tmp_path / "no" / "b.tar.gz")).stderr


def test_what_doctor_could_not_look_at_is_said(monkeypatch, tmp_path):
    api = Cluster({})
    api.forbid("nodes", "pods", "leases")
    completed = run(monkeypatch, api, "bundle", str(tmp_path / "b.tar.gz"))
    doctor, files = completed.stderr.splitlines()
    assert doctor.startswith(
        f"note: doctor could not read 7 of {KIND_COUNT} kinds of objects, because you lack the rights: nodes, node lea"
    )
    of_14 = "nodes.json, pods.json, leases.json, parts/pods.json"
    assert files == f"note: could not read 4 of 14 files (missing.json says why): {of_14}"
