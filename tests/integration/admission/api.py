"""What people tell the API server, and cards of a node that is not there."""

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, encode
from cardwise.kube import paths
from tests import build
from tests.cluster import Cluster
from tests.cluster.processes import wait_for

EXTENDER = "system:serviceaccount:cardwise-system:cardwise-extender"
ASSIGNED = encode(Assignment({"0": build.shares(8138, 1)}), assume_time_ns=1)


class Api:
    """What people say to the API server with the admin's rights, the warnings that they see, and the webhook's process.
    The words are kubectl's; where it is not about kubectl itself, it is not started (tests/cluster/verbs.py).
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.webhook = cluster.process("webhook")
        self.run = cluster.verbs.run

    def kubectl(self, *args: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        environment = os.environ | self.cluster.environment()
        return subprocess.run(
            ["kubectl", *args], input=text, capture_output=True, text=True, check=False, env=environment
        )

    def ok(self, *args: str, stdin: Any = None) -> str:
        done = self.run(*args, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *args: str, stdin: Any = None) -> str:
        """Stderr of a call that must be refused."""
        done = self.run(*args, stdin=stdin)
        assert done.returncode != 0, f"was not refused: {done.stdout}"
        return done.stderr

    def create(self, manifest: dict[str, Any], *flags: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.ok("create", "-o", "json", "-f", "-", *flags, stdin=manifest))
        return document

    def get(self, *args: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.ok("get", "-o", "json", *args))
        return document

    def bind(
        self,
        pod: str,
        *,
        user: str = "",
        annotations: dict[str, str] | None = None,
        legacy: bool = False,
        flags: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """A Binding, by the admin or as `user`; `legacy` by the old resource `bindings`.

        To a node of its own that is not there: Kubernetes deletes all pods of such a node 40 s after it saw the first.
        """
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod, "annotations": annotations or {}},
            "target": {"apiVersion": "v1", "kind": "Node", "name": f"of-{pod}"},
        }
        path = "/api/v1/namespaces/default/" + ("bindings" if legacy else f"pods/{pod}/binding")
        impersonated = [f"--as={user}"] if user else []
        return self.run("create", "--raw", path, "-f", "-", *impersonated, *flags, stdin=binding)

    def running(self, name: str) -> dict[str, Any]:
        """A pod that the extender has bound, with card 1 of n1."""
        self.create(build.pod(name, gpu_mem=8138))
        assert self.bind(name, user=EXTENDER, annotations=ASSIGNED).returncode == 0
        return self.get("pod", name)


@contextmanager
def cards_without_node(cluster: Cluster) -> Iterator[Api]:
    """The webhook knows two cards of n1, a node that is not there. Nothing stays in the namespace `default`."""
    client, api = cluster.api, Api(cluster)
    for index in range(2):
        client.create(paths.extendedresources(), _card("n1", index))
    # It hears of cards one after the other.
    cluster.wait(
        lambda: "any node has (2)" in _warnings(api, build.pod("probe", gpu_count=3)), "the webhook knows both"
    )
    try:
        yield api
    finally:
        client.delete(paths.pods("default"), {"gracePeriodSeconds": 0})
        for index in range(2):
            client.delete(paths.extendedresources(_card("n1", index)["metadata"]["name"]))


def _card(node: str, index: int) -> dict[str, Any]:
    uuid = f"GPU-{node}-{index}"
    spec = {"node": node, "index": index, "uuid": uuid, "model": "Tesla P100", "memoryMiB": build.P100}
    metadata = {"name": names.extended_resource_name(uuid), "labels": {names.NODE_LABEL: node}}
    return {"apiVersion": names.API_VERSION, "kind": "ExtendedResource", "metadata": metadata, "spec": spec}


def wait_for_policies(api: Api) -> None:
    """The API server reads policies and CA bundles by watches; the last of them to act is known by its refusal."""
    probes = [
        build.pod("probe", annotations={names.IDX: "0"}),
        with_env(build.pod("probe"), {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}),
        with_volume(build.pod("probe"), "/dev/nvidia0"),
        _with_node(build.pod("probe", gpu_mem=1)),
    ]
    for probe in probes:
        refused = functools.partial(_denies, api, probe)
        assert wait_for(refused), api.run("create", "--dry-run=server", "-f", "-", stdin=probe)


def _denies(api: Api, pod: dict[str, Any]) -> bool:
    return "denied" in _warnings(api, pod)


def _warnings(api: Api, pod: dict[str, Any]) -> str:
    return api.run("create", "--dry-run=server", "-f", "-", stdin=pod).stderr


def with_env(pod: dict[str, Any], *entries: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["containers"][0]["env"] = list(entries)
    return pod


def with_volume(pod: dict[str, Any], path: str) -> dict[str, Any]:
    pod["spec"]["volumes"] = [{"name": "v", "hostPath": {"path": path}}]
    return pod


def _with_node(pod: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["nodeName"] = "n1"
    return pod
