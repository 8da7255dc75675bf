"""python -m bench: numbers for docs/measured.md, as markdown."""

import click

from bench import timing
from bench.timing import Row


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measures Cardwise. Each command prints a table with the date and the machine."""


def _show(rows: list[Row]) -> None:
    click.echo(f"\nMeasured {timing.machine()}.")
    click.echo(timing.markdown(rows))


@main.command("filter")
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--classes", default=0, help="ResourceClasses over ten models, and a GPUQuota that counts twenty.")
@click.option("--calls", default=2000)
def filter_(nodes: int, pods: int, classes: int, calls: int) -> None:
    """filter and prioritize over HTTP with a big cluster in the ledger."""
    from bench import serving  # noqa: PLC0415 - parts of the benchmarks need what others do not

    _show(serving.filter_(nodes, pods, classes, calls))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=500)
def bind(nodes: int, pods: int, calls: int) -> None:
    """bind's own work: an API server that answers at once."""
    from bench import serving  # noqa: PLC0415

    _show(serving.bind(nodes, pods, calls))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
def memory(nodes: int, pods: int) -> None:
    """Start to ready, and memory."""
    from bench import serving  # noqa: PLC0415

    _show(serving.memory(nodes, pods))


main.add_command(memory, "start")


@main.command()
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--runs", default=3)
@click.option("--plain-http", is_flag=True)
@click.argument("options", nargs=-1)
def throughput(nodes: int, pods: int, runs: int, plain_http: bool, options: tuple[str, ...]) -> None:
    """Pods a second of the real kube-scheduler, with and without us. OPTIONS go to the extender, after `--`."""
    from bench import throughput as bench  # noqa: PLC0415

    _show(bench.run(nodes, pods, runs, options, plain_http=plain_http))


@main.command()
@click.option("--rate", default=300)
@click.option("--seconds", default=20)
@click.option("--creations", default=300)
def admission(rate: int, seconds: int, creations: int) -> None:
    """mutate and validate over TLS at a fixed rate, and pod creation with and without the webhooks."""
    from bench import admission as bench  # noqa: PLC0415

    _show(bench.run(rate, seconds, creations))


if __name__ == "__main__":
    main()
