"""Options that several commands share, the client, and the clock.

The client is imported only when it is created: the import takes most of a start's time, and `--help` needs no client.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names

if TYPE_CHECKING:
    from cardwise.kube.client import KubeClient

_F = TypeVar("_F", bound=Callable[..., Any])

_MIN_RECORDED_SECONDS = 3600.0
_DEFAULT_RECORDED_SECONDS = 7 * 86_400.0


gpu_mem_unit = click.option(
    "--gpu-mem-unit",
    type=click.Choice(["MiB", "GiB"]),
    default="MiB",
    show_default=True,
    help=f"What a number without a unit means in {names.GPU_MEM} of a file of manifests.",
)


def _output_option(*choices: str) -> Callable[[_F], _F]:
    return click.option("-o", "--output", type=click.Choice(choices), default="table", show_default=True)


output = _output_option("table", "wide", "json", "yaml")
plain_output = _output_option("table", "json", "yaml")
report_output = _output_option("table", "csv", "json")


class _Duration(click.ParamType[float]):
    """A duration such as `5m`, as in the settings of the components, converted to seconds.

    A number is a default in seconds.
    """

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        from cardwise.runtime.settings import DURATION  # noqa: PLC0415 - imports the logging of the components, which takes 0.1 s

        return DURATION.convert(value, param, ctx)


DURATION = _Duration()


def current_clock() -> Clock:
    """The machine's clock, or the clock that a test passes to the command as `obj`."""
    injected = click.get_current_context().obj
    return injected if isinstance(injected, Clock) else SYSTEM


def cluster(function: _F) -> _F:
    """Add the options --context and --kubeconfig. As in kubectl, they may stand before or after a command's name."""
    context = click.option(
        "--context",
        expose_value=False,
        callback=_store_option,
        help="Context of the kubeconfig. Default: its current one.",
    )
    kubeconfig = click.option(
        "--kubeconfig",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        expose_value=False,
        callback=_store_option,
        help="Credentials of the cluster. Default: $KUBECONFIG, then ~/.kube/config.",
    )
    return context(kubeconfig(function))


def _store_option(context: click.Context, option: click.Parameter, setting: Any) -> None:
    """Store an option in `meta`, which the contexts of the group and of the command share."""
    if setting is not None:
        context.meta[f"{__name__}.{option.name}"] = setting


def load_client(context: click.Context | None = None) -> "KubeClient":
    """Load a client of the cluster that the options name.

    context: the command's context, if click does not run the command now.

    Raises KubeConfigError, also for unexpected content of a kubeconfig. The error does not contain the text of the
    original error, which may contain a credential.
    """
    from cardwise.kube import errors  # noqa: PLC0415 - see above
    from cardwise.kube.client import KubeClient  # noqa: PLC0415 - see above

    meta = (context or click.get_current_context()).meta
    file = meta.get(f"{__name__}.kubeconfig")
    path = file or os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        loaded = KubeClient.load(file, context=meta.get(f"{__name__}.context", ""))
    except errors.KubeConfigError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, OSError) as error:
        raise errors.KubeConfigError(
            f"the kubeconfig {path} is not usable ({type(error).__name__}): check the fields of its cluster (server, "
            "proxy-url, tls-server-name) and of its user; `kubectl config view --minify` shows them"
        ) from None
    if not isinstance(loaded.namespace, str):
        raise errors.KubeConfigError(f"{path}: the context's namespace is not a string; write it in quotes")
    return loaded


def check_namespace(client: "KubeClient", name: str) -> None:
    """Check that the namespace exists, as far as the user may read it. Raises ClickException if it does not."""
    from cardwise.kube import errors, paths  # noqa: PLC0415 - see above

    try:
        client.get(paths.namespaces(name))
    except errors.Forbidden:
        return
    except errors.NotFound:
        raise click.ClickException(
            f"there is no namespace {name!r}: `kubectl get namespaces` lists the existing ones"
        ) from None


namespace = click.option("-n", "--namespace", help="Default: that of the kubeconfig's context.")

cardwise_namespace = click.option(
    "--cardwise-namespace",
    envvar="CARDWISE_NAMESPACE",
    show_envvar=True,
    default=names.NAMESPACE,
    show_default=True,
    help="Namespace in which Cardwise is installed.",
)


def prometheus(function: _F) -> _F:
    """Add the options --prometheus and --since."""
    url = click.option(
        "--prometheus",
        "prometheus_url",
        metavar="URL",
        help="Read the use from this Prometheus, not from the MPS managers.",
    )
    since = click.option(
        "--since",
        type=DURATION,
        metavar="DURATION",
        help="How far back to read in Prometheus, at least 1h.  [default: 7d]",
    )
    return url(since(function))


def recorded_seconds(prometheus_url: str | None, since: float | None) -> float:
    """How far back to read in Prometheus. Raises UsageError."""
    if since is not None and prometheus_url is None:
        raise click.UsageError("--since is about Prometheus: add --prometheus URL; the MPS managers remember 6h")
    if since is not None and since < _MIN_RECORDED_SECONDS:
        raise click.UsageError("--since: write at least 1h, for example 7d")
    return _DEFAULT_RECORDED_SECONDS if since is None else since
