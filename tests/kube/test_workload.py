"""The workload that a pod names: what people created."""

import pytest

from cardwise.kube.objects import pods


@pytest.mark.parametrize(
    ("kind", "name", "labels", "workload"),
    [
        ("ReplicaSet", "web-7d4b9c", {"pod-template-hash": "7d4b9c"}, "Deployment/web"),
        ("ReplicaSet", "web-7d4b9c", {}, "ReplicaSet/web-7d4b9c"),
        ("ReplicaSet", "web", {"pod-template-hash": "7d4b9c"}, "ReplicaSet/web"),
        ("Job", "report-29912345", {}, "CronJob/report"),
        ("Job", "report-20261201", {}, "Job/report-20261201"),
        ("Job", "train", {}, "Job/train"),
        ("StatefulSet", "db", {}, "StatefulSet/db"),
        ("PyTorchJob", "bert", {}, "PyTorchJob/bert"),
        ("", "", {}, "Pod/pod-1"),
    ],
)
def test_workload_of_a_pod_is_what_its_owner_shows(kind, name, labels, workload):
    owners = [{"kind": kind, "name": name, "uid": "u", "controller": True}] if kind else []
    metadata = {"name": "pod-1", "namespace": "team", "labels": labels, "ownerReferences": owners}
    assert pods.record_of({"metadata": metadata}).workload == workload


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Foo", "a" * 254),
        ("F" * 64, "a"),
        ("Foo", "a\u2028b"),
        ("Foo", "a\rb"),
        ("Foo", "a\nb"),
        ("Foo", "b\n"),
        ("Foo\n", "b"),
        ("Foo\x0c", "a"),
        ("Foo bar", "a"),
        ("Foo/bar", "a"),
        ("1Foo", "a"),
        ("\u0191oo", "a"),
        ("Foo", 'a"} 1'),
        ("Foo", "\u0661"),
        ("Foo", ""),
        ("", "a"),
    ],
)
def test_an_owner_that_kubernetes_cannot_have_is_no_workload(kind, name):
    owners = [{"kind": kind, "name": name, "uid": "u", "controller": True}]
    assert pods.record_of({"metadata": {"name": "pod-1", "ownerReferences": owners}}).workload == "Pod/pod-1"
