"""cardwise-extender: settings, and who starts what where."""

import gc
import ipaddress
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import prometheus_client
import structlog

from cardwise.core import names, policies
from cardwise.core.classes import MOST_CLIENTS
from cardwise.core.ledger import MAX_CLIENTS
from cardwise.core.quantity import MiB
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder
from cardwise.runtime import logs, tls
from cardwise.runtime.health import HealthServer
from cardwise.runtime.serving import Server, TlsFiles, WsgiApp
from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    DURATION,
    HOST_PORT,
    Common,
    HostPort,
    check_distinct,
    common_options,
    starting,
)
from extender import leadership
from extender.app import Parts, create_app
from extender.binder import Binder
from extender.decisions import Patience
from extender.feeds import Feeds
from extender.leadership import Alone, Leadership
from extender.metrics import Levels, Metrics
from extender.requests import Requests
from extender.state import State
from extender.telling import Telling
from extender.upkeep import Upkeep
from extender.verbs import Preferences

_log = structlog.get_logger(__name__)

_FAST_THREADS = 4  # the scheduler asks one pod at a time; the rest is for inspect and for binds of a single stanza
_BIND_THREADS = 256
_DEADLINE, _DEADLINE_ALONE = 4.0, 60.0  # seconds; below the timeouts of a single stanza and of our bind stanza


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that the command line says, except how to serve."""

    policy: str
    one_best_node: bool
    headroom: int
    max_clients: int
    bind_deadline: float
    hold_seconds: float
    ghost_seconds: float
    lease_namespace: str
    lease_name: str
    lease_duration: float
    no_lease: bool


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@click.option("--bind", type=HOST_PORT, default=HostPort("", 12345), help="Where all verbs are served.")
@click.option(
    "--bind-port-bind",
    type=HOST_PORT,
    default=None,
    help="A second address with threads of its own, for the verb bind alone: pods may wait there for long, and filter "
    "never feels it. Without it, bind is served with the others.",
)
@click.option(
    "--tls-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Directory of ca.crt, tls.crt and tls.key. An empty one gets a CA of our own, and client.crt and client.key "
    "for kube-scheduler.",
)
@click.option(
    "--tls-secret",
    default=None,
    metavar="NAMESPACE/NAME",
    help="Keep a CA of our own in this Secret, which all replicas share; the files go to --tls-dir.",
)
@click.option(
    "--tls-host",
    "tls_hosts",
    multiple=True,
    help="Name or address that kube-scheduler calls us by, for the certificate; may be given several times. "
    "Default: the Service's names, this machine's name and the loopback addresses.",
)
@click.option("--plain-http", is_flag=True, help="No TLS, as gpushare's configuration has it. On loopback only.")
@click.option(
    "--policy",
    type=click.Choice(sorted(policies.POLICIES)),
    default=policies.DEFAULT,
    help=f"Placement of pods that name none by the annotation {names.POLICY}.",
)
@click.option(
    "--one-best-node/--all-nodes",
    default=True,
    help="Whether filter answers the one best node, or all that fit for the scheduler to choose from. Pods with soft "
    f"preferences get all; the annotation {names.ONE_NODE} decides for a pod.",
)
@click.option(
    "--headroom",
    type=click.IntRange(min=0),
    default=0,
    help="MiB kept back on each card for driver, contexts and MPS server.",
)
# Above MOST_CLIENTS, what nodes offer of a class would be too small: pods would wait that have a card.
@click.option(
    "--max-clients",
    type=click.IntRange(min=1, max=MOST_CLIENTS),
    default=MAX_CLIENTS,
    help="Most shares on one card.",
)
@click.option(
    "--bind-deadline",
    type=DURATION,
    default=None,
    help="How long after a bind call has come it may still be posted. Must be below httpTimeout of the bind stanza. "
    "Default: 60s with --bind-port-bind (whose stanza has 300s), else 4s (kube-scheduler's default is 5s).",
)
@click.option(
    "--hold-seconds",
    type=click.FloatRange(min=1),
    default=30.0,
    help="How long filter's choice is held for a pod whose bind does not come.",
)
@click.option(
    "--ghost-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    help="How long the share of a pod that vanished while it ran counts, for its node to report it.",
)
@click.option(
    "--lease-namespace",
    default=names.NAMESPACE,
    help="Namespace of the Lease that decides which of several extenders answers.",
)
@click.option("--lease-name", default=names.LEASE, help="Its name. It is created where it does not exist.")
@click.option(
    "--lease-duration",
    type=click.FloatRange(min=3),
    default=15.0,
    help="Seconds after which another extender takes over from one that has vanished. The same for all of them.",
)
@click.option(
    "--no-lease",
    is_flag=True,
    help="Answer without a Lease. Only where there surely is one extender: two would give the same card twice.",
)
def main(
    *,
    common: Common,
    bind: HostPort,
    bind_port_bind: HostPort | None,
    tls_dir: Path | None,
    tls_secret: str | None,
    tls_hosts: tuple[str, ...],
    plain_http: bool,
    **settings: object,
) -> None:
    """Tells kube-scheduler which nodes have a card for a pod, chooses the card, and binds the pod.

    Serves gpushare's paths, /gpushare-scheduler/filter, prioritize, bind and inspect.
    """
    logs.setup("extender", common.log_level, common.log_format)
    if settings["bind_deadline"] is None:
        settings["bind_deadline"] = _DEADLINE if bind_port_bind is None else _DEADLINE_ALONE
    chosen = Settings(**settings)  # type: ignore[arg-type]
    addresses = [bind] if bind_port_bind is None else [bind, bind_port_bind]
    _check(addresses, tls_dir, tls_secret, plain_http=plain_http)
    check_distinct({"--bind": bind, "--bind-port-bind": bind_port_bind, "--metrics-bind": common.metrics_bind})
    with starting("--kubeconfig"):
        client = KubeClient.load(common.kubeconfig, pool_size=64, user_agent="cardwise-extender")
    if not chosen.no_lease:
        _check_lease(client, chosen.lease_namespace, chosen.lease_name)
    rotator = None
    files = None
    if not plain_http:
        directory = tls_dir or Path("/run/cardwise/extender-tls")
        rotator = _rotator(client, directory, tls_secret, tls_hosts, addresses)
        if rotator is not None:
            with starting("--tls-dir"):
                rotator.ensure()
        files = TlsFiles.in_dir(directory)
    process = _Process(client, chosen, common.metrics_bind, rotator)
    Server(
        process.app,
        [bind],
        threads=_FAST_THREADS,
        tls=files,
        client_ca=files is not None,
        on_worker_start=process.start,
        on_worker_stop=process.stop,
        slow_bind=bind_port_bind,
        slow_threads=_BIND_THREADS,
    ).run()


class _Process:
    """The parts of the serving process, which is a fork of the one that read the settings."""

    def __init__(
        self, client: KubeClient, settings: Settings, metrics_bind: HostPort, rotator: tls.Rotator | None
    ) -> None:
        patience = Patience(hold=settings.hold_seconds, ghost=settings.ghost_seconds)
        self._state = State(headroom=MiB(settings.headroom), max_clients=settings.max_clients, patience=patience)
        self._requests = Requests()
        self._events = EventRecorder(client, "cardwise-extender", instance=socket.gethostname())
        self._feeds = Feeds(client, self._state, self._events)
        self._leadership: Leadership = Alone()
        if not settings.no_lease:
            self._leadership = leadership.by_lease(
                client,
                settings.lease_namespace,
                settings.lease_name,
                duration=settings.lease_duration,
                state=self._state,
                catch_up=self._feeds.catch_up,
            )
        self._binder = Binder(
            client,
            self._state,
            self._requests,
            policy=settings.policy,
            seconds=settings.bind_deadline,
            leadership=self._leadership,
        )
        self._telling = Telling(client, self._state, self._events, leads=self._knows_and_leads)
        self._upkeep = Upkeep(client, self._state, tell=self._telling.steps)
        self._preferences = Preferences(policy=settings.policy, one_best_node=settings.one_best_node)
        self._metrics_bind = metrics_bind
        self._health: HealthServer | None = None
        self._rotator = rotator

    def app(self) -> WsgiApp:
        registry = prometheus_client.REGISTRY
        registry.register(Levels(self._state.marks, self._feeds.staleness, self._leads))
        parts = Parts(
            state=self._state,
            requests=self._requests,
            binder=self._binder,
            metrics=Metrics(registry),
            preferences=self._preferences,
            missing=self._feeds.missing,
            leadership=self._leadership,
            notice=self._telling.notices.waits_for_quota,
        )
        return create_app(parts)

    def start(self) -> None:
        # The lists of a big cluster make garbage of no use to look for; Feeds freezes what stays of them.
        gc.set_threshold(20_000, 20, 50)
        # Seconds for which a thread that computes (statuses, watch events) may keep filter's from running: by default
        # 5 ms, which was the p99 of filter while statuses were written (docs/measured.md).
        sys.setswitchinterval(0.0005)
        self._health = HealthServer(self._metrics_bind, ready=self._feeds.missing)
        self._health.start()
        self._feeds.start()
        self._leadership.start()
        self._telling.start()
        self._upkeep.start()
        if self._rotator is not None:
            self._rotator.start()

    def stop(self) -> None:
        self._leadership.stop()
        self._upkeep.stop()
        self._telling.stop()
        self._feeds.stop()
        self._events.stop()
        if self._rotator is not None:
            self._rotator.stop()
        if self._health is not None:
            self._health.stop()

    def _leads(self) -> bool:
        return self._leadership.term() is not None

    def _knows_and_leads(self) -> bool:
        return self._leads() and not self._feeds.missing()


def _check_lease(client: KubeClient, namespace: str, name: str) -> None:
    """Raises click.ClickException where there never can be a Lease. An API server that is away may come back."""
    metadata = {"namespace": namespace, "name": name}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    try:
        client.create(paths.leases(namespace), lease, query={"dryRun": "All"})
    except (errors.NotFound, errors.Forbidden) as error:
        raise click.ClickException(
            f"cannot start: no Lease {name} can be kept in namespace {namespace} ({error}); create the namespace, name "
            "another one by --lease-namespace, or write --no-lease where this is the only extender"
        ) from error
    except errors.KubeError as error:
        if not isinstance(error, errors.AlreadyExists):
            _log.warning("cannot check the lease yet", error=str(error))


def _check(addresses: list[HostPort], tls_dir: Path | None, tls_secret: str | None, *, plain_http: bool) -> None:
    """Raises click.UsageError with what to write instead."""
    if not plain_http:
        if tls_dir is None and tls_secret is None:
            raise click.UsageError(
                "give --tls-dir or --tls-secret; or --plain-http with --bind 127.0.0.1:PORT when kube-scheduler runs "
                "on this machine"
            )
        if tls_secret is not None and (tls_secret.count("/") != 1 or not all(tls_secret.split("/"))):
            raise click.UsageError(f"--tls-secret {tls_secret!r} is not NAMESPACE/NAME")
        return
    if tls_dir is not None or tls_secret is not None:
        raise click.UsageError("--plain-http excludes --tls-dir and --tls-secret")
    for address in addresses:
        if not _loopback(address.host):
            raise click.UsageError(
                f"--plain-http would let anybody who reaches {address} bind pods: "
                f"write 127.0.0.1:{address.port} as the address, or use TLS"
            )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _rotator(
    client: KubeClient, directory: Path, secret: str | None, hosts: tuple[str, ...], addresses: list[HostPort]
) -> tls.Rotator | None:
    """Who keeps the certificates good; None where somebody else has put them into the directory."""
    own = directory / "authority"
    if secret is not None:
        namespace, _, name = secret.partition("/")
        store: tls.CertStore = tls.SecretStore(client, namespace, name)
    elif (directory / "tls.crt").exists() and not own.exists():
        return None
    else:
        store = tls.DirStore(own)
    service = f"cardwise-extender.{names.NAMESPACE}"
    ours = [address.host for address in addresses if address.host and address.host not in ("0.0.0.0", "::")]  # noqa: S104
    wanted = hosts or (
        "cardwise-extender", service, f"{service}.svc", socket.gethostname(), "localhost", "127.0.0.1", "::1", *ours
    )  # fmt: skip
    return tls.Rotator(store, tuple(dict.fromkeys(wanted)), directory, need_client=True, name="cardwise-extender")


if __name__ == "__main__":
    main()
