"""Groups of the MPS manager's command-line options: the pace of its daemons, and its audit."""

from collections.abc import Callable
from typing import Any

import click

from cardwise.core.values import quantity
from cardwise.core.values.quantity import InvalidQuantity, MiB
from cardwise.runtime.settings import DURATION, grouped_options, option
from mps.audit.audit import AuditSettings
from mps.daemon.machine import DaemonPace

_DEFAULT_PACE = DaemonPace()
_DEFAULT_AUDIT = AuditSettings()
_EVICT_AFTER = 300.0
_MAX_INTERVAL = 30.0

_Command = Callable[..., Any]


def _above_zero(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if seconds <= 0:
        raise click.BadParameter("0 would probe without pause; write a time such as 2s")
    return seconds


def _probe_interval(context: click.Context, parameter: click.Parameter, seconds: float) -> float:
    if seconds > _MAX_INTERVAL:
        raise click.BadParameter(
            f"{seconds:g} s is longer than {_MAX_INTERVAL:g} s, and a frozen daemon would count as ready for all "
            "that time; write a time such as 2s"
        )
    return _above_zero(context, parameter, seconds)


def _tolerance(_: click.Context, __: click.Parameter, amount: str) -> MiB:
    if amount == "0":
        return MiB(0)
    try:
        return quantity.memory(amount)
    except InvalidQuantity as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _duration(
    name: str, default: float, text: str, parameter_name: str = "", **options: Any
) -> Callable[[_Command], _Command]:
    """An option for a duration. `parameter_name`: the parameter that it sets, if it differs from the option."""
    variable = f"CARDWISE_MPS_{name.upper().replace('-', '_')}"
    names = (f"--{name}", parameter_name) if parameter_name else (f"--{name}",)
    return option(*names, type=DURATION, default=default, envvar=variable, help=text, **options)


pace_options = grouped_options(
    "pace",
    DaemonPace,
    _duration(
        "probe-interval",
        _DEFAULT_PACE.probe,
        "Time between two probes of each daemon.",
        "probe",
        callback=_probe_interval,
    ),
    _duration(
        "probe-timeout",
        _DEFAULT_PACE.answer,
        "Timeout of a command; a daemon that times out twice is replaced.",
        "answer",
        callback=_above_zero,
    ),
    _duration(
        "start-timeout", _DEFAULT_PACE.start, "Timeout until a new daemon answers and has its settings.", "start"
    ),
    _duration("server-timeout", _DEFAULT_PACE.warm, "Timeout until the server of a new daemon is active.", "warm"),
    _duration(
        "fault-grace",
        _DEFAULT_PACE.fault_grace,
        "After a client's fault: time for all clients of the GPU to end by themselves before they are detached.",
    ),
    _duration(
        "drain-timeout",
        _DEFAULT_PACE.drain,
        "Time for detached clients to end before their daemon is ended anyway.",
        "drain",
    ),
    _duration(
        "quit-grace",
        _DEFAULT_PACE.quit_grace,
        "Time that `quit` gives the server to end by itself before it is forced.",
    ),
    _duration(
        "orphan-grace",
        _DEFAULT_PACE.orphan_grace,
        "After a daemon's death: time for the clients of its server to end before the server is ended.",
    ),
)


def _audit(
    *,
    audit: bool,
    audit_interval: float,
    audit_passes: int,
    audit_tolerance: MiB,
    audit_evict: bool,
    audit_evict_after: float,
    audit_evict_per_hour: int,
) -> AuditSettings | None:
    if not audit:
        return None
    return AuditSettings(
        interval=audit_interval,
        looks=audit_passes,
        tolerance=audit_tolerance,
        evict_after=audit_evict_after if audit_evict else None,
        evict_per_hour=audit_evict_per_hour,
    )


audit_options = grouped_options(
    "audit",
    _audit,
    option(
        "--audit/--no-audit",
        default=True,
        envvar="CARDWISE_MPS_AUDIT",
        help="Whether to compare the memory that processes use on the GPUs with their pods' shares. Differences are "
        "reported in events, metrics and the log.",
    ),
    _duration("audit-interval", _DEFAULT_AUDIT.interval, "Time between two audits of the GPUs.", callback=_above_zero),
    option(
        "--audit-passes",
        type=click.IntRange(min=1),
        default=_DEFAULT_AUDIT.looks,
        envvar="CARDWISE_MPS_AUDIT_PASSES",
        help="How many audits in a row must find the same violation before it is reported.",
    ),
    option(
        "--audit-tolerance",
        metavar="MEMORY",
        callback=_tolerance,
        default=f"{_DEFAULT_AUDIT.tolerance}Mi",
        envvar="CARDWISE_MPS_AUDIT_TOLERANCE",
        help="Memory beyond its share that a container may use for each process on a GPU: its CUDA contexts.",
    ),
    option(
        "--audit-evict/--no-audit-evict",
        default=False,
        envvar="CARDWISE_MPS_AUDIT_EVICT",
        help="Whether a pod that keeps using more than its share, or another GPU than its own, is evicted, as its "
        "disruption budget allows.",
    ),
    _duration(
        "audit-evict-after",
        _EVICT_AFTER,
        "With --audit-evict: how long a violation must last before its pod is evicted.",
    ),
    option(
        "--audit-evict-per-hour",
        type=click.IntRange(min=1),
        default=_DEFAULT_AUDIT.evict_per_hour,
        envvar="CARDWISE_MPS_AUDIT_EVICT_PER_HOUR",
        help="With --audit-evict: the maximum of evictions per node and hour, one at a time.",
    ),
)
