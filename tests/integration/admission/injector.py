"""Another project's mutating webhook: changes objects with the label `mesh`, as a service mesh's does."""

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from cardwise.runtime.tls import certs, filesets
from tests.cluster import Cluster

LABELS = {"mesh": "on"}
Change = Callable[[Json], list[Json]]  # what it does to an object that is reviewed, as a JSON patch


class Injector:
    """Serves `change` on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        now, day = datetime.now(UTC), timedelta(days=1)
        authority = certs.new_authority("injector", now, day)
        leaf = certs.new_leaf(authority, "injector", ["127.0.0.1"], certs.KeyPurpose.SERVER, now=now, lifetime=day)
        filesets.write_files(folder, {"tls.crt": leaf.cert, "tls.key": leaf.key})
        self.calls = 0
        self._authority = authority.cert
        self._change: Change = lambda _: []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def registered(
        self, cluster: Cluster, name: str, change: Change, probe: Callable[[], object], *, policy: str = "Never"
    ) -> Iterator[None]:
        """As a configuration of this name. `probe` sends an object to the API server; `policy`: whether the API server
        calls again (reinvocationPolicy).
        """
        self._change = lambda _: []
        rules = [
            {"operations": ["CREATE", "UPDATE"], "apiGroups": [group], "apiVersions": ["v1"], "resources": resources}
            for group, resources in (("", ["pods", "resourcequotas"]), ("apps", ["deployments"]))
        ]
        hook = {
            "name": "injector.example.com",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "reinvocationPolicy": policy,
            "objectSelector": {"matchLabels": LABELS},
            "clientConfig": {
                "url": f"https://127.0.0.1:{self._server.server_port}/",
                "caBundle": base64.b64encode(self._authority).decode(),
            },
            "rules": rules,
        }
        cluster.api.create(paths.mutatingwebhookconfigurations(), {"metadata": {"name": name}, "webhooks": [hook]})
        try:
            cluster.wait(lambda: self._called(probe), f"the API server calls {name}")
            self._change = change
            yield
        finally:
            self._change = lambda _: []  # the API server may call a moment longer, and may refuse what is changed
            cluster.api.delete(paths.mutatingwebhookconfigurations(name))
            cluster.wait(lambda: not self._called(probe), f"the API server calls {name} no more")

    def _called(self, probe: Callable[[], object]) -> bool:
        before = self.calls
        probe()
        return self.calls > before

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        injector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
                injector.calls += 1
                patch = json.dumps(injector._change(request["object"])).encode()
                response = {"uid": request["uid"], "allowed": True}
                response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
                review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
                body = json.dumps(review).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own name
                pass

        return Handler
