"""`cardwise doctor`: diagnoses the installation, with a remedy for each finding."""

import sys
from typing import TYPE_CHECKING

import click

from cardwise.cli import console, options
from cardwise.cli.doctor import before, checks, finding
from cardwise.cli.render import printing

if TYPE_CHECKING:
    from cardwise.kube.client import KubeClient


@click.command()
@options.cluster
@options.namespace
@options.cardwise_namespace
@click.option("--probe/--no-probe", default=True, show_default=True, help="Create probe pods, and delete them again.")
@click.option(
    "--probe-image",
    default="",
    help="Image of the probe pods; it needs a shell. Default: the image of the device plugin.",
)
@click.option(
    "--before-install",
    is_flag=True,
    help="Check a cluster without Cardwise, and suggest the values to install it with.",
)
@options.plain_output
def doctor(
    namespace: str | None, cardwise_namespace: str, *, probe: bool, probe_image: str, before_install: bool, output: str
) -> None:
    """Diagnose the installation and suggest fixes.

    Creates probe pods in the namespace of Cardwise. One has a share of 1 MiB; its image is never pulled. On each GPU
    node, another pod without a GPU request checks that it cannot see a GPU. A dry run tests admission in the namespace
    of -n; with --before-install in the namespace of --cardwise-namespace. Exits with 1 if there is a problem.
    """
    client = options.load_client()
    if before_install:
        _print_proposal(client, cardwise_namespace, output, probe=probe)
        return
    dry_run_namespace = (namespace or client.namespace) if probe else ""
    if dry_run_namespace:
        options.check_namespace(client, dry_run_namespace)
    findings = list(checks.run_all_checks(client, cardwise_namespace, dry_run_namespace, probe_image))
    if output == "table":
        console.print_lines(finding.table(findings))
    else:
        printing.print_object(finding.as_json(findings), output)
    if finding.worst_severity(findings) is finding.Severity.PROBLEM:
        sys.exit(1)


def _print_proposal(client: "KubeClient", namespace: str, output: str, *, probe: bool) -> None:
    """Print the findings before an installation, and the install command with the values that the findings propose."""
    findings = before.run_preinstall_checks(client, namespace, probe=probe)
    command = before.install_command(findings, namespace)
    if output == "table":
        console.print_lines(f"{finding.table(findings, before.KIND_COUNT)}\nProposed installation:\n{command}")
    else:
        printing.print_object(finding.as_json(findings) | {"command": command}, output)
    if finding.worst_severity(findings) is finding.Severity.PROBLEM:
        sys.exit(1)
