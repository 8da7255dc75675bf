"""`cardwise inspect`: its options. What it shows is imported when it is called: `--help` waits for none of it."""

import click

from cardwise.cli import options


@click.command()
@options.cluster
@click.option("-d", "--details", is_flag=True, help="Show the pods of each node and what they hold, and devices.")
@options.plain_output
@click.argument("node", required=False)
def inspect(details: bool, output: str, node: str | None) -> None:
    """Cards and who holds how much of them, in MiB: the tables of `kubectl inspect gpushare`."""
    from cardwise.cli.render import inspection  # noqa: PLC0415 - see above

    inspection.show(options.client(), node, output, details=details)
