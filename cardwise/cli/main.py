"""`cardwise`: what people type. Most of it looks only: doctor sends a probe pod, cordon and drain change a card.

A command is loaded when it is called, and `--help` loads none: people wait for both.
"""

import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, Final

import click

from cardwise.cli import options

_INTERRUPTED = 130  # 128 and the number of SIGINT
_BY_CARD = "CARD: a UUID, its beginning, or NODE/INDEX."
# By the command's name: its module, and what the first paragraph of its help is, which a test compares.
_COMMANDS: Final = {
    "bundle": (
        "bundle",
        "Collect what a helper needs into FILE: findings, objects, logs of Cardwise's parts; no secrets, see the docs.",
    ),
    "classes": (
        "classes",
        "Types of cards and devices: how many, what is free, what one is; with NAME or -o wide, who uses it.",
    ),
    "completion": ("completion", "Print what makes a shell complete commands, options and cards."),
    "cordon": ("cordon", f"Take a card out of use: no new pod gets it, those on it stay. {_BY_CARD}"),
    "defrag": ("defrag", "Find the fewest pods to move so that whole cards are free, or pods of a shape fit."),
    "doctor": ("doctor", "Say what would not work, or does not, with a remedy for each finding."),
    "drain": ("drain", f"Cordon a card, evict its pods and wait until it is empty. {_BY_CARD}"),
    "explain": (
        "explain",
        "Why a pod waits, or why it is where it is; of a workload, how its pods are, and why the first of them waits.",
    ),
    "gangs": (
        "gangs",
        "Groups of pods that are bound whole or not at all: how far each is; -o wide says what it waits for and holds.",
    ),
    "inspect": ("inspect", "Cards and who holds how much of them, in MiB: the tables of `kubectl inspect gpushare`."),
    "nodes": (
        "nodes",
        "What each NODE has and what still fits there: cards, MiB, whole free cards, fragmentation, MPS, pods.",
    ),
    "quota": (
        "quota",
        "Used and hard amounts of GPUQuotas, and of ResourceQuotas on our resources; -o wide names the pods.",
    ),
    "scheduler-config": (
        "scheduler_config",
        "Print the KubeSchedulerConfiguration that makes kube-scheduler ask Cardwise.",
    ),
    "simulate": (
        "simulate",
        "Replay a trace of pods, or the cluster's own, and say what each policy would make of it.",
    ),
    "top": (
        "top",
        "Cards, what is granted of each and to whom, and what that really uses: the most used nodes first, or NODE…",
    ),
    "uncordon": ("cordon", f"Give a cordoned card back; pods that wait are tried again. {_BY_CARD}"),
}


class _Commands(MutableMapping[str, click.Command]):
    """Those of _COMMANDS, each loaded when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            module, _ = _COMMANDS[name]
            self[name] = getattr(import_module(f"cardwise.cli.commands.{module}"), name.replace("-", "_"))
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(click.Group):
    """Ends without a word when somebody presses Ctrl-C, as the shell expects it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        limit = formatter.width - 6 - max(map(len, _COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl([(name, _cut(said, limit)) for name, (_, said) in _COMMANDS.items()])


def _cut(said: str, limit: int) -> str:
    """As click cuts the help of a command that it has at hand."""
    return click.Command(None, help=said).get_short_help_str(limit)


_EPILOG = """As a plugin of kubectl: `kubectl cardwise --context X top`. kubectl gives a plugin nothing of what stands
before its name, and refuses options there."""


@click.group(cls=_Group, commands=_Commands(), epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cardwise")
@options.for_all
def cli() -> None:
    """Look at shared GPU cards, and at other devices, in a Kubernetes cluster; take some out of use."""


def main(program: str | None = None) -> None:
    """Run, with errors of the cluster as one line. `program`: what people call it, where not by its file's name."""
    try:
        cli(prog_name=program)
    except Exception as error:
        from cardwise.kube import errors  # noqa: PLC0415 - `--help` has none of them

        match error:
            case errors.Forbidden():
                sys.exit(f"cardwise: {error.message}; {options.remedy(error)}")
            case errors.KubeError() | errors.KubeConfigError():
                sys.exit(f"cardwise: {error}")
        raise


def kubectl() -> None:
    """`kubectl cardwise`: all of it as a plugin."""
    main("kubectl cardwise")


def kubectl_complete() -> None:
    """`kubectl_complete-cardwise`, which kubectl runs to complete `kubectl cardwise`."""
    from cardwise.cli.commands import completion  # noqa: PLC0415 - as any command

    click.echo(completion.for_kubectl(cli, sys.argv[1:]))


def kubectl_inspect() -> None:
    """`kubectl inspect cardwise`: the plugin name that people of gpushare are used to."""
    sys.argv.insert(1, "inspect")
    main()
