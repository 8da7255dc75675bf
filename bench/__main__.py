"""`python -m bench`: prints the numbers of docs/measured.md, as markdown tables."""

from pathlib import Path
from typing import Any

import click

from bench import timing
from bench.timing import Row


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure Cardwise. Each command prints a table with the date and the machine."""


def _print(rows: list[Row]) -> None:
    click.echo(f"\nMeasured {timing.machine()}.")
    click.echo(timing.markdown(rows))


@main.command("filter")
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--classes", default=0, help="Number of ResourceClasses over ten models; adds a GPUQuota.")
@click.option("--calls", default=2000)
@click.option("--fresh", is_flag=True, help="No card has a status yet, as just after the installation.")
@click.argument("options", nargs=-1)
def filter_(nodes: int, pods: int, classes: int, calls: int, options: tuple[str, ...], *, fresh: bool) -> None:
    """filter and prioritize over HTTP, with a big cluster. OPTIONS after `--` are passed to the extender."""
    from bench import serving  # noqa: PLC0415 - not all benches need all dependencies

    _print(serving.measure_filter(nodes, pods, classes, calls, fresh=fresh, options=options))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=500)
def bind(nodes: int, pods: int, calls: int) -> None:
    """bind with an API server that responds at once: the extender's own work."""
    from bench import serving  # noqa: PLC0415

    _print(serving.measure_bind(nodes, pods, calls))


@main.command()
@click.option("--nodes", default=500)
@click.option("--calls", default=1500)
def pod(nodes: int, calls: int) -> None:
    """CPU of the extender per pod, with its watch events. Runs no scheduler, so other load matters little."""
    from bench import serving  # noqa: PLC0415

    _print(serving.measure_pod(nodes, calls))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
def memory(nodes: int, pods: int) -> None:
    """Time from start to ready, and memory."""
    from bench import serving  # noqa: PLC0415

    _print(serving.measure_memory(nodes, pods))


main.add_command(memory, "start")


@main.command()
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--runs", default=3)
@click.option("--plain-http", is_flag=True)
@click.option(
    "--code",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A checkout to measure. Default: this one.",
)
@click.argument("options", nargs=-1)
def throughput(code: tuple[Path, ...], options: tuple[str, ...], plain_http: bool, **counts: int) -> None:
    """Pods per second of the real kube-scheduler, with and without Cardwise. OPTIONS after `--`: of the extender."""
    from bench import processes  # noqa: PLC0415
    from bench import throughput as bench  # noqa: PLC0415

    checkouts = [path.resolve() for path in code] or [processes.ROOT]
    _print(bench.run(checkouts, options, plain_http=plain_http, **counts))


@main.command()
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--runs", default=3)
def batching(nodes: int, pods: int, runs: int) -> None:
    """Pods per second without GPU requests, with and without an extender or a second scheduler; races of schedulers."""
    from bench import batching as bench  # noqa: PLC0415

    _print(bench.run(nodes, pods, runs))


@main.command()
@click.option("--nodes", default=500)
@click.option("--pods", default=2000)
@click.option("--attackers", default=1000)
@click.option("--silent", default=3000, help="Connections to the metrics port.")
@click.option("--calls", default=2000)
@click.option("--handshakes", default=50)
@click.option(
    "--code",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A checkout to measure. Default: this one.",
)
def connections(code: tuple[Path, ...], **counts: int) -> None:
    """filter over mutual TLS and new connections, beside many idle or slow ones without a client certificate."""
    from bench import connections as bench  # noqa: PLC0415
    from bench import processes  # noqa: PLC0415

    _print(bench.run([path.resolve() for path in code] or [processes.ROOT], **counts))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--cards", default=8, help="GPUs of each node.")
@click.option("--pods", default=1000)
@click.option("--runs", default=3)
@click.option("--policy", "policies", multiple=True, default=["binpack"])
def nomination(nodes: int, cards: int, pods: int, runs: int, policies: tuple[str, ...]) -> None:
    """Pods per second of the real kube-scheduler: with the extender, with and without nomination; without Cardwise."""
    from bench import nomination as bench  # noqa: PLC0415

    _print(bench.run(nodes, cards, pods, runs, policies))


@main.command()
@click.option("--rate", default=300)
@click.option("--seconds", default=20)
@click.option("--creations", default=300)
def admission(rate: int, seconds: int, creations: int) -> None:
    """mutate and validate over TLS at a fixed rate, and pod creation with and without the webhooks."""
    from bench import admission as bench  # noqa: PLC0415

    _print(bench.run(rate, seconds, creations))


@main.command()
@click.option("--reviews", default=2000)
def review(reviews: int) -> None:
    """The modules that one review passes in the webhook, and its CPU time, without HTTP and a cluster."""
    from bench import review as bench  # noqa: PLC0415

    _print(bench.run(reviews))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--members", default=500)
@click.option("--runs", default=20)
def gang(nodes: int, pods: int, members: int, runs: int) -> None:
    """CPU time of the gang planner."""
    from bench import gang as bench  # noqa: PLC0415

    _print(bench.run(nodes, pods, members, runs))


@main.command("lock-holds")
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--gangs", default=200)
@click.option("--rounds", default=300)
def lock_holds(nodes: int, pods: int, gangs: int, rounds: int) -> None:
    """How long the extender's state lock is held at a time, while many gangs wait."""
    from bench import lockholds as bench  # noqa: PLC0415

    _print(bench.run(nodes, pods, gangs, rounds))


@main.command("big-lock-holds")
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--runs", default=11)
@click.option("--only", default="", help="Run only situations whose label contains this text.")
def big_lock_holds(nodes: int, pods: int, runs: int, only: str) -> None:
    """How long single operations hold the state lock: gangs by size, quotas, preemption, many nominated pods."""
    from bench import biglockholds as bench  # noqa: PLC0415

    _print(bench.run(nodes, pods, runs, only))


@main.command()
@click.argument("commit")
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=1000, help="Calls of filter and of preempt.")
@click.option("--seconds", default=60.0, help="How long filter is called beside gangs.")
@click.option("--commits", default=10_000, help="Pods that are created and bound.")
@click.option("--turns", default=3)
def compare(commit: str, **counts: int) -> None:
    """The extender of an earlier COMMIT and of this checkout, in turns: filter, gangs, preempt, memory, the lock."""
    from bench import compare as bench  # noqa: PLC0415

    _print(bench.run(commit, **counts))


@main.command()
@click.option("--nodes", default=100)
@click.option("--gangs", default=100)
@click.option("--size", default=8, help="Members of each gang.")
@click.option("--big", default=200, help="Members of the big gang.")
@click.option("--runs", default=3, help="Number of big gangs, one after another.")
def gangrate(nodes: int, gangs: int, size: int, big: int, runs: int) -> None:
    """Gangs on the real kube-scheduler: creation, gangs per second, and the last step of a big gang."""
    from bench import gangrate as bench  # noqa: PLC0415

    _print(bench.run(nodes, gangs, size, big, runs))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=200)
def scrape(nodes: int, pods: int, calls: int) -> None:
    """A scrape of the extender's metrics, with a big cluster in the ledger."""
    from bench import scrape as bench  # noqa: PLC0415

    _print(bench.run(nodes, pods, calls))


@main.command()
@click.option("--seconds", default=60)
@click.option("--probes", default=50)
def agent(seconds: int, probes: int) -> None:
    """The share agent: memory, CPU when idle, and the cost of a startup probe."""
    from bench import agent as bench  # noqa: PLC0415

    _print(bench.run(seconds, probes))


@main.command()
@click.option("--traces", type=click.Path(path_type=Path), help="Folder of the trace openb. Default: CARDWISE_OPENB.")
@click.option("--trace", multiple=True, help="A list of pods. Default: those with published results.")
@click.option("--policy", multiple=True, default=["binpack", "priced"])
@click.option("--seeds", default=2)
@click.option("--first-seed", default=42, help="The policies' constants were tuned on the seeds 42 to 47.")
@click.option("--known", is_flag=True, help="The policies know the workload from the start.")
@click.option("--churn", is_flag=True, help="Instead of filling: pods arrive and leave.")
@click.option("--lifetimes", default=3.0, help="With --churn: measured mean lifetimes of a pod.")
@click.option("--bounded", is_flag=True, help="A decision scores at most 256 nodes, as in the extender.")
@click.option("--decisions", default=0, help="Instead of filling: measure the latency of this number of decisions.")
@click.option("--nodes", default=5000, help="With --decisions: nodes of the cluster.")
@click.option("--processes", default=2)
def placement(
    traces: Path | None, trace: tuple[str, ...], policy: tuple[str, ...], seeds: int, processes: int, **options: Any
) -> None:
    """The part of the cards that each policy fills, on a trace. Each run is printed to standard error when it ends."""
    from bench import placement as bench  # noqa: PLC0415

    folder = bench.find_traces(traces)
    seed_range = range(options["first_seed"], options["first_seed"] + seeds)
    if options["decisions"]:
        trace_name = (*trace, "default")[0]
        _print(bench.measure_decisions(folder, trace_name, policy, options["nodes"], options["decisions"]))
    elif options["churn"]:
        for name in trace or ("default",):
            rows = bench.measure_churn(folder, name, policy, seed_range, processes, lifetimes=options["lifetimes"])
            _print(rows)
    else:
        known, bounded = options["known"], options["bounded"]
        _print(bench.measure_filling(folder, trace, policy, seed_range, processes, known=known, bounded=bounded))


@main.command()
@click.option("--nodes", default=5000)
@click.option("--pods", default=60_000)
@click.option("--calls", default=10)
def top(nodes: int, pods: int, calls: int) -> None:
    """The first screen of `cardwise top`, from the start of the program to its end."""
    from bench import topscreen  # noqa: PLC0415

    _print(topscreen.first_screen(nodes, pods, calls))


@main.command()
@click.option("--nodes", default=4)
@click.option("--times", default=10)
def failover(nodes: int, times: int) -> None:
    """The time from the end of a leading extender (SIGTERM, SIGKILL) to the first filter response of the next."""
    from bench import failover as bench  # noqa: PLC0415

    _print(bench.run(nodes, times))


if __name__ == "__main__":
    main()
