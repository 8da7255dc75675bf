"""What `helm install` says at its end, which `helm template` leaves out."""

import functools
import re
import shutil
import subprocess
from collections.abc import Callable

import pytest
import yaml

from cardwise.core.api import names, schedulerconfig
from tests.helm.rendering import CHART, GIVEN

Notes = Callable[..., str]
KUBEADM = ("scheduler.mode=kubeadm", "scheduler.controlPlaneNodes=3")
OWN = (
    "scheduler.mode=own",
    "scheduler.image=a:1",
    "scheduler.name=cards",
    "nodes.selector.gpushare=yes",
)

_SHOWN = """\
kind: ConfigMap
data:
  notes: |-
    {{- include (print .Template.BasePath "/NOTES.txt") . | nindent 4 }}
"""


@pytest.fixture(scope="module")
def notes(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """The chart with a manifest that has the notes in it."""
    chart = tmp_path_factory.mktemp("notes") / "cardwise"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "shown.yaml").write_text(_SHOWN)

    @functools.cache
    def render_notes(*sets: str) -> str:
        flags = [flag for setting in sets for flag in ("--set", setting)]
        command = [helm, "template", "gpu", str(chart), "--show-only=templates/shown.yaml", *GIVEN, *flags]
        command += [f"--namespace={names.NAMESPACE}", "--kube-version=1.34.0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return str(yaml.safe_load(done.stdout)["data"]["notes"])

    return render_notes


def test_by_hand_they_print_what_kube_scheduler_needs(notes: Notes) -> None:
    printed = notes("extender.service.clusterIP=10.96.0.50")
    block = re.search(r"^percentageOfNodesToScore.*?(?=^\S*3\. )", printed, re.DOTALL | re.MULTILINE)
    assert block
    folder = "/etc/kubernetes/cardwise"
    assert "ADDRESS" not in printed
    assert yaml.safe_load(block[0])["extenders"] == schedulerconfig.extender_stanzas(
        filter_url="https://10.96.0.50:12345",
        bind_url="https://10.96.0.50:12346",
        ca_file=f"{folder}/ca.crt",
        cert_file=f"{folder}/client.crt",
        key_file=f"{folder}/client.key",
    )
    assert f"kubectl get secret cardwise-extender-tls --namespace {names.NAMESPACE}" in printed
    assert '{{index .data \\"$name\\" | base64decode}}' in printed
    assert "https://ADDRESS:12345" in notes()


CERTIFICATE = "webhook.clientCA=-----BEGIN CERTIFICATE-----"


def test_they_say_who_can_connect_to_the_webhook(notes: Notes) -> None:
    off, named = "networkPolicies.enabled=false", "networkPolicies.sources.apiServer[0].ipBlock.cidr=10.0.0.0/28"
    for sets in ((), (off,), (off, named), (named, "webhook.hostNetwork=true")):
        printed = notes(*sets)
        assert "The webhook is open to pods" in printed
        assert "webhook.clientCA" in printed
        assert ("networkPolicies.sources.apiServer" in printed) == ("webhook.hostNetwork=true" not in sets)
        assert ("networkPolicies.enabled=true" in printed) == (off in sets)
    for sets in ((named,), (CERTIFICATE,), (CERTIFICATE, "webhook.hostNetwork=true")):
        assert "open to pods" not in notes(*sets)


def test_they_say_how_to_check_and_where_the_cards_must_be(notes: Notes) -> None:
    printed = notes()
    assert f"helm test gpu --namespace {names.NAMESPACE} " in printed
    assert f"kubectl logs cardwise-test --namespace {names.NAMESPACE} " in printed
    assert "kubectl label node NODE nvidia.com/gpu.present=true" in printed
    assert "nvidia.com/gpu.present" not in notes(*OWN)


def test_they_say_what_the_chosen_way_asks_of_the_admin(notes: Notes) -> None:
    own = notes(*OWN)
    assert "own kube-scheduler, cards, schedules pods" in own
    assert "run `helm upgrade` after it" in notes(*KUBEADM)
    assert "after a control plane node has joined" in notes(*KUBEADM)
    for printed in (own, notes(*KUBEADM)):
        assert "One step remains" not in printed


def test_they_say_that_shares_without_mps_are_advice(notes: Notes) -> None:
    assert "limits of shares are advisory" in notes("mps.enabled=false")
    assert "limits of shares are advisory" not in notes()
    assert "MPS enforces the limits of shares. `kubectl get extendedresources` shows" in notes()


LABEL = f"kubectl label namespace {names.NAMESPACE} pod-security.kubernetes.io/enforce=privileged"


def test_they_say_which_pod_security_the_parts_on_nodes_need(notes: Notes) -> None:
    off, without_mps = "deviceplugin.enabled=false", "mps.enabled=false"
    for sets in ((), (without_mps,), KUBEADM, (*KUBEADM, off, without_mps), (off,)):
        assert LABEL in notes(*sets), sets
        assert ("the MPS manager is privileged with hostPID" in notes(*sets)) == (without_mps not in sets)
    for sets in ((off, without_mps), ("namespace.create=true",)):
        assert "pod-security" not in notes(*sets), sets


def test_with_claims_no_step_remains(notes: Notes) -> None:
    """They printed the steps for those who configure kube-scheduler by hand."""
    printed = notes("scheduler.mode=claims")
    assert "kube-scheduler stays as it is" in printed
    assert "One step remains" not in printed
    assert "configures kube-scheduler" not in printed
