"""The program `cardwise`.

Most commands only read; `doctor` creates probe pods, and `cordon`, `drain` and `defrag` change GPUs. To start fast, a
command loads only its own module, and `--help` loads none of the commands' modules.
"""

import sys
from importlib import import_module
from typing import Any, Final

import click

from cardwise.cli import console, options, rights

_INTERRUPTED_STATUS = 130  # the exit status after Ctrl-C: 128 plus the number of SIGINT
# By the command's name: its module in cardwise.cli.commands, or elsewhere with its package; and its description in one
# line of 80 columns.
_COMMANDS: Final = {
    "advise": ("advise", "Recommend shares that fit what programs use"),
    "bundle": ("bundle", "Collect a support bundle"),
    "classes": ("classes", "List the types of GPUs and devices, and what is free"),
    "completion": ("completion", "Print the completion script of a shell"),
    "cordon": ("cordon", "Cordon a GPU; its pods stay"),
    "defrag": ("defrag", "Free whole GPUs by moving pods"),
    "doctor": ("doctor", "Diagnose the installation and suggest fixes"),
    "drain": ("drain", "Cordon a GPU and evict its pods"),
    "explain": ("explain", "Explain why a pod or a workload waits"),
    "gangs": ("gangs", "List gangs, groups of pods that start together"),
    "idle": ("idle", "List pods with a share that do not compute"),
    "inspect": ("inspect", "List GPUs and shares, as kubectl inspect gpushare does"),
    "nodes": ("nodes", "Show the free GPU memory of each node, and what still fits"),
    "quota": ("quota", "Show the GPU quotas and their use"),
    "report": ("report", "Sum up what was granted, used and idle over days"),
    "scheduler-config": ("scheduler_config", "Print the configuration that kube-scheduler needs"),
    "simulate": ("simulate", "Replay a trace of pods under each placement policy"),
    "top": ("top", "Show GPUs, shares and measured use, refreshed"),
    "uncordon": ("cordon", "Uncordon a GPU"),
    "web": ("cardwise.web.command", "Show the GPUs, and why pods wait, in the browser"),
}


class _Group(click.Group):
    """The group of all commands. On Ctrl-C, the program ends silently, as shells expect.

    command_run: the name of the command that ran.
    """

    command_run = ""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        if cmd_name not in _COMMANDS:
            return None
        module, short_help = _COMMANDS[cmd_name]
        path = module if "." in module else f"cardwise.cli.commands.{module}"
        command: click.Command = getattr(import_module(path), cmd_name.replace("-", "_"))
        command.short_help = short_help
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command's name; for an unknown name, suggest similar names. Raises UsageError."""
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            import difflib  # noqa: PLC0415 - needed for a wrong command only

            close_matches = difflib.get_close_matches(args[0], _COMMANDS)
            hint = f" Did you mean {' or '.join(close_matches)}?" if close_matches else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED_STATUS)
        except click.UsageError:
            raise  # the message contains only text of Cardwise and of the user
        except click.ClickException as error:
            raise click.ClickException(console.clean_line(error.message)) from error
        finally:
            self.command_run = ctx.invoked_subcommand or ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in _COMMANDS.items()])


_EPILOG = """As a plugin of kubectl: `kubectl cardwise --context X top`. kubectl does not accept options before
the plugin's name."""


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cardwise")
@options.cluster
def cli() -> None:
    """Inspect and manage the shared GPUs and other devices of a Kubernetes cluster."""


def main(program: str | None = None) -> None:
    """Run the program, with errors of the cluster as one line.

    program: the program's name, if it differs from the name of its file.
    """
    try:
        cli(prog_name=program)
    except Exception as error:
        from cardwise.kube import errors  # noqa: PLC0415 - `--help` needs no errors

        match error:
            case errors.Forbidden():
                sys.exit(console.clean_line(f"cardwise: {rights.describe_refusal(error, cli.command_run)}"))
            case errors.UnknownKind():
                sys.exit(
                    "cardwise: this cluster has no CRDs of cardwise.dev: Cardwise is not installed there; `cardwise "
                    "doctor` shows what is missing"
                )
            case errors.KubeError() | errors.KubeConfigError():
                sys.exit(console.clean_line(f"cardwise: {error}"))
            case ValueError() if _is_header_error(error):
                sys.exit(
                    "cardwise: the credentials of the kubeconfig cannot be sent: the user's token, tokenFile, username "
                    "or password, or what its exec plugin prints, has a line break or a character that is not ASCII"
                )
        raise


def _is_header_error(error: Exception) -> bool:
    """Whether Python's HTTP client has refused a header. The message quotes the header's value, a credential."""
    trace, file = error.__traceback__, ""
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    client = sys.modules.get("http.client")  # not imported if no cluster was called
    return client is not None and file == client.__file__


def kubectl() -> None:
    """Run the program as the kubectl plugin `kubectl cardwise`."""
    main("kubectl cardwise")


def kubectl_complete() -> None:
    """Run `kubectl_complete-cardwise`, which kubectl calls to complete `kubectl cardwise`."""
    from cardwise.cli.commands import completion  # noqa: PLC0415 - loaded on demand, as all commands are

    console.print_data(completion.complete_for_kubectl(cli, sys.argv[1:]))


def kubectl_inspect() -> None:
    """Run `inspect` as `kubectl inspect cardwise`, the plugin name that users of gpushare know."""
    sys.argv.insert(1, "inspect")
    main()
