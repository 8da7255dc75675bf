"""`cardwise doctor`: what would not work, or does not, with a remedy for each finding."""

import sys

import click

from cardwise.cli import console, options
from cardwise.cli.doctor import checks, finding
from cardwise.cli.render import printing


@click.command()
@options.cluster
@options.namespace
@options.cardwise_namespace
@click.option("--probe/--no-probe", default=True, show_default=True, help="Create probe pods, and delete them again.")
@click.option(
    "--probe-image", default="", help="Image of the probe pods, with a shell. Default: that of the device plugin."
)
@options.plain_output
def doctor(namespace: str | None, cardwise_namespace: str, *, probe: bool, probe_image: str, output: str) -> None:
    """Say what would not work, or does not, with a remedy for each finding.

    Probe pods are admitted by dry runs in the namespace of -n, and live in that of Cardwise: one of 1 MiB, whose image
    is never pulled, and on each node with cards one that asks for none and looks whether it got one. Ends with 1 where
    there is a problem.
    """
    client = options.client()
    probe_in = (namespace or client.namespace) if probe else ""
    found = list(checks.examine(client, cardwise_namespace, probe_in, probe_image))
    if output == "table":
        console.say(finding.table(found), nl=False)
    else:
        printing.dump(finding.as_json(found), output)
    if finding.worst(found) is finding.Severity.PROBLEM:
        sys.exit(1)
