"""What several commands have: options, and the clock they live by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cardwise.clock import SYSTEM, Clock

_F = TypeVar("_F", bound=Callable[..., Any])

RIGHT_REMEDY = "an administrator can give it by a ClusterRole with that verb and resource, and a binding"


class _Duration(click.ParamType[float]):
    """Seconds, as the parts' settings spell them. A number is a default."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        from cardwise.runtime.settings import DURATION  # noqa: PLC0415 - loads the logging of the parts: 0.1 s

        return DURATION.convert(value, param, ctx)


DURATION = _Duration()


def clock() -> Clock:
    """The machine's, or what a test gives to the command as its `obj`."""
    given = click.get_current_context().obj
    return given if isinstance(given, Clock) else SYSTEM


def kubeconfig(function: _F) -> _F:
    """Which cluster."""
    return click.option(
        "--kubeconfig",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Credentials of the cluster. Default: $KUBECONFIG, then ~/.kube/config.",
    )(function)


def namespace(function: _F) -> _F:
    """Whose."""
    return click.option("-n", "--namespace", help="Default: that of the kubeconfig's context.")(function)


def output(function: _F) -> _F:
    """For people or for programs."""
    choice = click.Choice(["table", "wide", "json", "yaml"])
    return click.option("-o", "--output", type=choice, default="table", show_default=True)(function)
