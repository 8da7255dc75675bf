"""cardwise-webhook: the command, its settings, and the start of its components."""

import atexit
import os
import shutil
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import prometheus_client
import structlog

from cardwise.core.api import names
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import SmPercent
from cardwise.core.values.quantity import MiB
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.runtime import logs
from cardwise.runtime.http import configz
from cardwise.runtime.http.health import HealthServer, HealthSettings
from cardwise.runtime.http.httpcalls import WsgiApp
from cardwise.runtime.http.serving import Server, TlsFiles
from cardwise.runtime.settings import (
    COMMA_LIST,
    CONTEXT_SETTINGS,
    HOST_PORT,
    CommonSettings,
    HostPort,
    check_distinct,
    common_options,
    headroom_option,
    namespace_option,
    option,
    report_startup_errors,
    tls_hosts_option,
)
from cardwise.runtime.tls import tls
from cardwise.runtime.tls.cabundle import CaBundle
from cardwise.runtime.tls.expiry import Expiry
from webhook import metrics
from webhook.cluster.view import ClusterView
from webhook.pods import scheduling
from webhook.pods.amounts import MIN_SHARE_MIB
from webhook.pods.context import (
    AGENT_USER,
    DEFAULT_SCHEDULER,
    AgentChoice,
    AgentSettings,
    OversizePolicy,
    WebhookSettings,
)
from webhook.server.app import BINDINGS_PATH, MAX_BODY, create_app, namespace_of
from webhook.templates.spellings import NvidiaGpu

_log = structlog.get_logger(__name__)

_THREADS = 4
LIFETIMES, CHECK_SECONDS = tls.Lifetimes(), tls.CHECK_INTERVAL_SECONDS  # of the certificates
_EXEMPT_NAMESPACES = ("kube-system", names.NAMESPACE)


class _Taints(click.ParamType[tuple[Mapping[str, Any], ...]]):
    """Taints on the command line, converted to the tolerations that pods get."""

    name = "key:effect,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(
                scheduling.toleration_of_taint(taint.strip()) for taint in str(value).split(",") if taint.strip()
            )
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(context_settings=CONTEXT_SETTINGS)
@common_options
@option("--bind", type=HOST_PORT, default="0.0.0.0:8443", help="Where /mutate, /validate and /healthz are served.")
@namespace_option
@tls_hosts_option
@option(
    "--tls-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep CA and certificate in this directory, not in a Secret. If another program (cert-manager) maintains "
    "tls.crt, tls.key and ca.crt there, the webhook uses these files and reloads them when they change.",
)
@option(
    "--client-ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="PEM file of the CA that has issued the API server's client certificate. The webhook then rejects all other "
    "callers. Default: every caller gets answers, but refusals do not show the quotas and usage of namespaces.",
)
@option("--runtime-class", default="", help="RuntimeClass for GPU pods that name none. Default: they get none.")
@option(
    "--tolerated-taints",
    type=_Taints(),
    default="nvidia.com/gpu:NoSchedule",
    help="GPU pods get tolerations for these taints: KEY:EFFECT (any value) or KEY=VALUE:EFFECT. The chart's "
    "webhook.toleratedTaints decides which pods the API server sends, and must be the same.",
)
@option(
    "--oversize",
    type=click.Choice(["refuse", "wait"]),
    default="refuse",
    help="What to do with a pod that requests more than any known GPU has: refuse it, or let it wait with a "
    "warning, for clusters that scale up.",
)
@headroom_option
@option(
    "--nvidia-gpu",
    type=click.Choice(["leave", "take"]),
    default="leave",
    help="Meaning of nvidia.com/gpu. leave: it belongs to NVIDIA's device plugin, and the webhook does not change it. "
    "take: it means whole GPUs of Cardwise, in pods, workload templates and ResourceQuotas; for clusters without "
    "that plugin. The chart's webhook.nvidiaGpu decides which objects the API server sends: set it to the "
    "same value.",
)
@option(
    "--exempt-namespaces",
    type=COMMA_LIST,
    default=",".join(_EXEMPT_NAMESPACES),
    help="Namespaces whose pods and workloads the webhook does not change.",
)
@option(
    "--gang-schedulers",
    type=COMMA_LIST,
    default=DEFAULT_SCHEDULER,
    help="Schedulers that call the extender. Gangs of their pods are gated and bound together. Pods of other "
    "schedulers (Volcano, coscheduling) are never members of Cardwise gangs. The chart's webhook.gangSchedulers "
    "decides which "
    "objects the API server sends, and must be the same.",
)
@option(
    "--scheduler",
    default="",
    help="Scheduler for GPU pods that name none: a second scheduler that calls the extender, beside a "
    "kube-scheduler that does not. Name it in --gang-schedulers too. Default: Kubernetes' own.",
)
@option(
    "--claims",
    is_flag=True,
    help="Shares are allocated as ResourceClaims (scheduler.mode=claims of the chart): pods that request a GPU get a "
    "scheduling gate and a claim, which kube-scheduler obeys without configuration. The extender and the device "
    "plugins need the same option. Needs Kubernetes 1.34.",
)
@option(
    "--isolation",
    type=click.Choice([str(demand) for demand in Isolation]),
    default=str(Isolation.NONE),
    help="The minimum isolation of pods with a share. A namespace can require more by the annotation "
    f"{names.ISOLATION}. none: pods may opt out of MPS; their GPU then takes no pods with MPS. advisory: they may not "
    "opt out. mps: they run only with MPS. Pods that request only whole GPUs are exempt.",
)
@option(
    "--sm-percent",
    type=click.Choice([str(choice) for choice in SmPercent]),
    default=str(SmPercent.CORE),
    help="Limits the SMs of pods with MPS if neither the pod nor its namespace has the annotation "
    f"{names.SM_PERCENT}. core: the limit is the request of {names.GPU_CORE}; pods without this request have no limit. "
    "memory: for pods without this request, the limit is the percentage of the GPU's memory that they request.",
)
@option(
    "--share-agent",
    type=click.Choice(["always", "mps", "never"]),
    default="mps",
    help="Which pods with a share get the share agent. always: all. mps: pods that demand MPS; if some node has MPS, "
    "also pods that accept it. never: none. A pod's annotation "
    f"{names.SHARE_AGENT} overrides this. Pods with the frameworks' hook always get the agent, except with the "
    "annotation never.",
)
@option(
    "--share-agent-image",
    default="",
    help="Image of the share agent: Cardwise's own image. Without an image no pod gets the agent.",
)
@option(
    "--share-agent-user",
    type=click.IntRange(min=0),
    default=AGENT_USER,
    help="UID that the share agent runs as. 0: set no UID, for clusters that assign each namespace a range "
    "(OpenShift).",
)
def main(
    *,
    common: CommonSettings,
    bind: HostPort,
    namespace: str,
    tls_hosts: tuple[str, ...],
    tls_dir: Path | None,
    client_ca: Path | None,
    runtime_class: str,
    tolerated_taints: tuple[Any, ...],
    oversize: OversizePolicy,
    headroom: MiB | None,
    nvidia_gpu: NvidiaGpu,
    exempt_namespaces: tuple[str, ...],
    gang_schedulers: tuple[str, ...],
    scheduler: str,
    claims: bool,
    isolation: str,
    sm_percent: str,
    share_agent: AgentChoice,
    share_agent_image: str,
    share_agent_user: int,
) -> None:
    """Rewrites pods, workloads and quotas that request GPUs, and refuses what can never run, with the reason.

    Called by the API server at /mutate, /mutate/defaults, /validate, /validate/bindings and /advise; the chart
    registers it.
    """
    logs.configure("webhook", common.log_level, common.log_format)
    check_distinct({"--bind": bind, "--metrics-bind": common.metrics_bind})
    with report_startup_errors("--kubeconfig"):
        client = KubeClient.load(common.kubeconfig, user_agent="cardwise-webhook")
    with report_startup_errors("--client-ca"):
        ssl.create_default_context(cafile=client_ca)
    settings = WebhookSettings(
        runtime_class=runtime_class,
        tolerated=tolerated_taints,
        oversize=oversize,
        min_share=MIN_SHARE_MIB,
        callers_known=client_ca is not None,
        nvidia_gpu=nvidia_gpu,
        exempt_namespaces=frozenset(exempt_namespaces),
        gang_schedulers=frozenset(gang_schedulers),
        scheduler=scheduler,
        claims=claims,
        isolation=Isolation(isolation),
        sm_percent=SmPercent(sm_percent),
        share_agent=AgentSettings(choice=share_agent, image=share_agent_image, user=share_agent_user),
    )
    if share_agent != "never" and not share_agent_image:
        _log.warning("no pod gets the share agent: set --share-agent-image, or --share-agent=never")
    bundle = CaBundle(
        client,
        (
            paths.mutatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION),
            paths.mutatingwebhookconfigurations(names.LATE_CONFIGURATION),
            paths.validatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION),
        ),
    )
    external = tls_dir is not None and (tls_dir / "tls.crt").exists() and not (tls_dir / "authority").exists()
    directory = tls_dir if tls_dir is not None and not external else _make_scratch_folder()
    if tls_dir is not None and external:
        bundle.keep_others = True
        certificates: tls.CertificateManager = tls.ExternalCertificates(
            tls_dir, directory, on_bundle=bundle.set_bundle, is_published=bundle.asserted.is_set
        )
    else:
        certificates = _start_certificates(
            client, directory, namespace, in_secret=tls_dir is None, hosts=tls_hosts, bind=bind, bundle=bundle
        )
        bundle.on_other = certificates.check_soon
    try:
        with report_startup_errors("--tls-dir"):
            certificates.ensure_certificates()
    except tls.UnusableCertificates as error:
        raise click.ClickException(str(error)) from error
    health_settings = HealthSettings(
        bind=common.metrics_bind, config=configz.describe_options(click.get_current_context()), certificates=directory
    )
    process = _Process(
        client,
        settings,
        headroom=headroom,
        health_settings=health_settings,
        certificates=certificates,
        bundle=bundle,
    )
    Server(
        process.make_app,
        [bind],
        max_body_bytes=MAX_BODY,
        threads=_THREADS,
        tls=TlsFiles(cert=directory / "tls.crt", key=directory / "tls.key", ca=client_ca),
        client_ca=client_ca is not None,
        call_owner=namespace_of,
        prompt=[BINDINGS_PATH],
        on_worker_start=process.start,
        on_worker_stop=process.stop,
    ).run()


class _Process:
    """The components of the serving process, which is a fork of the process that read the settings."""

    def __init__(
        self,
        client: KubeClient,
        settings: WebhookSettings,
        *,
        headroom: MiB | None,
        health_settings: HealthSettings,
        certificates: tls.CertificateManager,
        bundle: CaBundle,
    ) -> None:
        self._settings = settings
        self._health_settings = health_settings
        self._certificates = certificates
        self._bundle = bundle
        self._view = ClusterView(client, kept_back=headroom)
        self._health: HealthServer | None = None

    def make_app(self) -> WsgiApp:
        prometheus_client.REGISTRY.register(metrics.StalenessCollector(self._view.staleness))
        if self._health_settings.certificates is not None:
            prometheus_client.REGISTRY.register(Expiry(self._health_settings.certificates))
        return create_app(self._view, self._settings).wsgi_app

    def start(self) -> None:
        self._health = HealthServer(
            self._health_settings.bind, ready=self._problems, config=self._health_settings.config
        )
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
            problems.append("the webhook configurations are missing or do not contain this webhook's CA yet")
        return problems


def _start_certificates(
    client: KubeClient,
    directory: Path,
    namespace: str,
    *,
    in_secret: bool,
    hosts: tuple[str, ...],
    bind: HostPort,
    bundle: CaBundle,
) -> tls.CertificateManager:
    """Make and renew the certificates."""
    if in_secret:
        store: tls.CertStore = tls.SecretStore(client, namespace, names.WEBHOOK_TLS)
    else:
        store = tls.DirStore(directory / "authority")
    bound_host = [bind.host] if bind.host not in ("", "0.0.0.0", "::") else []  # noqa: S104
    all_hosts = tls.server_hosts("cardwise-webhook", namespace, (*bound_host, *hosts), is_shared=in_secret)
    return tls.Rotator(
        store,
        all_hosts,
        directory,
        lifetimes=LIFETIMES,
        interval=CHECK_SECONDS,
        on_bundle=bundle.set_bundle,
        name="cardwise-webhook",
    )


def _make_scratch_folder() -> Path:
    """Create the folder for the certificates of a Secret. Only this process removes the folder, not its forks."""
    directory = Path(tempfile.mkdtemp(prefix="cardwise-webhook-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(directory, ignore_errors=True) if os.getpid() == owner else None)
    return directory


if __name__ == "__main__":
    main()
