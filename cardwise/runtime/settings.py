"""The command-line options that every component has, and the option types that they share.

Every option has an environment variable, `CARDWISE_<NAME>`: give `context_settings=CONTEXT_SETTINGS` to the command.
A bad value stops the start with a message that names the option and what to write instead.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import click

from cardwise.core.api import names
from cardwise.core.api.cardlimits import AUTO
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.values.quantity import MAX_MIB, MiB
from cardwise.core.values.wording import quote_text
from cardwise.kube.errors import KubeConfigError, KubeError
from cardwise.runtime.logs import LogFormat, LogLevel

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONTEXT_SETTINGS: dict[str, Any] = {
    "auto_envvar_prefix": "CARDWISE",
    "help_option_names": ["-h", "--help"],
    "show_default": True,
}

_SECONDS_BY_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


@dataclass(frozen=True, slots=True)
class HostPort:
    """An address to listen on. `host` has no brackets; "" means all addresses."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "host:port", "[v6]:port" or ":port". Raises ValueError."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT; write for example 0.0.0.0:8443, [::]:8443 or :8443")
        bracketed = host.startswith("[") and host.endswith("]")
        if ":" in host and not bracketed:
            raise ValueError(f"{text!r}: put an IPv6 address in brackets, for example [::1]:8443")
        return cls(host[1:-1] if bracketed else host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_duration(text: str) -> float:
    """Parse "30s", "1.5m", "1h30m" or "250ms" into seconds; "0" needs no unit. Raises ValueError."""
    text = text.strip()
    if text == "0":
        return 0.0
    if not text or _DURATION_PATTERN.sub("", text):
        raise ValueError(f"{text!r} is not a duration; write a number with a unit, for example 30s, 5m, 1h30m or 250ms")
    return sum(float(number) * _SECONDS_BY_UNIT[unit] for number, unit in _DURATION_PATTERN.findall(text))


_Parsed = TypeVar("_Parsed")


class ParsedParam(click.ParamType[_Parsed]):
    """The option type for values of type `kind`. `parse` converts a string to a value, and raises ValueError."""

    def __init__(self, kind: type[_Parsed], parse: Callable[[str], _Parsed], name: str) -> None:
        self._kind = kind
        self._parse = parse
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Parsed:
        if isinstance(value, self._kind):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class DurationParam(click.ParamType[float]):
    """The option type of a duration; its value is in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


HOST_PORT = ParsedParam(HostPort, HostPort.parse, "host:port")
DURATION = DurationParam()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """The values of `common_options`. The command gets these settings as the argument `common`."""

    kubeconfig: Path | None
    log_level: LogLevel
    log_format: LogFormat
    metrics_bind: HostPort


# An option whose environment variable is shown by `--help`.
option = functools.partial(click.option, show_envvar=True)

# For the components on GPU nodes. Device plugin and MPS manager of a node must get the same value.
simulated_gpus_option = option(
    "--simulated-gpus",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file of simulated GPUs, which replace the machine's GPUs. Read again when it changes.",
)

core_overcommit_option = option(
    "--core-overcommit",
    type=click.IntRange(min=FULL_CORE, max=10 * FULL_CORE),
    default=FULL_CORE,
    help=f"Percent of a GPU's SMs that shares may request in total ({names.GPU_CORE}); above 100 they compete for SMs. "
    "The extender and all device plugins need the same value.",
)


class _Headroom(click.ParamType[MiB | None]):
    """MiB that stay free on each GPU; `AUTO`, which becomes None, for the headroom that each GPU has."""

    name = f"MiB or {AUTO}"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> MiB | None:
        if value == AUTO or value is None:
            return None
        text = str(value)
        if not (text.isascii() and text.isdecimal()) or len(text) > len(str(MAX_MIB)) or int(text) > MAX_MIB:
            self.fail(f"{quote_text(text)} is neither MiB from 0 on nor {AUTO}", param, ctx)
        return MiB(int(text))


# For webhook and extender.
headroom_option = option(
    "--headroom",
    type=_Headroom(),
    default=0,
    help=f"MiB kept free on each GPU for driver, contexts and MPS server. {AUTO}: what the device plugin has measured "
    "for driver and MPS server (spec.headroomMiB of the ExtendedResource). A GPUQuota counts a whole GPU without this "
    "headroom. Webhook and extender need the same value.",
)

namespace_option = option(
    "--namespace",
    default=names.NAMESPACE,
    help="Cardwise's namespace, with its certificates, Lease and ConfigMap.",
)


class _CommaList(click.ParamType[tuple[str, ...]]):
    name = "a,b,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:  # noqa: ARG002
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


COMMA_LIST = _CommaList()

tls_hosts_option = option(
    "--tls-hosts",
    type=COMMA_LIST,
    default="",
    help="Further names and addresses in the certificate, if clients use others than those of the Service and the "
    "loopback addresses.",
)


def grouped_options(name: str, make: Callable[..., object], *options: _Decorator) -> _Decorator:
    """A decorator below `@click.command` that adds options and passes them to the command as one argument.

    name: the name of the argument.
    make: creates the value. Each parameter of `make` gets the value of the option with the same name.
    """
    parameters = inspect.signature(make).parameters.keys()

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            group = make(**{key: arguments.pop(key) for key in parameters & arguments.keys()})
            return command(**arguments, **{name: group})

        wrapped: Callable[..., Any] = wrapper
        for add in reversed(options):
            wrapped = add(wrapped)
        return wrapped

    return decorate


common_options = grouped_options(
    "common",
    CommonSettings,
    option(
        "--kubeconfig",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Kubeconfig file. Default: the pod's service account, outside a pod $KUBECONFIG or ~/.kube/config.",
    ),
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Minimum level of the lines to log.",
    ),
    option(
        "--log-format",
        type=click.Choice(["json", "text"]),
        default="json",
        help="JSON lines for machines or text for people.",
    ),
    option(
        "--metrics-bind",
        type=HOST_PORT,
        default=HostPort("", 9400),
        help="Where /metrics, /healthz, /readyz and /configz are served.",
    ),
)


def check_distinct(addresses: Mapping[str, HostPort | None]) -> None:
    """Check that no two servers use the same port. `addresses`: by option. Raises click.UsageError."""
    options_by_port: dict[int, str] = {}
    for option, address in addresses.items():
        if address is None or address.port == 0:
            continue
        if address.port in options_by_port:
            other = options_by_port[address.port]
            raise click.UsageError(f"{other} and {option} name the same port {address.port}; change one")
        options_by_port[address.port] = option


@contextmanager
def report_startup_errors(*options: str) -> Iterator[None]:
    """Context manager: reports errors at startup as one line that names the options to check, without a traceback."""
    try:
        yield
    except (KubeError, KubeConfigError) as error:
        raise click.ClickException(f"cannot start: {error}") from error
    except OSError as error:
        raise click.ClickException(f"cannot start: {error}; check {' and '.join(options)}") from error
