"""What helm sees of the cluster before it installs: refused at once with the value to write, not after a time-out.

`helm template` asks no cluster, so what would be seen is put in; that helm sees it so is tried in
tests/integration/chart/test_before.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helm.rendering import CHART, documents, get_object, template

SOUND = {
    "runtimeClasses": ["gvisor", "nvidia"],
    "nvidia": ["nvidia"],
    "controlPlane": ["cp1"],
    "schedulers": ["kube-scheduler-cp1"],
    "labelled": 2,
    "unlabelled": [],
    "wired": "",
    "enforced": "privileged",
}
NONE: dict[str, Any] = {"runtimeClasses": [], "nvidia": []}
SEVERAL = {"runtimeClasses": ["nvidia-a", "nvidia-b"], "nvidia": ["nvidia-a", "nvidia-b"]}
KUBEADM, OWN = "scheduler.mode=kubeadm", ("scheduler.mode=own", "scheduler.image=a:1")
PLUGIN = "--show-only=templates/deviceplugin/daemonset.yaml"

Seeing = Callable[..., Path]


@pytest.fixture
def seeing(tmp_path: Path) -> Seeing:
    """The chart, seeing such a cluster; and with its notes as a manifest."""

    def chart(**differing: Any) -> Path:
        folder = tmp_path / "cardwise"
        shutil.copytree(CHART, folder, dirs_exist_ok=True)
        file = folder / "templates" / "_cluster.tpl"
        before, define, rest = file.read_text().partition('{{- define "cardwise.cluster" -}}\n')
        _, shown, after = rest.partition("{{- toJson .Values.seen }}\n")
        assert shown
        file.write_text(f"{before}{define}{json.dumps(SOUND | differing)}\n{after}")
        notes = '{{- include (print .Template.BasePath "/NOTES.txt") . | nindent 4 }}'
        (folder / "templates" / "shown.yaml").write_text(f"kind: ConfigMap\ndata:\n  notes: |-\n    {notes}\n")
        return folder

    return chart


@pytest.mark.parametrize(
    ("seen", "sets", "message"),
    [
        (NONE, ["nodes.runtimeClass=nvidia"], "nodes.runtimeClass: the cluster has no RuntimeClass nvidia, so pods "),
        (NONE, ["webhook.runtimeClass=nvidia"], "webhook.runtimeClass: the cluster has no RuntimeClass nvidia"),
        ({}, ["nodes.runtimeClass=nvidai"], "no RuntimeClass nvidai, so pods that name it cannot be created; it has"),
        (SEVERAL, [], "nodes.runtimeClass: the cluster has several NVIDIA RuntimeClasses (nvidia-a, nvidia-b)"),
        (
            {"schedulers": []},
            [KUBEADM],
            "so kubeadm cannot work: write scheduler.mode=own,scheduler.image=registry.k8s.io/kube-scheduler:v1.34.0",
        ),
        (
            {"controlPlane": [], "schedulers": []},
            [KUBEADM],
            "Here no node is visible as a control plane of kubeadm, so kubeadm cannot work: write scheduler.mode=own,",
        ),
        (
            {},
            ["scheduler.mode="],
            "a static pod (kube-scheduler-cp1), as kubeadm makes it: write scheduler.mode=kub",
        ),
        ({"controlPlane": []}, ["scheduler.mode="], "write scheduler.mode=own,scheduler.image=registry.k8s.io/"),
        ({"enforced": "baseline"}, [], "Pod Security enforces the profile baseline in cardwise-system"),
        ({"enforced": "restricted"}, [], "kubectl label namespace cardwise-system pod-security.kubernetes.io/enforce="),
    ],
)
def test_what_cannot_work_here_is_refused_with_what_to_write(
    helm: str, seeing: Seeing, seen: dict[str, Any], sets: list[str], message: str
) -> None:
    refused = template(helm, *sets, chart=seeing(**seen)).stderr
    assert message in refused


@pytest.mark.parametrize(
    ("seen", "sets", "runtime_class"),
    [
        ({}, [], "nvidia"),
        (NONE, [], None),
        ({"runtimeClasses": ["gpu"], "nvidia": ["gpu"]}, [], "gpu"),
        ({}, ["nodes.runtimeClass="], None),
        ({}, ["nodes.runtimeClass=gvisor"], "gvisor"),
        (SEVERAL | {"runtimeClasses": ["nvidia-a", "nvidia-b"]}, ["nodes.runtimeClass=nvidia-b"], "nvidia-b"),
        ({}, ["nodes.simulatedGPUs=/srv/cards.yaml"], None),
        ({"enforced": ""}, [KUBEADM], "nvidia"),
    ],
)
def test_the_parts_on_nodes_get_the_runtime_class_that_brings_the_driver(
    helm: str, seeing: Seeing, seen: dict[str, Any], sets: list[str], runtime_class: str | None
) -> None:
    rendered = template(helm, *sets, chart=seeing(**seen), flags=[PLUGIN])
    assert rendered.returncode == 0, rendered.stderr
    spec = get_object(documents(rendered.stdout), "DaemonSet", "cardwise-deviceplugin")["spec"]["template"]["spec"]
    assert spec.get("runtimeClassName") == runtime_class


def test_without_parts_on_nodes_nothing_is_asked_of_them(helm: str, seeing: Seeing) -> None:
    off = ("deviceplugin.enabled=false", "mps.enabled=false", *OWN)
    assert template(helm, *off, chart=seeing(**SEVERAL, enforced="restricted")).returncode == 0


@pytest.mark.parametrize(
    ("seen", "sets", "text", "absent"),
    [
        ({}, [], "2 nodes are labelled as having a GPU", "gpu.present"),
        (
            {"labelled": 1},
            ["nodes.selector.a=b"],
            "1 node is labelled as having a GPU (those of nodes.selector)",
            "No node",
        ),
        ({"labelled": 0}, [], "kubectl label node NODE nvidia.com/gpu.present=true", "offer nvidia.com/gpu"),
        (
            {"labelled": 0, "unlabelled": ["n1"]},
            [],
            "although these nodes offer nvidia.com/gpu: n1.",
            "nodes are labelled",
        ),
        ({}, [], "is in namespace", "NVML"),
        (NONE, [], "the cluster has no NVIDIA RuntimeClass). So NVIDIA's runtime must be the default", "as you set it"),
        ({}, ["nodes.runtimeClass="], "as you set it). So NVIDIA's runtime must be the default", "helm cannot"),
    ],
)
def test_the_notes_say_what_was_seen_of_nodes_and_runtimes(
    helm: str, seeing: Seeing, *, seen: dict[str, Any], sets: list[str], text: str, absent: str
) -> None:
    rendered = template(helm, *sets, chart=seeing(**seen), flags=["--show-only=templates/shown.yaml"])
    assert rendered.returncode == 0, rendered.stderr
    notes = str(documents(rendered.stdout)[0]["data"]["notes"])
    notes = notes.partition("kube-scheduler")[0]
    assert text in notes
    assert absent not in notes
