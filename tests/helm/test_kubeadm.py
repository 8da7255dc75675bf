"""scheduler.mode=kubeadm: what becomes of the manifest of kube-scheduler, and the way back."""

import argparse
import base64
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.fakes.apiserver import ApiServer, Fault
from tests.helm.rendering import ALL, Render
from tests.helm.scripts import load

kubeadm = load("kubeadm")
assert (
    kubeadm.FORMER_CONFIG_ANNOTATION == names.FORMER_CONFIG
)  # by which `cardwise doctor` knows what the script has changed


# As kubeadm 1.34 writes it, but for what nobody here looks at.
MANIFEST = """\
apiVersion: v1
kind: Pod
metadata:
  labels: {component: kube-scheduler, tier: control-plane}
  name: kube-scheduler
  namespace: kube-system
spec:
  containers:
  - command:
    - kube-scheduler
    - --authentication-kubeconfig=/etc/kubernetes/scheduler.conf
    - --authorization-kubeconfig=/etc/kubernetes/scheduler.conf
    - --bind-address=127.0.0.1
    - --kubeconfig=/etc/kubernetes/scheduler.conf
    - --leader-elect=true
    image: kube-scheduler:v1.34.4
    name: kube-scheduler
    volumeMounts:
    - {mountPath: /etc/kubernetes/scheduler.conf, name: kubeconfig, readOnly: true}
  hostNetwork: true
  volumes:
  - hostPath: {path: /etc/kubernetes/scheduler.conf, type: FileOrCreate}
    name: kubeconfig
"""


POD = paths.pods("kube-system", "kube-scheduler-cp1")


class Node:
    """A control plane node, and the API server that the script asks: the kubelet runs what lies in the folder."""

    def __init__(self, root: Path) -> None:
        self.manifests = root / "manifests"
        self.ours = root / "cardwise"
        self.path = self.manifests / "kube-scheduler.yaml"
        self.manifests.mkdir()
        self.path.write_text(MANIFEST)
        self.runs: Callable[[Json], bool] = lambda pod: True
        self.address = "10.0.0.7"
        self.secret = {name: name for name in kubeadm.TLS_FILES}
        self.api = ApiServer()
        self.api.before_request(lambda _: self._kubelet(), "get", POD, times=math.inf)

    def _kubelet(self) -> None:
        """Tells of the pod as it is by now."""
        if not self.path.exists():
            self.api.remove(POD)
            return
        pod: Json = yaml.safe_load(self.path.read_text())
        ready = "True" if self.runs(pod) else "False"
        metadata = pod["metadata"] | {"name": "kube-scheduler-cp1"}
        pod_status = {"metadata": metadata, "status": {"conditions": [{"type": "Ready", "status": ready}]}}
        self.api.write_object(paths.pods(), pod | pod_status)

    def run(self, action: str) -> None:
        extender = {"namespace": "cardwise", "name": "cardwise-extender"}
        self.api.write_object("/api/v1/services", {"metadata": extender, "spec": {"clusterIP": self.address}})
        data = {name: base64.b64encode(text.encode()).decode() for name, text in self.secret.items()}
        self.api.write_object(paths.secrets(), {"metadata": {"namespace": "cardwise", "name": "tls"}, "data": data})
        arguments = argparse.Namespace(node="cp1", manifests=str(self.manifests), namespace="cardwise", secret="tls")
        getattr(kubeadm, f"{action}_scheduler")(self.api.client(), arguments)

    def command(self) -> list[str]:
        words: list[str] = yaml.safe_load(self.path.read_text())["spec"]["containers"][0]["command"]
        return words

    def configuration(self) -> Json:
        (flag,) = [word for word in self.command() if word.startswith("--config=")]
        manifest: Json = yaml.safe_load(Path(flag.partition("=")[2]).read_text())
        return manifest


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(kubeadm, "wait_until", lambda ready, seconds: ready())
    return Node(tmp_path)


def test_the_scheduler_asks_the_extender_and_keeps_its_flags(node: Node) -> None:
    node.run("wire")
    assert node.command()[:-1] == yaml.safe_load(MANIFEST)["spec"]["containers"][0]["command"]
    configuration = node.configuration()
    assert configuration["clientConnection"] == {"kubeconfig": "/etc/kubernetes/scheduler.conf"}
    assert configuration["leaderElection"] == {"leaderElect": True}
    assert [extender["urlPrefix"] for extender in configuration["extenders"]] == [
        "https://10.0.0.7:12345/gpushare-scheduler",
        "https://10.0.0.7:12346/gpushare-scheduler",
    ]
    for stanza in configuration["extenders"]:
        assert Path(stanza["tlsConfig"]["keyFile"]).read_text() == "client.key"
        assert Path(stanza["tlsConfig"]["keyFile"]).stat().st_mode & 0o077 == 0
    spec = yaml.safe_load(node.path.read_text())["spec"]
    assert {"name": "cardwise", "hostPath": {"path": str(node.ours), "type": "Directory"}} in spec["volumes"]
    assert {"name": "cardwise", "mountPath": str(node.ours), "readOnly": True} in spec["containers"][0]["volumeMounts"]
    assert [path.name for path in node.manifests.iterdir()] == ["kube-scheduler.yaml"], (
        "the kubelet runs what lies here"
    )
    assert (node.ours / "kube-scheduler.yaml.before").read_text() == MANIFEST


def test_done_again_it_changes_nothing(node: Node) -> None:
    node.run("wire")
    before = node.path.read_text()
    node.run("wire")
    assert node.path.read_text() == before


def test_undone_the_manifest_says_what_it_said(node: Node) -> None:
    node.run("wire")
    node.run("unwire")
    assert yaml.safe_load(node.path.read_text()) == yaml.safe_load(MANIFEST)
    assert not list(node.ours.rglob("client.key"))
    node.run("unwire")
    assert yaml.safe_load(node.path.read_text()) == yaml.safe_load(MANIFEST)


def test_a_configuration_of_the_admin_s_stays_what_it_is(node: Node) -> None:
    own = node.ours / "own" / "scheduler.yaml"
    own.parent.mkdir(parents=True)
    theirs = {"urlPrefix": "http://other", "filterVerb": "filter", "managedResources": [{"name": "other.dev/disk"}]}
    gpushare = {"urlPrefix": "http://127.0.0.1:32766", "managedResources": [{"name": "aliyun.com/gpu-mem"}]}
    config = {
        "kind": "KubeSchedulerConfiguration",
        "profiles": [{"schedulerName": "x"}],
        "percentageOfNodesToScore": 50,
    }
    own.write_text(yaml.safe_dump(config | {"extenders": [theirs, gpushare]}))
    node.path.write_text(MANIFEST.replace("- --leader-elect=true", f"- --leader-elect=true\n    - --config={own}"))
    before = yaml.safe_load(node.path.read_text())
    node.run("wire")
    configuration = node.configuration()
    assert configuration["profiles"] == [{"schedulerName": "x"}]
    assert configuration["percentageOfNodesToScore"] == 50
    assert configuration["extenders"][0] == theirs
    assert len(configuration["extenders"]) == 3, "gpushare's stanza manages what is ours now"
    node.run("wire")
    assert node.configuration() == configuration
    node.run("unwire")
    assert yaml.safe_load(node.path.read_text()) == before
    assert own.exists()


def test_what_does_not_come_up_is_taken_back_and_told(node: Node) -> None:
    node.runs = lambda pod: "cardwise" not in str(pod)
    with pytest.raises(kubeadm.Refused, match=r"was not ready with the changed manifest .* restored the former one"):
        node.run("wire")
    assert node.path.read_text() == MANIFEST
    node.runs = lambda pod: True
    node.run("wire")
    assert "--config=" in str(node.command())


@pytest.mark.parametrize("new", ["address", "certificate"])
def test_what_is_new_restarts_the_scheduler(node: Node, new: str) -> None:
    node.run("wire")
    before, places = node.path.read_text(), [path for path in node.ours.iterdir() if path.is_dir()]
    if new == "address":
        node.address = "10.0.0.9"
    else:
        node.secret["client.crt"] = "renewed"
    node.run("wire")
    stanza = node.configuration()["extenders"][0]
    assert stanza["urlPrefix"].startswith(f"https://{node.address}:12345/")
    assert Path(stanza["tlsConfig"]["certFile"]).read_text() == node.secret["client.crt"]
    assert node.path.read_text() != before, "only a new manifest makes the kubelet start it anew"
    assert not any(path.exists() for path in places), "what nobody names any more is removed"
    assert (node.ours / "kube-scheduler.yaml.before").read_text() == MANIFEST
    node.run("unwire")
    assert yaml.safe_load(node.path.read_text()) == yaml.safe_load(MANIFEST)


def test_a_changed_configuration_that_does_not_come_up_is_taken_back_too(node: Node) -> None:
    node.run("wire")
    before, configuration = node.path.read_text(), node.configuration()
    node.address, node.secret["client.crt"] = "10.0.0.9", "renewed"
    node.runs = lambda pod: node.configuration() == configuration
    for _ in range(2):  # trying again is no way to success
        with pytest.raises(kubeadm.Refused, match=r"its pod is not ready.*restored the former one"):
            node.run("wire")
        assert (node.path.read_text(), node.configuration()) == (before, configuration)
        assert Path(configuration["extenders"][0]["tlsConfig"]["certFile"]).read_text() == "client.crt"
    node.runs = lambda pod: True
    node.run("wire")
    assert "https://10.0.0.9:12345" in str(node.configuration())


def test_a_scheduler_that_is_not_up_is_no_success(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.run("wire")
    capsys.readouterr()
    node.runs = lambda pod: False
    with pytest.raises(kubeadm.Refused, match="kube-scheduler is not ready: its pod is not ready"):
        node.run("wire")
    output = capsys.readouterr().out
    assert "already has the extender; waiting up to 90 s until kube-scheduler is ready\n" in output
    assert "kube-scheduler is ready\n" not in output.replace("until kube-scheduler is ready\n", "")


def test_a_killed_job_leaves_the_next_one_to_do_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.run("wire")
    before, configuration = node.path.read_text(), node.configuration()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    node.address = "10.0.0.9"
    with monkeypatch.context() as patched:
        patched.setattr(kubeadm, "exchange_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            node.run("wire")
    assert node.configuration() == configuration, "the manifest that is there has what it was written for"
    node.run("wire")
    assert node.path.read_text() != before
    assert "https://10.0.0.9:12345" in str(node.configuration())


def test_each_wait_is_told_as_it_begins(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.runs = lambda pod: "cardwise-former-config" not in (pod["metadata"].get("annotations") or {})
    with pytest.raises(kubeadm.Refused, match="restored the former one"):
        node.run("wire")
    waiting, changed, back = capsys.readouterr().out.splitlines()
    assert waiting == "waiting up to 120 s until the extender has created the Secret tls"
    assert changed == f"changed {node.path}; waiting up to 90 s until kube-scheduler is ready"
    assert back.startswith(f"kube-scheduler is not ready (its pod is not ready); restored {node.path}")


def test_an_api_server_that_is_busy_is_asked_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeadm, "wait_until", lambda ready, seconds: ready() or ready())
    node.api.fault(Fault(status=401), "get", paths.secrets("cardwise", "tls"))
    node.run("wire")
    node.api.fault(Fault(status=401), "get", paths.secrets("cardwise", "tls"), times=math.inf)
    with pytest.raises(kubeadm.Refused, match="not created the Secret tls in 120 s; the API server says: 401"):
        node.run("wire")


def test_it_is_taken_back_while_the_api_server_is_silent(node: Node) -> None:
    node.api.fault(Fault(lost=True), "get", POD, times=math.inf)
    with pytest.raises(kubeadm.Refused, match="is not ready with its former manifest either"):
        node.run("wire")
    assert node.path.read_text() == MANIFEST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist: write scheduler.mode=own if"),
        (MANIFEST.replace("- kube-scheduler\n", "- sh\n"), "has no container that runs kube-scheduler"),
        (
            MANIFEST.replace("    - --kubeconfig=/etc/kubernetes/scheduler.conf\n", ""),
            "neither --config nor --kubeconfig",
        ),
        (MANIFEST.replace("- --leader-elect=true", "- --config=/nowhere/else.yaml"), "cannot be read from here"),
    ],
)
def test_what_it_does_not_understand_it_leaves_alone(node: Node, text: str | None, message: str) -> None:
    if text is None:
        node.path.unlink()
    else:
        node.path.write_text(text)
    with pytest.raises(kubeadm.Refused, match=message):
        node.run("wire")
    assert text is None or node.path.read_text() == text


def test_the_jobs_run_when_the_release_changes_and_in_no_other_mode(render: Render) -> None:
    def jobs(*sets: str) -> dict[str, str]:
        jobs = [manifest["metadata"] for manifest in render(*sets) if manifest["kind"] == "Job"]
        return {
            metadata["name"]: metadata["annotations"]["helm.sh/hook"]
            for metadata in jobs
            if "kubeadm" in metadata["name"]
        }

    wanted = {
        "cardwise-kubeadm-wire": "post-install,post-upgrade,post-rollback",
        "cardwise-kubeadm-unwire": "pre-delete",
    }
    assert jobs("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3") == wanted
    assert jobs() == jobs(*ALL) == {}


def test_there_is_a_pod_for_each_control_plane_node_that_a_value_counts(render: Render) -> None:
    (wire,) = [
        manifest["spec"]
        for manifest in render("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3")
        if manifest["metadata"]["name"] == "cardwise-kubeadm-wire"
    ]
    assert (wire["completions"], wire["parallelism"]) == (3, 3)


def test_the_job_is_not_killed_before_it_has_put_the_manifest_back_and_said_so(render: Render) -> None:
    """Kubernetes deletes the pods of a Job that is late, and their logs with them."""
    jobs = [
        manifest
        for manifest in render("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=1")
        if manifest["kind"] == "Job"
    ]
    late = {job["spec"]["activeDeadlineSeconds"] for job in jobs if "kubeadm" in job["metadata"]["name"]}
    assert min(late) > kubeadm.SECRET_TIMEOUT_SECONDS + 2 * kubeadm.READY_TIMEOUT_SECONDS + 30


def test_the_chart_knows_a_wired_scheduler_by_the_annotation_that_wiring_writes() -> None:
    template = Path(__file__).parents[2] / "helm" / "cardwise" / "templates" / "_cluster.tpl"
    assert f'"{kubeadm.FORMER_CONFIG_ANNOTATION}"' in template.read_text()
