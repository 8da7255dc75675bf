"""`cardwise`: what people type. Most of it looks only: doctor sends a probe pod, cordon and drain change a card."""

import sys
from typing import Any

import click

from cardwise.cli import options
from cardwise.cli.commands import (
    bundle,
    classes,
    completion,
    cordon,
    defrag,
    doctor,
    drain,
    explain,
    gangs,
    inspect,
    nodes,
    quota,
    scheduler_config,
    simulate,
    top,
)
from cardwise.kube import errors

_INTERRUPTED = 130  # 128 and the number of SIGINT


class _Group(click.Group):
    """Ends without a word when somebody presses Ctrl-C, as the shell expects it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


_EPILOG = """As a plugin of kubectl: `kubectl cardwise --context X top`. kubectl gives a plugin nothing of what stands
before its name, and refuses options there."""


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cardwise")
@options.for_all
def cli() -> None:
    """Look at shared GPU cards, and at other devices, in a Kubernetes cluster; take some out of use."""


for _command in (
    bundle.bundle,
    classes.classes,
    completion.completion,
    cordon.cordon,
    cordon.uncordon,
    defrag.defrag,
    doctor.doctor,
    drain.drain,
    explain.explain,
    gangs.gangs,
    inspect.inspect,
    nodes.nodes,
    quota.quota,
    scheduler_config.scheduler_config,
    simulate.simulate,
    top.top,
):
    cli.add_command(_command)


def main(program: str | None = None) -> None:
    """Run, with errors of the cluster as one line. `program`: what people call it, where not by its file's name."""
    try:
        cli(prog_name=program)
    except errors.Forbidden as error:
        sys.exit(f"cardwise: {error.message}; {options.remedy(error)}")
    except (errors.KubeError, errors.KubeConfigError) as error:
        sys.exit(f"cardwise: {error}")


def kubectl() -> None:
    """`kubectl cardwise`: all of it as a plugin."""
    main("kubectl cardwise")


def kubectl_complete() -> None:
    """`kubectl_complete-cardwise`, which kubectl runs to complete `kubectl cardwise`."""
    click.echo(completion.for_kubectl(cli, sys.argv[1:]))


def kubectl_inspect() -> None:
    """`kubectl inspect cardwise`: the plugin name that people of gpushare are used to."""
    sys.argv.insert(1, "inspect")
    main()
