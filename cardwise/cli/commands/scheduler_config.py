"""`cardwise scheduler-config`: prints the KubeSchedulerConfiguration with which kube-scheduler calls Cardwise."""

from pathlib import Path

import click
import yaml

from cardwise.cli import console
from cardwise.core.api import schedulerconfig


@click.command("scheduler-config")
@click.option("--filter-url", required=True, help="URL of all verbs but bind, https://HOST:PORT.")
@click.option("--bind-url", required=True, help="URL of the verb bind (the same URL if the extender has one port).")
@click.option(
    "--tls-dir",
    type=click.Path(path_type=Path),
    help="Folder with ca.crt, client.crt and client.key on kube-scheduler's machine.",
)
def scheduler_config(filter_url: str, bind_url: str, tls_dir: Path | None) -> None:
    """Print the KubeSchedulerConfiguration that makes kube-scheduler call the extender."""
    files = {} if tls_dir is None else {
        "ca_file": str(tls_dir / "ca.crt"),
        "cert_file": str(tls_dir / "client.crt"),
        "key_file": str(tls_dir / "client.key"),
    }  # fmt: skip
    if tls_dir is None and not (filter_url.startswith("http://") and bind_url.startswith("http://")):
        raise click.UsageError("https needs --tls-dir: without a CA kube-scheduler does not verify the extender")
    stanzas = schedulerconfig.extender_stanzas(filter_url=filter_url, bind_url=bind_url, **files)
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "percentageOfNodesToScore": 100,
        "extenders": stanzas,
    }
    console.print_data(yaml.safe_dump(config, sort_keys=False), nl=False)
