"""Cardwise's own parts as processes of the test cluster, with the chart's policies and the chart's identities.

The chart is rendered by the real Helm with the workloads switched off, so CRDs, RBAC, webhook configurations and
admission policies are those that people install; each part runs with a token of its own ServiceAccount.
"""

import base64
import contextlib
import functools
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cardwise.core.api import names, schedulerconfig
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.build import build_released_lease
from tests.cluster import binaries, devices, mps, pki, ports, versions
from tests.cluster.applying import apply
from tests.cluster.node import Node
from tests.cluster.processes import PATIENCE, NotReady, Process, run, wait_for

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "cardwise"
GIVEN = ("--set", "scheduler.mode=manual,image.repository=cardwise")  # what the chart has no default for
_SOME_URL = "https://webhook.invalid"  # stands for the webhook's address in what is rendered once
SERVICE_ACCOUNTS = ("cardwise-webhook", "cardwise-extender", "cardwise-deviceplugin")


class Parts:
    """Webhook, extender and one device plugin per real node."""

    def __init__(
        self, state: Path, api_url: str, extra: Mapping[str, Sequence[str]], *, real_cards: bool = False
    ) -> None:
        self._state = state
        self._api_url = api_url
        self._extra = extra
        self._real_cards = real_cards
        self._ports_file = state / "parts.json"

    @property
    def ports(self) -> dict[str, int]:
        if not self._ports_file.exists():
            keys = ("webhook", "webhook-metrics", "extender", "extender-bind", "extender-metrics")
            self._ports_file.write_text(json.dumps(dict(zip(keys, ports.free(len(keys)), strict=True))))
        numbers: dict[str, int] = json.loads(self._ports_file.read_text())
        return numbers

    def metrics_port(self, name: str) -> int:
        """Of the part that runs as the process `name`, the same as long as the cluster lives."""
        numbers = self.ports
        if f"{name}-metrics" not in numbers:
            (numbers[f"{name}-metrics"],) = ports.free(1)
            self._ports_file.write_text(json.dumps(numbers))
        return numbers[f"{name}-metrics"]

    @property
    def tls_dir(self) -> Path:
        return self._state / "extender-tls"

    def url(self, part: str) -> str:
        return f"https://127.0.0.1:{self.ports[part]}"

    def apply_crds(self, client: KubeClient) -> None:
        """The chart's CustomResourceDefinitions, until the apiserver serves them."""
        crds = [
            yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted((CHART / "files" / "crds").glob("*.yaml"))
        ]
        apply(client, crds)
        for crd in crds:
            spec = crd["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            if not wait_for(functools.partial(_is_served, client, path)):
                raise NotReady(f"the apiserver does not serve {path} after {PATIENCE:.0f} s")

    def apply_chart(self, client: KubeClient, *sets: str) -> None:
        """RBAC, webhook configurations and policies, and a kubeconfig per part. `sets`: values beside the defaults."""
        _create(client, paths.namespaces(), {"metadata": {"name": names.NAMESPACE}})
        apply(client, rendered(self.url("webhook"), *sets), names.NAMESPACE)
        # As if it had just been released: the first holder of a Lease that did not exist waits for its whole duration.
        lease = {"metadata": {"name": names.LEASE}, "spec": build_released_lease(client.server_time())}
        _create(client, paths.leases(names.NAMESPACE), lease)
        for account in SERVICE_ACCOUNTS:
            self._write_kubeconfig(client, account)

    def _write_kubeconfig(self, client: KubeClient, account: str) -> None:
        path = f"/api/v1/namespaces/{names.NAMESPACE}/serviceaccounts/{account}/token"
        answer = client.create(path, {"spec": {"expirationSeconds": 7 * 24 * 3600}})
        token = answer["status"]["token"]
        authority = self._state / "pki" / "ca.crt"
        pki.kubeconfig(self._kubeconfig(account), server=self._api_url, ca=authority, token=token)

    def _kubeconfig(self, account: str) -> Path:
        return self._state / "kubeconfig" / account

    def start(self, nodes: Sequence[Node]) -> None:
        """All parts; `wait_ready` waits for them."""
        self._start(
            "webhook",
            "cardwise-webhook",
            f"--bind=127.0.0.1:{self.ports['webhook']}",
            f"--metrics-bind=127.0.0.1:{self.ports['webhook-metrics']}",
        )
        self._start(
            "extender",
            "cardwise-extender",
            f"--bind=127.0.0.1:{self.ports['extender']}",
            f"--bind-port-bind=127.0.0.1:{self.ports['extender-bind']}",
            f"--tls-dir={self.tls_dir}",
            f"--metrics-bind=127.0.0.1:{self.ports['extender-metrics']}",
            "--lease-duration=5",  # what a test waits for that kills the extender and starts another
        )
        for node in nodes:
            self._start(
                f"deviceplugin-{node.name}",
                "cardwise-deviceplugin",
                f"--node-name={node.name}",
                *([] if self._real_cards else [f"--simulated-gpus={node.folder / 'cards.yaml'}"]),
                f"--kubelet-dir={node.kubelet_dir}",
                f"--cdi-dir={node.cdi_dir}",
                f"--state-dir={node.folder / 'cardwise'}",
                f"--cri-socket={node.cri_socket}",
                f"--mps-root={mps.root(node.folder)}",
                f"--metrics-bind=127.0.0.1:{self.metrics_port(f'deviceplugin-{node.name}')}",
                command=devices.command(node.folder),
            )

    def start_mps(self, nodes: Sequence[Node]) -> None:
        """An MPS manager on each node."""
        for node in nodes:
            mps.open_up(node.folder, self._state.parent)
            # With the rights of the device plugin, which has all that it needs.
            flags = mps.flags(node.folder, node.name, real_cards=self._real_cards)
            account, environment = "cardwise-deviceplugin", mps.environment(real_cards=self._real_cards)
            self._start(f"mps-{node.name}", "cardwise-mps", *flags, account=account, environment=environment)

    def wait_ready(self, part: str) -> None:
        """Until /readyz of webhook or extender says yes."""
        Process(self._state, part).wait_until(lambda: says_ready(self.ports[f"{part}-metrics"]), "/readyz")

    def wait_certified(self) -> None:
        """Until the extender has made the certificates that kube-scheduler reads when it starts."""
        files = [self.tls_dir / name for name in ("ca.crt", "client.crt", "client.key")]
        Process(self._state, "extender").wait_until(lambda: all(f.exists() for f in files), "certificates")

    def stanzas(self) -> list[dict[str, Any]]:
        """What kube-scheduler needs to reach the extender."""
        return schedulerconfig.extender_stanzas(
            filter_url=self.url("extender"),
            bind_url=self.url("extender-bind"),
            ca_file=str(self.tls_dir / "ca.crt"),
            cert_file=str(self.tls_dir / "client.crt"),
            key_file=str(self.tls_dir / "client.key"),
        )

    def _start(
        self,
        name: str,
        program: str,
        *flags: str,
        account: str = "",
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """`command`: instead of the program."""
        kubeconfig = self._kubeconfig(account or program)
        command = [
            *(command or [str(Path(sys.executable).parent / program)]), f"--kubeconfig={kubeconfig}", *flags
        ]  # fmt: skip
        part = name.partition("-")[0]
        scratch = self._state / "tmp"  # so that a killed part leaves nothing outside the state folder
        scratch.mkdir(exist_ok=True)
        Process(self._state, name).start(
            [*command, *self._extra.get(part, ())], {"TMPDIR": str(scratch), **(environment or {})}
        )


@functools.cache  # the same for all clusters of a run but for the address
def _rendered(*sets: str) -> str:
    settings = {
        "webhook.enabled": "false",
        "extender.enabled": "false",
        "deviceplugin.enabled": "false",
        "mps.enabled": "false",
        "deviceplugin.restrictToNode": "false",  # they are no pods here, so their tokens name no node
        "webhook.url": _SOME_URL,
        "webhook.timeoutSeconds": "15",  # a busy machine is slow, and that is no failure
    }
    assignments = [*(f"{key}={setting}" for key, setting in settings.items()), *sets]
    flags = [flag for assignment in assignments for flag in ("--set", assignment)]
    version = ["--kube-version", versions.version()]
    options = ["-n", names.NAMESPACE, "--no-hooks"]
    return run(
        [str(binaries.helm(print) / "helm"), "template", "cardwise", str(CHART), *options, *version, *GIVEN, *flags]
    )


def rendered(webhook_url: str, *sets: str) -> list[dict[str, Any]]:
    """The chart's objects without its workloads and CRDs, for a webhook at this address."""
    objects = yaml.load_all(_rendered(*sets).replace(_SOME_URL, webhook_url), yaml.CSafeLoader)
    return [manifest for manifest in objects if manifest]


def _is_served(client: KubeClient, path: str) -> bool:
    try:
        client.get(path)
    except errors.KubeError:
        return False
    return True


def _create(client: KubeClient, path: str, manifest: dict[str, Any]) -> None:
    """Unless it is there already."""
    with contextlib.suppress(errors.Conflict):
        client.create(path, manifest)


def says_ready(port: int) -> bool:
    """Whether /readyz on this port says yes."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def ca_is_patched(client: KubeClient) -> bool:
    """Whether the webhook has told the apiserver its CA."""
    configurations = [client.get(path) for path in webhook_configurations()]
    hooks = [hook for configuration in configurations for hook in configuration["webhooks"]]
    return all(base64.b64decode(hook["clientConfig"].get("caBundle", "")) for hook in hooks)


def webhook_configurations() -> list[str]:
    """The paths of those that the chart makes."""
    return [
        paths.mutatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION),
        paths.mutatingwebhookconfigurations(names.LATE_CONFIGURATION),
        paths.validatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION),
    ]
