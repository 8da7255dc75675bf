"""cardwise-webhook: settings, and who starts what where."""

import atexit
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import click

from cardwise.core import names
from cardwise.kube.client import KubeClient
from cardwise.runtime import logs, tls
from cardwise.runtime.cabundle import CaBundle
from cardwise.runtime.health import HealthServer
from cardwise.runtime.serving import Server, TlsFiles, WsgiApp
from cardwise.runtime.settings import (
    CONTEXT_SETTINGS,
    HOST_PORT,
    Common,
    HostPort,
    check_distinct,
    common_options,
    starting,
)
from webhook.app import create_app
from webhook.decisions import Settings
from webhook.spellings import NvidiaGpu
from webhook.validate import Oversize
from webhook.view import ClusterView

_THREADS = 4
_EXEMPT = ("kube-system", names.NAMESPACE)


class _CommaList(click.ParamType[tuple[str, ...]]):
    name = "a,b,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:  # noqa: ARG002
        if isinstance(value, tuple):
            return value
        return tuple(item.strip() for item in str(value).split(",") if item.strip())


class _ObjectName(click.ParamType[tuple[str, str]]):
    name = "namespace/name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        namespace, slash, name = str(value).partition("/")
        if not (namespace and slash and name) or "/" in name:
            self.fail(
                f"{value!r} is not NAMESPACE/NAME; write for example {names.NAMESPACE}/cardwise-webhook-tls", param, ctx
            )
        return namespace, name


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@click.option(
    "--bind", type=HOST_PORT, default="0.0.0.0:8443", help="Where /mutate, /validate and /healthz are served."
)
@click.option(
    "--tls-hosts",
    type=_CommaList(),
    default="",
    help="Names and addresses that the API server calls us by, for the certificate. "
    "Default: those of the Service and the loopback addresses; with --tls-dir also this machine's name.",
)
@click.option(
    "--tls-secret",
    type=_ObjectName(),
    default=f"{names.NAMESPACE}/cardwise-webhook-tls",
    help="Secret in which our CA and certificate are kept for all replicas; made if it is missing.",
)
@click.option(
    "--tls-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep them in this directory and not in a Secret. One that holds tls.crt, tls.key and ca.crt of somebody else "
    "(cert-manager) is used as it is, and read again when it changes.",
)
@click.option(
    "--webhook-configuration",
    default=names.WEBHOOK_CONFIGURATION,
    help="Name of the mutating and the validating configuration whose caBundle we write.",
)
@click.option("--runtime-class", default="", help="RuntimeClass for GPU pods that name none. Default: leave them.")
@click.option(
    "--oversize",
    type=click.Choice(["refuse", "wait"]),
    default="refuse",
    help="What to do with a pod that asks for more than any known card has: refuse it, or let it wait with a warning, "
    "for clusters that grow.",
)
@click.option(
    "--nvidia-gpu",
    type=click.Choice(["leave", "take"]),
    default="leave",
    help="What nvidia.com/gpu means. leave: it is of NVIDIA's own device plugin, and none of ours. take: whole cards "
    "of ours, in pods, workload templates and ResourceQuotas, for clusters without that plugin. The chart's "
    "webhook.nvidiaGpu, which decides what is brought to us, must say the same.",
)
@click.option(
    "--exempt-namespaces",
    type=_CommaList(),
    default=",".join(_EXEMPT),
    help="Namespaces whose pods and workloads are left as they are.",
)
def main(
    *,
    common: Common,
    bind: HostPort,
    tls_hosts: tuple[str, ...],
    tls_secret: tuple[str, str],
    tls_dir: Path | None,
    webhook_configuration: str,
    runtime_class: str,
    oversize: Oversize,
    nvidia_gpu: NvidiaGpu,
    exempt_namespaces: tuple[str, ...],
) -> None:
    """Rewrites pods, workloads and quotas that ask for cards, and refuses what can never run, with the reason.

    Called by the API server at /mutate, /mutate/defaults and /validate; the chart registers it.
    """
    logs.setup("webhook", common.log_level, common.log_format)
    check_distinct({"--bind": bind, "--metrics-bind": common.metrics_bind})
    with starting("--kubeconfig"):
        client = KubeClient.load(common.kubeconfig, user_agent="cardwise-webhook")
    settings = Settings(
        runtime_class=runtime_class,
        oversize=oversize,
        nvidia_gpu=nvidia_gpu,
        exempt_namespaces=frozenset(exempt_namespaces),
    )
    bundle = CaBundle(client, mutating=[webhook_configuration], validating=[webhook_configuration])
    directory = tls_dir or _scratch()
    secret = tls_secret if tls_dir is None else None
    certificates = _certificates(client, directory, secret=secret, hosts=tls_hosts, bind=bind, bundle=bundle)
    try:
        with starting("--tls-dir"):
            certificates.ensure()
    except tls.Unusable as error:
        raise click.ClickException(str(error)) from error
    process = _Process(client, settings, metrics_bind=common.metrics_bind, certificates=certificates, bundle=bundle)
    Server(
        process.app,
        [bind],
        threads=_THREADS,
        tls=TlsFiles(cert=directory / "tls.crt", key=directory / "tls.key"),
        on_worker_start=process.start,
        on_worker_stop=process.stop,
    ).run()


class _Process:
    """The parts of the serving process, which is a fork of the one that read the settings."""

    def __init__(
        self,
        client: KubeClient,
        settings: Settings,
        *,
        metrics_bind: HostPort,
        certificates: tls.Checks,
        bundle: CaBundle,
    ) -> None:
        self._settings = settings
        self._metrics_bind = metrics_bind
        self._certificates = certificates
        self._bundle = bundle
        self._view = ClusterView(client)
        self._health: HealthServer | None = None

    def app(self) -> WsgiApp:
        return create_app(self._view, self._settings).wsgi_app

    def start(self) -> None:
        self._health = HealthServer(self._metrics_bind, ready=self._problems)
        self._health.start()
        self._view.start()
        self._certificates.start()
        self._bundle.start()

    def stop(self) -> None:
        self._bundle.stop()
        self._certificates.stop()
        self._view.stop()
        if self._health is not None:
            self._health.stop()

    def _problems(self) -> list[str]:
        problems = self._view.problems()
        if not self._bundle.asserted.is_set():
            problems.append("the webhook configurations are missing, or do not carry our CA yet")
        return problems


def _certificates(
    client: KubeClient,
    directory: Path,
    *,
    secret: tuple[str, str] | None,
    hosts: tuple[str, ...],
    bind: HostPort,
    bundle: CaBundle,
) -> tls.Checks:
    """Who keeps the certificates good: we, but where somebody else has put them into the directory."""
    own = directory / "authority"
    if secret is not None:
        store: tls.CertStore = tls.SecretStore(client, *secret)
    elif (directory / "tls.crt").exists() and not own.exists():
        return tls.Given(directory, on_bundle=bundle.set)
    else:
        store = tls.DirStore(own)
    service = f"cardwise-webhook.{names.NAMESPACE}"
    ours = [bind.host] if bind.host not in ("", "0.0.0.0", "::") else []  # noqa: S104
    # In a Secret the certificate is that of all replicas.
    machine = [] if secret is not None else [socket.gethostname()]
    wanted = hosts or (f"{service}.svc", service, "localhost", "127.0.0.1", "::1", *machine, *ours)
    unique = tuple(dict.fromkeys(wanted))
    return tls.Rotator(store, unique, directory, on_bundle=bundle.set, name="cardwise-webhook")


def _scratch() -> Path:
    """For the certificates of a Secret while we run. Removed by this process only: workers are forks of it."""
    directory = Path(tempfile.mkdtemp(prefix="cardwise-webhook-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(directory, ignore_errors=True) if os.getpid() == owner else None)
    return directory


if __name__ == "__main__":
    main()
