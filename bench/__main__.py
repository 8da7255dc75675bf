"""python -m bench: numbers for docs/measured.md, as markdown."""

from pathlib import Path
from typing import Any

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
@click.option("--fresh", is_flag=True, help="Cardwise has just come: all the while first statuses are written.")
@click.argument("options", nargs=-1)
def filter_(nodes: int, pods: int, classes: int, calls: int, options: tuple[str, ...], *, fresh: bool) -> None:
    """filter and prioritize over HTTP with a big cluster in the ledger. OPTIONS go to the extender, after `--`."""
    from bench import serving  # noqa: PLC0415 - parts of the benchmarks need what others do not

    _show(serving.filter_(nodes, pods, classes, calls, fresh=fresh, options=options))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=500)
def bind(nodes: int, pods: int, calls: int) -> None:
    """bind's own work: an API server that answers at once."""
    from bench import serving  # noqa: PLC0415

    _show(serving.bind(nodes, pods, calls))


@main.command()
@click.option("--nodes", default=500)
@click.option("--calls", default=1500)
def pod(nodes: int, calls: int) -> None:
    """CPU of the extender for a pod, watch events and all; no scheduler, so that a busy machine does little harm."""
    from bench import serving  # noqa: PLC0415

    _show(serving.pod_cost(nodes, calls))


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
@click.option("--code", multiple=True, type=click.Path(path_type=Path), help="Checkouts to compare; else this one.")
@click.argument("options", nargs=-1)
def throughput(code: tuple[Path, ...], options: tuple[str, ...], plain_http: bool, **how: int) -> None:
    """Pods a second of the real kube-scheduler, with and without us. OPTIONS go to the extender, after `--`."""
    from bench import parts  # noqa: PLC0415
    from bench import throughput as bench  # noqa: PLC0415

    compared = [each.resolve() for each in code] or [parts.ROOT]
    _show(bench.run(compared, options, plain_http=plain_http, **how))


@main.command()
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--runs", default=3)
def batching(nodes: int, pods: int, runs: int) -> None:
    """Pods a second that ask for no card, with an extender, without, and with one beside; races of two."""
    from bench import batching as bench  # noqa: PLC0415

    _show(bench.run(nodes, pods, runs))


@main.command()
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--attackers", default=1000)
@click.option("--silent", default=3000, help="Connections to the port of metrics.")
@click.option("--calls", default=2000)
@click.option("--handshakes", default=50)
@click.option("--code", multiple=True, type=click.Path(path_type=Path), help="Checkouts to compare; else this one.")
def connections(code: tuple[Path, ...], **how: int) -> None:
    """filter over mutual TLS and new connections, beside many that are idle or slow and have shown no certificate."""
    from bench import connections as bench  # noqa: PLC0415
    from bench import parts  # noqa: PLC0415

    _show(bench.run([each.resolve() for each in code] or [parts.ROOT], **how))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--cards", default=8, help="Of each node.")
@click.option("--pods", default=1000)
@click.option("--runs", default=3)
@click.option("--policy", "policies", multiple=True, default=["binpack"])
def ahead(nodes: int, cards: int, pods: int, runs: int, policies: tuple[str, ...]) -> None:
    """Pods a second of the real kube-scheduler with and without nominating ahead, and of the stock one alone."""
    from bench import ahead as bench  # noqa: PLC0415

    _show(bench.run(nodes, cards, pods, runs, policies))


@main.command()
@click.option("--rate", default=300)
@click.option("--seconds", default=20)
@click.option("--creations", default=300)
def admission(rate: int, seconds: int, creations: int) -> None:
    """mutate and validate over TLS at a fixed rate, and pod creation with and without the webhooks."""
    from bench import admission as bench  # noqa: PLC0415

    _show(bench.run(rate, seconds, creations))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--members", default=500)
@click.option("--runs", default=20)
def gang(nodes: int, pods: int, members: int, runs: int) -> None:
    """The planner of gangs, by itself."""
    from bench import gang as bench  # noqa: PLC0415

    _show(bench.run(nodes, pods, members, runs))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--gangs", default=200)
@click.option("--rounds", default=300)
def turns(nodes: int, pods: int, gangs: int, rounds: int) -> None:
    """How long the extender's state is held at a time, while many gangs wait."""
    from bench import turns as bench  # noqa: PLC0415

    _show(bench.run(nodes, pods, gangs, rounds))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--runs", default=11)
@click.option("--only", default="", help="A part of the name of a situation.")
def bigturns(nodes: int, pods: int, runs: int, only: str) -> None:
    """The same for single big things: gangs by size, quotas, gang preemption, many nominated pods."""
    from bench import bigturns as bench  # noqa: PLC0415

    _show(bench.run(nodes, pods, runs, only))


@main.command()
@click.option("--nodes", default=100)
@click.option("--gangs", default=100)
@click.option("--size", default=8)
@click.option("--big", default=200)
@click.option("--runs", default=3, help="Of the big gang.")
def gangrate(nodes: int, gangs: int, size: int, big: int, runs: int) -> None:
    """Gangs on the real kube-scheduler: creation, gangs a second, and the last step of a big one."""
    from bench import gangrate as bench  # noqa: PLC0415

    _show(bench.run(nodes, gangs, size, big, runs))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=200)
def scrape(nodes: int, pods: int, calls: int) -> None:
    """Prometheus' look at the extender, with a big cluster in the ledger."""
    from bench import scrape as bench  # noqa: PLC0415

    _show(bench.run(nodes, pods, calls))


@main.command()
@click.option("--seconds", default=60)
@click.option("--probes", default=50)
def agent(seconds: int, probes: int) -> None:
    """The share agent: memory, CPU when idle, and what a startup probe costs."""
    from bench import agent as bench  # noqa: PLC0415

    _show(bench.run(seconds, probes))


@main.command()
@click.option("--traces", type=click.Path(path_type=Path), help="The trace openb; else CARDWISE_OPENB names it.")
@click.option("--trace", multiple=True, help="Its lists of pods; else those that FGD's results are published of.")
@click.option("--policy", multiple=True, default=["binpack", "fgd", "priced"])
@click.option("--seeds", default=2)
@click.option("--first-seed", default=42, help="Those from 42 to 47 are what numbers in the policies were chosen on.")
@click.option("--known", is_flag=True, help="The policies know the pods beforehand, as FGD does where it is published.")
@click.option("--churn", is_flag=True, help="Pods leave as well, in place of filling.")
@click.option("--lifetimes", default=3.0, help="Of --churn.")
@click.option("--bounded", is_flag=True, help="Decisions that score at most 256 nodes, as in the extender.")
@click.option("--decisions", default=0, help="In place of filling: how long so many take.")
@click.option("--nodes", default=5000, help="Of --decisions.")
@click.option("--processes", default=2)
def placement(
    traces: Path | None, trace: tuple[str, ...], policy: tuple[str, ...], seeds: int, processes: int, **how: Any
) -> None:
    """What each policy fills of the cards, on a trace; results go to standard error as they come."""
    from bench import placement as bench  # noqa: PLC0415

    at = bench.folder(traces)
    which = range(how["first_seed"], how["first_seed"] + seeds)
    if how["decisions"]:
        _show(bench.deciding(at, (*trace, "default")[0], policy, how["nodes"], how["decisions"]))
    elif how["churn"]:
        for name in trace or ("default",):
            _show(bench.churning(at, name, policy, which, processes, lifetimes=how["lifetimes"]))
    else:
        _show(bench.filling(at, trace, policy, which, processes, known=how["known"], bounded=how["bounded"]))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=10)
def top(nodes: int, pods: int, calls: int) -> None:
    """The first screen of `cardwise top`, from the start of the program to its end."""
    from bench import looking  # noqa: PLC0415

    _show(looking.first_screen(nodes, pods, calls))


@main.command()
@click.option("--nodes", default=4)
@click.option("--times", default=10)
def failover(nodes: int, times: int) -> None:
    """From the end of a leading extender to the first answer of the next: told to end, and killed."""
    from bench import failover as bench  # noqa: PLC0415

    _show(bench.run(nodes, times))


if __name__ == "__main__":
    main()
