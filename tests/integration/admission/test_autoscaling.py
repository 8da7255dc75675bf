"""HorizontalPodAutoscalers of kube-controller-manager count pods with the share agent as those without it.

What a metrics server would measure is served here, as the API metrics.k8s.io.
"""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names, shareagent
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster, pki
from tests.cluster.controlplane import CONTROLLERS
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, deployment, flags

pytestmark = [pytest.mark.cluster("sim")]

GROUP, VERSION = "metrics.k8s.io", "v1beta1"
API = f"/apis/{GROUP}/{VERSION}"
API_SERVICE = f"/apis/apiregistration.k8s.io/v1/apiservices/{VERSION}.{GROUP}"
REQUESTS = {"cpu": "1", "memory": "1Gi"}
USAGE = {"cpu": "800m", "memory": "800Mi"}  # of the container; the agent uses next to nothing
USAGE_OF_AGENT = {"cpu": "1m", "memory": "10Mi"}


class MetricsServer:
    """Measures of all pods of a namespace the same."""

    def __init__(self, space: Space, folder: Path) -> None:
        pair = pki.Authority(folder).issue("server", "metrics-server", hosts=("127.0.0.1",))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.cert, pair.key)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(_answer(self.path, space)).encode()
                self.send_response(200 if self.path.startswith(API) else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _answer(path: str, space: Space) -> Json:
    if path.partition("?")[0].rstrip("/") == API:
        pods = {"name": "pods", "singularName": "", "namespaced": True, "kind": "PodMetrics", "verbs": ["get", "list"]}
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{GROUP}/{VERSION}",
            "resources": [pods],
        }
    now = datetime.now(UTC).isoformat()
    measured = [
        {
            "metadata": {key: pod["metadata"][key] for key in ("name", "namespace", "labels")},
            "timestamp": now,
            "window": "1s",
            "containers": [
                {"name": name, "usage": USAGE_OF_AGENT if name == shareagent.CONTAINER_NAME else USAGE}
                for name in running_containers(pod)
            ],
        }
        for pod in space.pods()
        if f"app%3D{pod['metadata']['labels']['app']}" in path
    ]
    return {"kind": "PodMetricsList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": measured}


def running_containers(pod: Json) -> list[str]:
    """Containers and sidecars, by name."""
    sidecars = [c for c in pod["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"]
    return [container["name"] for container in (*sidecars, *pod["spec"]["containers"])]


@contextmanager
def autoscaling(cluster: Cluster) -> Iterator[None]:
    """kube-controller-manager's autoscaler, which no other test needs, in a process of its own."""
    started = cluster.process(CONTROLLERS).recorded
    assert started is not None
    others = ("--controllers=", "--secure-port=")
    command = [argument for argument in started.command if not argument.startswith(others)]
    command += ["--controllers=horizontal-pod-autoscaler-controller", "--secure-port=0"]
    process = cluster.process("autoscaler")
    process.start([*command, "--horizontal-pod-autoscaler-sync-period=1s"], started.environment)
    try:
        yield
    finally:
        process.stop()


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Space]:
    """With a node, the share agent in every pod, and metrics of its pods."""
    with flags(cluster, "webhook", "--share-agent-image=cardwise.local/cardwise:1", "--share-agent=always"):
        for space in spaces(cluster, request):
            space.nodes()
            with closing(MetricsServer(space, tmp_path)) as server:
                service = {"name": "metrics", "namespace": space.name, "port": server.port}
                space.apply(
                    {
                        "apiVersion": "v1",
                        "kind": "Service",
                        "metadata": {"name": "metrics"},
                        "spec": {"type": "ExternalName", "externalName": "127.0.0.1"},
                    },
                    {
                        "apiVersion": "apiregistration.k8s.io/v1",
                        "kind": "APIService",
                        "metadata": {"name": f"{VERSION}.{GROUP}"},
                        "spec": {
                            "group": GROUP,
                            "version": VERSION,
                            "groupPriorityMinimum": 100,
                            "versionPriority": 100,
                            "insecureSkipTLSVerify": True,
                            "service": service,
                        },
                    },
                )
                try:
                    with autoscaling(cluster):
                        yield space
                finally:
                    cluster.api.delete(API_SERVICE)


def autoscaler(name: str) -> Json:
    metrics = [
        {
            "type": "Resource",
            "resource": {"name": resource, "target": {"type": "Utilization", "averageUtilization": 50}},
        }
        for resource in ("cpu", "memory")
    ]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2, "metrics": metrics}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": name}, "spec": spec}


def test_a_deployment_with_the_agent_is_scaled_as_one_without_it(space: Space) -> None:
    for name, choice in (("with", "always"), ("without", "never")):
        manifest = deployment(name, 1, gpu_mem=1000, annotations={names.SHARE_AGENT: choice})
        manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] = REQUESTS
        del manifest["spec"]["replicas"]  # the autoscaler's
        space.apply(manifest, autoscaler(name))
    autoscalers = f"/apis/autoscaling/v2/namespaces/{space.name}/horizontalpodautoscalers"

    def started() -> bool:
        """Long ago: of a pod that has just started the autoscaler does not believe how much cpu it uses."""
        pods = [pod for pod in space.pods() if pod["status"]["phase"] == "Running"]
        long_ago = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in pods:
            path = paths.pods(space.name, pod["metadata"]["name"], "status")
            space.cluster.api.patch(path, {"status": {"startTime": long_ago}}, "merge")
        return len(pods) >= 2

    def scaled() -> dict[str, Json]:
        statuses = {hpa["metadata"]["name"]: hpa["status"] for hpa in space.cluster.api.get(autoscalers)["items"]}
        if any(status.get("desiredReplicas") != 2 for status in statuses.values()):
            raise LookupError(json.dumps(statuses))
        return statuses

    space.wait(started, "both run")
    space.wait(scaled, "both are scaled")
    agents = {
        pod["metadata"]["labels"]["app"]: shareagent.CONTAINER_NAME in running_containers(pod) for pod in space.pods()
    }
    assert agents == {"with": True, "without": False}

    def used() -> dict[str, Json]:
        """An entry is empty while the autoscaler has no metrics of a new pod."""
        return {
            name: {
                entry["resource"]["name"]: entry["resource"]["current"].get("averageUtilization")
                for entry in status["currentMetrics"]
                if "resource" in entry
            }
            for name, status in scaled().items()
        }

    # With the agent: of 1050m and of 1088Mi.
    expected = {"without": {"cpu": 80, "memory": 78}, "with": {"cpu": 76, "memory": 74}}
    space.wait(lambda: used() == expected, "the autoscaler sees the agent's requests and its use")
    space.cluster.api.delete(autoscalers)
