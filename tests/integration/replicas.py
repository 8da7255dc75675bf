"""Several extenders and webhooks of one cluster, each kind behind a balancer, and everybody told so."""

import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cardwise.core.api import names, schedulerconfig
from cardwise.core.api.policies import FALLBACK_POLICY
from cardwise.kube import errors, paths
from tests.cluster import Cluster, ports
from tests.cluster.parts import says_ready, webhook_configurations
from tests.cluster.processes import Process
from tests.integration.balancer import Balancer
from tests.integration.sharing import scheduler_tls, workload

WEBHOOK = (str(Path(sys.executable).parent / "cardwise-webhook"),)
ROTATING_WEBHOOK = (sys.executable, "-m", "tests.integration.rotatingwebhook")


def extender_replica(
    cluster: Cluster,
    name: str = "extender-b",
    kubeconfig: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Process, int, int]:
    """Beside the first, with the same identity and certificates; and its two ports."""
    fast, slow, metrics = ports.free(3)
    process = cluster.process(name)
    process.start(
        [
            str(Path(sys.executable).parent / "cardwise-extender"),
            f"--kubeconfig={kubeconfig or cluster.state_dir / 'kubeconfig' / 'cardwise-extender'}",
            f"--bind=127.0.0.1:{fast}",
            f"--bind-port-bind=127.0.0.1:{slow}",
            f"--tls-dir={cluster.parts.tls_dir}",
            f"--metrics-bind=127.0.0.1:{metrics}",
            "--lease-duration=5",
            f"--policy={FALLBACK_POLICY}",  # as the first of `conftest.SpecOf`
        ],
        environment,
    )
    ready(process)
    return process, fast, slow


def webhook_replica(
    cluster: Cluster, name: str, command: Sequence[str] = WEBHOOK, environment: Mapping[str, str] | None = None
) -> tuple[Process, int]:
    """With the same identity and Secret as the first; and its port. `environment`: settings besides."""
    port, metrics = ports.free(2)
    process = cluster.process(name)
    process.start(
        [
            *command,
            f"--kubeconfig={cluster.state_dir / 'kubeconfig' / 'cardwise-webhook'}",
            f"--bind=127.0.0.1:{port}",
            f"--metrics-bind=127.0.0.1:{metrics}",
        ],
        environment,
    )
    ready(process)
    return process, port


def ready(process: Process) -> None:
    """Until it says that it is."""
    start_line = process.recorded
    assert start_line is not None
    (bind,) = [word for word in start_line.command if word.startswith("--metrics-bind=")]
    process.wait_until(lambda: says_ready(int(bind.rpartition(":")[2])), "/readyz")


@dataclass(frozen=True)
class Pair:
    """Two extenders: processes, and the ports at which they are asked who leads."""

    cluster: Cluster
    ports: Mapping[str, int]  # by name of the process

    @property
    def second(self) -> Process:
        return self.cluster.process("extender-b")

    def leader(self) -> Process:
        """The one that answers; waits until there is one."""
        findings: list[str] = []

        def anybody() -> bool:
            findings[:] = [name for name in self.ports if self.leads(name)]
            return bool(findings)

        self.cluster.wait(anybody, "an extender leads")
        return self.cluster.process(findings[0])

    def other(self, process: Process) -> Process:
        (name,) = set(self.ports) - {process.name}
        return self.cluster.process(name)

    def epoch(self) -> str:
        """The fencing token of the present holder of the Lease (extender/leadership/leadership.py)."""
        lease = self.cluster.api.get(paths.leases(names.NAMESPACE, names.LEASE))
        lease_state = (lease["metadata"]["uid"], lease["spec"]["leaseTransitions"], lease["spec"]["holderIdentity"])
        return "/".join(map(str, (names.NAMESPACE, names.LEASE, *lease_state)))

    def leads(self, name: str) -> bool:
        """False also for one that is gone or hangs."""
        return "this extender holds" in self._says(name)

    def stands_by(self, name: str) -> bool:
        """It answers that another leads."""
        return "not the leader" in self._says(name)

    def _says(self, name: str) -> str:
        url = f"https://127.0.0.1:{self.ports[name]}/readyz?verbose"
        try:
            context = scheduler_tls(self.cluster.parts.tls_dir)
            with urllib.request.urlopen(url, context=context, timeout=2) as answer:
                return str(answer.read())
        except OSError:
            return ""


@contextmanager
def two_extenders(
    cluster: Cluster, kubeconfig: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Pair]:
    """Both are behind balancers, and kube-scheduler asks these. `kubeconfig` and `environment`: of the second one."""
    process, fast, slow = extender_replica(cluster, kubeconfig=kubeconfig, environment=environment)
    first = cluster.parts.ports
    fronts = [Balancer([first["extender"], fast]), Balancer([first["extender-bind"], slow])]
    tls = cluster.parts.tls_dir
    stanzas = schedulerconfig.extender_stanzas(
        filter_url=f"https://127.0.0.1:{fronts[0].port}",
        bind_url=f"https://127.0.0.1:{fronts[1].port}",
        ca_file=str(tls / "ca.crt"),
        cert_file=str(tls / "client.crt"),
        key_file=str(tls / "client.key"),
    )
    try:
        _restart_scheduler(cluster, stanzas)
        yield Pair(cluster, {"extender": first["extender"], process.name: fast})
    finally:
        _restart_scheduler(cluster, cluster.parts.stanzas())
        process.stop()
        for balancer in fronts:
            balancer.close()


@contextmanager
def webhooks(
    cluster: Cluster,
    count: int,
    command: Sequence[str] = WEBHOOK,
    *,
    alone: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """So many besides the first, all behind one balancer, which the API server asks. `alone`: without the first.
    `environment`: of them.
    """
    started: list[Process] = []
    replicas = [] if alone else [cluster.parts.ports["webhook"]]
    first = cluster.process("webhook")
    try:
        for letter in "bcdefgh"[:count]:
            process, port = webhook_replica(cluster, f"webhook-{letter}", command, environment)
            started.append(process)
            replicas.append(port)
        front = Balancer(replicas)
        point_webhooks_to(cluster, f"https://127.0.0.1:{front.port}")
        if alone:
            first.stop()
            _wait_asked(cluster)
        yield started
    finally:
        if alone:
            for process in started:
                process.stop()  # before the first takes over what they have in the Secret
            first.restart()
            cluster.parts.wait_ready("webhook")
        point_webhooks_to(cluster, cluster.parts.url("webhook"))
        for process in started:
            process.stop()
        front.close()
        _wait_asked(cluster)


def point_webhooks_to(cluster: Cluster, url: str) -> None:
    for path in webhook_configurations():
        hooks = cluster.api.get(path)["webhooks"]
        patch = []
        for i, hook in enumerate(hooks):
            tail = "/" + hook["clientConfig"]["url"].split("/", 3)[3]
            patch.append({"op": "replace", "path": f"/webhooks/{i}/clientConfig/url", "value": url + tail})
        cluster.api.patch(path, patch, "json")


def _wait_asked(cluster: Cluster) -> None:
    """Until the API server asks the webhooks where they are now: it learns of that by a watch."""

    def answered() -> bool:
        with suppress(errors.Invalid, errors.Forbidden):  # a webhook's own word
            cluster.api.create(paths.pods("default"), workload("probe", gpu_mem=1), query={"dryRun": "All"})
        return True

    cluster.wait(answered, "the API server asks the webhooks")


def _restart_scheduler(cluster: Cluster, stanzas: list[dict]) -> None:
    cluster.process("kube-scheduler").stop()
    cluster.control_plane.start_scheduler(stanzas)
