"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes on loopback.

A test of the API seam alone needs no more than the first two of them.
"""

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import pki, ports, services
from tests.cluster.processes import PATIENCE, Process

ETCD = "etcd"
APISERVER = "kube-apiserver"
CONTROLLERS = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
SERVICES = "10.96.0.0/16"  # of Services; kube-proxy routes it, where there is one
# Controllers of volumes, certificates, autoscaling and type checks, which no test and no scene of the demo has. Each
# watches kinds of its own and asks for a token, so it costs every start. That of ResourceClaims runs: it reserves,
# deallocates and deletes claims of pods.
_UNUSED = (
    "certificatesigningrequest-approving",
    "certificatesigningrequest-cleaner",
    "certificatesigningrequest-signing",
    "endpointslice-mirroring",
    "ephemeral-volume",
    "horizontal-pod-autoscaler",
    "legacy-serviceaccount-token-cleaner",
    "persistentvolume-attach-detach",
    "persistentvolume-binder",
    "persistentvolume-expander",
    "persistentvolume-protection",
    "persistentvolumeclaim-protection",
    "service-cidr",
    "ttl",
    "validatingadmissionpolicy-status",
)
_LOOPBACK = "127.0.0.1"


class ControlPlane:
    """The control plane of one state folder. Also an object of a cluster that another process started."""

    def __init__(self, state: Path, bin_dir: Path) -> None:
        self._state = state
        self._bin = bin_dir
        self._ports_file = state / "control-plane.json"
        self._address_file = state / "api-address"

    @property
    def ports(self) -> dict[str, int]:
        if not self._ports_file.exists():
            names = (ETCD, "etcd-peer", APISERVER, CONTROLLERS, SCHEDULER)
            self._ports_file.write_text(json.dumps(dict(zip(names, ports.free(len(names)), strict=True))))
        numbers: dict[str, int] = json.loads(self._ports_file.read_text())
        return numbers

    @property
    def address(self) -> str:
        """Of the API server: loopback, unless pods must reach it."""
        return self._address_file.read_text() if self._address_file.exists() else _LOOPBACK

    @address.setter
    def address(self, address: str) -> None:
        self._address_file.write_text(address)

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.ports[APISERVER]}"

    def kubeconfig(self, name: str) -> Path:
        """Of `admin`, a control plane process, or `kubelet-<node>`."""
        return self._state / "kubeconfig" / name

    def process(self, name: str) -> Process:
        return Process(self._state, name)

    def write_credentials(self, nodes: Sequence[str]) -> None:
        """The CA, the servers' certificates and a kubeconfig for each of the cluster's own identities."""
        authority = pki.Authority(self._pki)
        authority.service_account_key()
        authority.issue("apiserver", "kube-apiserver", hosts=(self.address, "localhost", "10.96.0.1"))
        # Only kubelets believe this one: it is how `kubectl logs` and `exec` get through.
        authority.issue("apiserver-kubelet", "kube-apiserver", ("system:masters",))
        self._write_admission(pki.Authority(self.webhook_callers.parent).issue("apiserver", "kube-apiserver"))
        identities: dict[str, tuple[str, tuple[str, ...]]] = {
            "admin": ("admin", ("system:masters",)),
            CONTROLLERS: (f"system:{CONTROLLERS}", ()),
            SCHEDULER: (f"system:{SCHEDULER}", ()),
            services.PROXY: (f"system:{services.PROXY}", ()),
        }
        identities |= {f"kubelet-{node}": (f"system:node:{node}", ("system:nodes",)) for node in nodes}
        self.kubeconfig("admin").parent.mkdir(parents=True, exist_ok=True)
        for name, (user, groups) in identities.items():
            pair = authority.issue(name, user, groups)
            pki.kubeconfig(self.kubeconfig(name), server=self.url, ca=authority.cert, pair=pair)

    @property
    def webhook_callers(self) -> Path:
        """The authority of the certificate that the API server shows webhooks which ask for one."""
        return self._pki / "webhooks" / "ca.crt"

    def _write_admission(self, pair: pki.Pair) -> None:
        config = {
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": str(self._pki / "webhooks" / "kubeconfig"),
        }
        plugins = ("MutatingAdmissionWebhook", "ValidatingAdmissionWebhook")
        manifest = {
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "AdmissionConfiguration",
            "plugins": [{"name": plugin, "configuration": config} for plugin in plugins],
        }
        self._admission.write_text(yaml.safe_dump(manifest))
        user = {"client-certificate": str(pair.cert), "client-key": str(pair.key)}
        users = {"apiVersion": "v1", "kind": "Config", "users": [{"name": "*", "user": user}]}
        (self._pki / "webhooks" / "kubeconfig").write_text(yaml.safe_dump(users))

    def start_api(self, extra: Sequence[str] = ()) -> None:
        """etcd and kube-apiserver, ready."""
        client = f"http://127.0.0.1:{self.ports[ETCD]}"
        peer = f"http://127.0.0.1:{self.ports['etcd-peer']}"
        etcd = self.process(ETCD)
        etcd.start(
            [
                str(self._bin / ETCD),
                f"--data-dir={self._state / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ]
        )
        # Else the apiserver's first try fails, and it waits a whole second before the next.
        etcd.wait_until(lambda: _answers(f"{client}/health"), "/health")
        self._start_apiserver(APISERVER, self.ports[APISERVER], extra)

    @contextmanager
    def second_api(self, *kubeconfigs: Path) -> Iterator[Process]:
        """Another kube-apiserver on the same etcd. Beside each kubeconfig comes one, with `-b`, that leads there."""
        (port,) = ports.free(1)
        for path in kubeconfigs:
            there = path.read_text().replace(self.url, f"https://{self.address}:{port}")
            path.with_name(f"{path.name}-b").write_text(there)
        process = self._start_apiserver(f"{APISERVER}-b", port)
        try:
            yield process
        finally:
            process.kill()  # it would wait a minute for those who watch

    def _start_apiserver(self, name: str, port: int, extra: Sequence[str] = ()) -> Process:
        apiserver = self.process(name)
        apiserver.start(
            [
                str(self._bin / APISERVER),
                f"--etcd-servers=http://127.0.0.1:{self.ports[ETCD]}",
                f"--bind-address={self.address}",
                f"--advertise-address={self.address}",
                # The Service `kubernetes`, which refuses loopback.
                f"--endpoint-reconciler-type={'none' if self.address == _LOOPBACK else 'lease'}",
                f"--secure-port={port}",
                f"--tls-cert-file={self._pki / 'apiserver.crt'}",
                f"--tls-private-key-file={self._pki / 'apiserver.key'}",
                f"--client-ca-file={self._pki / 'ca.crt'}",
                f"--kubelet-client-certificate={self._pki / 'apiserver-kubelet.crt'}",
                f"--kubelet-client-key={self._pki / 'apiserver-kubelet.key'}",
                "--kubelet-preferred-address-types=InternalIP",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={self._service_account_key}",
                f"--service-account-signing-key-file={self._service_account_key}",
                f"--service-cluster-ip-range={SERVICES}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                f"--admission-control-config-file={self._admission}",
                "--allow-privileged",
                "--profiling=false",
                *extra,
            ]
        )
        # Anonymous users may look at it (ClusterRole system:public-info-viewer).
        url = f"https://{self.address}:{port}/readyz"
        apiserver.wait_until(lambda: _answers(url), "/readyz")
        return apiserver

    def call_etcd(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call etcd's own API. Source: etcd.io/docs, "etcd v3 JSON gateway"."""
        url = f"http://127.0.0.1:{self.ports[ETCD]}/v3/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            decoded: dict[str, Any] = json.loads(response.read())
            return decoded

    def restore_pod(self, namespace: str, name: str) -> None:
        """Write the pod into etcd as it was when it was created: for this pod, etcd is restored from a backup."""
        key = base64.b64encode(f"/registry/pods/{namespace}/{name}".encode()).decode()
        (present,) = self.call_etcd("kv/range", {"key": key})["kvs"]
        (created,) = self.call_etcd("kv/range", {"key": key, "revision": present["create_revision"]})["kvs"]
        self.call_etcd("kv/put", {"key": key, "value": created["value"]})

    def start_controllers(self, extra: Sequence[str] = ()) -> None:
        """kube-controller-manager; without waiting for it."""
        self.process(CONTROLLERS).start(
            [
                str(self._bin / CONTROLLERS),
                f"--kubeconfig={self.kubeconfig(CONTROLLERS)}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self.ports[CONTROLLERS]}",
                f"--service-account-private-key-file={self._service_account_key}",
                f"--root-ca-file={self._pki / 'ca.crt'}",
                "--use-service-account-credentials",
                "--leader-elect=false",
                f"--controllers=*,{','.join(f'-{name}-controller' for name in _UNUSED)}",
                # Simulated nodes renew no Lease: for thousands of them that would cost more than what is measured.
                "--node-monitor-grace-period=240h",
                *extra,
            ]
        )

    def start_scheduler(
        self,
        extenders: Sequence[dict[str, Any]],
        extra: Sequence[str] = (),
        *,
        sampling: int = 100,
        profiles: Sequence[dict[str, Any]] = (),
        second: int = 0,
    ) -> None:
        """The stock kube-scheduler, with the extender's stanzas when there is an extender; ready.

        `sampling`: percent of the nodes that it looks at, 0 for its own choice. `second`: the port of one beside it.
        """
        name = f"second-{SCHEDULER}" if second else SCHEDULER
        configuration = self._state / f"{name}.yaml"
        connection = {"kubeconfig": str(self.kubeconfig(SCHEDULER)), "qps": 5000, "burst": 5000}
        configuration.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kubescheduler.config.k8s.io/v1",
                    "kind": "KubeSchedulerConfiguration",
                    "clientConnection": connection,
                    "leaderElection": {"leaderElect": False},
                    "percentageOfNodesToScore": sampling,
                    "extenders": list(extenders),
                    **({"profiles": list(profiles)} if profiles else {}),
                }
            )
        )
        port = second or self.ports[SCHEDULER]
        scheduler = self.process(name)
        scheduler.start(
            [
                str(self._bin / SCHEDULER),
                f"--config={configuration}",
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
                "--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics",
                *extra,
            ]
        )
        scheduler.wait_until(lambda: _answers(f"https://127.0.0.1:{port}/readyz"), "/readyz")

    def scheduler_metrics(self) -> str:
        """What kube-scheduler says of itself."""
        with urllib.request.urlopen(
            f"https://127.0.0.1:{self.ports[SCHEDULER]}/metrics", context=_ANYBODY, timeout=PATIENCE
        ) as answer:
            return str(answer.read().decode())

    @property
    def _pki(self) -> Path:
        return self._state / "pki"

    @property
    def _admission(self) -> Path:
        return self._pki / "admission.yaml"

    @property
    def _service_account_key(self) -> Path:
        return self._pki / "service-accounts.key"


def _anybody() -> ssl.SSLContext:
    """For health only, which is open to everybody: the scheduler signs its own certificate at every start."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # a default one reads the machine's authorities, 20 ms
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


_ANYBODY = _anybody()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, context=_ANYBODY, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
