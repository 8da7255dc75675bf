"""cardwise-extender: its settings, and the checks before it serves."""

import ipaddress
from pathlib import Path

import click
import structlog

from cardwise.core.api import names, policies
from cardwise.core.api.classes import CAPACITY_PER_CARD
from cardwise.core.gangs import gangs
from cardwise.core.placement.nodestate import MAX_CLIENTS
from cardwise.core.values.quantity import Unit
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.leases import election
from cardwise.runtime import logs
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthSettings
from cardwise.runtime.http.serving import Server, TlsFiles
from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    HOST_PORT,
    CommonSettings,
    HostPort,
    check_distinct,
    common_options,
    core_overcommit_option,
    headroom_option,
    namespace_option,
    report_startup_errors,
    tls_hosts_option,
)
from cardwise.runtime.tls import tls
from extender.api.app import MAX_BODY_BYTES
from extender.claims import protection
from extender.nomination import nominator
from extender.process import ExtenderSettings, Process

_log = structlog.get_logger(__name__)

# Threads. kube-scheduler calls filter for one pod at a time. The other threads serve inspect, and bind if
# kube-scheduler's configuration has a single extender stanza.
_FAST_THREADS = 4
# Threads for preempt, and for filter of pods with several card requests. Python runs one thread at a time, so with more
# threads each search would only be slower. A namespace uses at most one of the two threads, so that its searches do not
# delay searches for other namespaces.
_SEARCH_THREADS = 2
# Enough bind threads that all members of the largest gang can wait; this many more threads serve other binds.
_SPARE_BIND_THREADS = 32
_BIND_THREADS = gangs.MAX_MEMBERS + 3 * _SPARE_BIND_THREADS
_TLS_DIR = Path("/run/cardwise/extender-tls")  # for the files of the Secret
# Seconds after the arrival of a bind call in which its Binding may be posted: with a single extender stanza, and with a
# stanza for bind alone. Shorter than the stanza's `httpTimeout` (kube-scheduler's default is 5 s; the stanza for bind
# has 300 s): a Binding that is posted after kube-scheduler has given up takes a card for a pod that is scheduled again.
_BIND_DEADLINE_SECONDS, _BIND_DEADLINE_SECONDS_ON_OWN_PORT = 4.0, 60.0


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@click.option("--bind", type=HOST_PORT, default=HostPort("", 12345), help="Address that serves all verbs.")
@click.option(
    "--bind-port-bind",
    type=HOST_PORT,
    default=None,
    help="Second address, for the verb bind only. It has separate threads, because bind calls take long and must not "
    "delay filter. Without this option, --bind also serves bind.",
)
@namespace_option
@tls_hosts_option
@click.option(
    "--tls-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep CA and certificates in this directory, not in a Secret: ca.crt, tls.crt and tls.key. If it is empty, "
    "the extender creates its own CA and writes these files, with client.crt and client.key for kube-scheduler.",
)
@click.option(
    "--plain-http", is_flag=True, help="Serve without TLS, as gpushare's configuration does. On loopback only."
)
@click.option(
    "--policy",
    type=click.Choice(policies.CARD_POLICIES),
    default=policies.DEFAULT_POLICY,
    help=f"Placement policy of pods without the annotation {names.POLICY}.",
)
@headroom_option
# With more than CAPACITY_PER_CARD shares on a card, the node's capacity of a class would be used up first, and pods
# would wait although the card is free.
@click.option(
    "--max-clients",
    type=click.IntRange(min=1, max=CAPACITY_PER_CARD),
    default=None,
    help="Maximum number of shares on one GPU; MPS may allow fewer. Default: as many as MPS allows; "
    f"{MAX_CLIENTS} on nodes without an MPS manager.",
)
@core_overcommit_option
@click.option(
    "--max-gang-permit-seconds",
    type=click.FloatRange(min=1),
    default=gangs.MAX_PERMIT_SECONDS,
    help="Upper limit of a PodGroup's timeoutSeconds. If no further member of a gang reaches bind for this time, the "
    f"gang's GPUs are released. For a gang without a PodGroup the time is {gangs.PERMIT_SECONDS:g} s.",
)
@click.option(
    "--gang-reserve-seconds",
    type=click.FloatRange(min=0),
    default=gangs.RESERVE_AFTER_SECONDS,
    help="How long a gang waits before GPUs are reserved for it. Later pods cannot use these GPUs.",
)
@click.option(
    "--inspect-unit",
    type=click.Choice([str(unit) for unit in Unit]),
    default=str(Unit.MIB),
    help="Unit of the amounts in /inspect. In GiB, free memory is rounded down, as gpushare does.",
)
@click.option(
    "--lease-duration",
    type=click.FloatRange(min=3, max=election.MAX_DURATION),
    default=5.0,
    help="Seconds after which another extender takes over from a leader that is gone. Use the same value for all.",
)
@click.option(
    "--pod",
    default="",
    help="Name of the pod, in --namespace, that this extender runs in. It has the label "
    f"{names.LEADER} while this extender leads, so that a Service finds it. Default: no pod is labelled.",
)
@click.option(
    "--no-lease",
    is_flag=True,
    help="Serve without a Lease. Only with a single extender: two would give the same GPU twice.",
)
@click.option(
    "--claims",
    is_flag=True,
    help="Allocate GPUs by ResourceClaim: the extender chooses the node of pods with the scheduling gate "
    f"{names.ALLOCATION_GATE}, and kube-scheduler needs no configuration. Needs Kubernetes 1.34.",
)
def main(
    *,
    common: CommonSettings,
    bind: HostPort,
    bind_port_bind: HostPort | None,
    namespace: str,
    tls_dir: Path | None,
    tls_hosts: tuple[str, ...],
    plain_http: bool,
    **settings: object,
) -> None:
    """Tells kube-scheduler which nodes have a GPU for a pod, chooses the GPU, and binds the pod.

    Serves gpushare's paths, /gpushare-scheduler/filter, prioritize, bind and inspect, and preempt.
    """
    logs.configure("extender", common.log_level, common.log_format)
    deadline = _BIND_DEADLINE_SECONDS if bind_port_bind is None else _BIND_DEADLINE_SECONDS_ON_OWN_PORT
    extender_settings = ExtenderSettings(
        namespace=namespace,
        bind_deadline=deadline,
        nominate_above_nodes=nominator.MIN_NODES,
        **settings,  # type: ignore[arg-type]
    )
    addresses = [bind] if bind_port_bind is None else [bind, bind_port_bind]
    _check_addresses(addresses, tls_dir, plain_http=plain_http)
    check_distinct({"--bind": bind, "--bind-port-bind": bind_port_bind, "--metrics-bind": common.metrics_bind})
    with report_startup_errors("--kubeconfig"):
        client = KubeClient.load(common.kubeconfig, pool_size=64, user_agent="cardwise-extender")
    if not extender_settings.no_lease:
        _check_lease(client, namespace)
    if extender_settings.claims:
        _check_claim_policies(client, no_lease=extender_settings.no_lease)
    rotator = None
    files = None
    directory = tls_dir or _TLS_DIR
    if not plain_http:
        rotator = _make_rotator(client, directory, None if tls_dir else namespace, tls_hosts, addresses)
        if rotator is not None:
            with report_startup_errors("--tls-dir"):
                rotator.ensure_certificates()
        files = TlsFiles.in_dir(directory)
    max_waiting = _BIND_THREADS - _SPARE_BIND_THREADS if bind_port_bind is not None else 0
    shown = HealthSettings(
        bind=common.metrics_bind,
        config=configz.describe_options(click.get_current_context()),
        certificates=directory if files is not None else None,
    )
    process = Process(client, extender_settings, shown, rotator, max_waiting)
    Server(
        process.app,
        [bind],
        max_body_bytes=MAX_BODY_BYTES,
        threads=_FAST_THREADS,
        tls=files,
        client_ca=files is not None,
        on_worker_start=process.start,
        on_worker_stopping=process.begin_stop,
        on_worker_stop=process.stop,
        alive=process.is_alive,
        long_threads=_SEARCH_THREADS,
        slow_bind=bind_port_bind,
        slow_threads=_BIND_THREADS,
    ).run()


def _check_lease(client: KubeClient, namespace: str) -> None:
    """Check that the Lease can be created, by a dry run.

    Raises click.ClickException if the namespace does not exist or the extender may not create Leases. If the API server
    does not respond, this is only logged.
    """
    metadata = {"namespace": namespace, "name": names.LEASE}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    try:
        client.create(paths.leases(namespace), lease, query={"dryRun": "All"})
    except (errors.NotFound, errors.Forbidden) as error:
        raise click.ClickException(
            f"cannot create the Lease {names.LEASE} in namespace {namespace}: {error}; create the namespace, name "
            "another one with --namespace, or use --no-lease if this is the only extender"
        ) from error
    except errors.KubeError as error:
        if not isinstance(error, errors.AlreadyExists):
            _log.warning("failed to check the lease", error=str(error))


def _check_claim_policies(client: KubeClient, *, no_lease: bool) -> None:
    """Check that the policies which protect claims are enforced.

    Raises click.ClickException if one is not, or may not be read. If the API server does not respond, this is only
    logged, because the check is repeated before this process leads; without a Lease nothing is repeated.
    """
    try:
        problem = protection.find_problem(client)
    except errors.KubeError as error:
        if no_lease:
            raise click.ClickException(f"--claims: the policies that protect claims cannot be read: {error}") from error
        _log.warning("failed to check the policies of claims", error=str(error))
        return
    if problem is not None:
        raise click.ClickException(f"--claims: {problem}")


def _check_addresses(addresses: list[HostPort], tls_dir: Path | None, *, plain_http: bool) -> None:
    """Check that the options for addresses, TLS and --plain-http do not contradict each other.

    Raises click.UsageError with the options to write instead.
    """
    if not plain_http:
        return
    if tls_dir is not None:
        raise click.UsageError("--plain-http excludes --tls-dir")
    for address in addresses:
        if not _is_loopback(address.host):
            raise click.UsageError(
                f"--plain-http would let anyone who can reach {address} bind pods: "
                f"write 127.0.0.1:{address.port} as the address, or use TLS"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _make_rotator(
    client: KubeClient, directory: Path, namespace: str | None, hosts: tuple[str, ...], addresses: list[HostPort]
) -> tls.Rotator | None:
    """Make the rotator of the certificates; None if the directory has certificates that Cardwise did not issue.

    namespace: the namespace of the Secret with CA and certificates; None: they are in the directory.
    """
    own_directory = directory / "authority"
    if namespace is not None:
        store: tls.CertStore = tls.SecretStore(client, namespace, names.EXTENDER_TLS)
    elif (directory / "tls.crt").exists() and not own_directory.exists():
        return None
    else:
        store = tls.DirStore(own_directory)
    wildcards = ("", "0.0.0.0", "::")  # noqa: S104
    own_ips = [address.host for address in addresses if address.host not in wildcards]
    all_hosts = tls.server_hosts(
        "cardwise-extender", namespace or names.NAMESPACE, (*own_ips, *hosts), is_shared=namespace is not None
    )
    lifetimes = tls.Lifetimes.for_clients_without_reload()
    return tls.Rotator(store, all_hosts, directory, need_client=True, lifetimes=lifetimes, name="cardwise-extender")


if __name__ == "__main__":
    main()
