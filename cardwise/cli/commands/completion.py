"""Shell completion of `cardwise` and of `kubectl cardwise`; for the latter kubectl calls a separate program."""

from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from cardwise.cli import console

PROGRAM = "cardwise"
# An environment variable of click: if it is set, the program prints completions for the shell that it names.
_VARIABLE = "_CARDWISE_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
_COMPLETE_FILES, _COMPLETE_NO_FILES = (
    ":0",
    ":4",
)  # directives of kubectl's protocol: complete file names, complete no file names


_HELP = """Print the completion script of a shell for commands, options and GPUs.

\b
source <(cardwise completion bash)         in ~/.bashrc
source <(cardwise completion zsh)          in ~/.zshrc, behind compinit
cardwise completion fish | source          in ~/.config/fish/config.fish

kubectl completes `kubectl cardwise` by itself if kubectl_complete-cardwise is in the PATH.
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    shell_class = get_completion_class(shell)
    if shell_class is None:
        raise click.ClickException(f"there is no completion for the shell {shell}")
    console.print_data(shell_class(context.find_root().command, {}, PROGRAM, _VARIABLE).source())


def complete_for_kubectl(root: click.Command, words: Sequence[str]) -> str:
    """Return the output of kubectl_complete-cardwise.

    words: the words after `kubectl cardwise`; the last one may be incomplete.
    """
    *complete_words, incomplete_word = words or [""]
    completions = ShellComplete(root, {}, PROGRAM, _VARIABLE).get_completions(complete_words, incomplete_word)
    has_files = any(entry.type != "plain" for entry in completions)
    lines = [_format_completion(entry) for entry in completions if entry.type == "plain"]
    return "\n".join([*lines, _COMPLETE_FILES if has_files else _COMPLETE_NO_FILES])


def _format_completion(entry: CompletionItem) -> str:
    return f"{entry.value}\t{entry.help}" if entry.help else str(entry.value)
