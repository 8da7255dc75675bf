"""Two groups of the MPS manager's command-line options: the times of its daemons, and its audit."""

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
_DEFAULT_EVICT_AFTER = 300.0
_MAX_PROBE_INTERVAL = 30.0

_Command = Callable[..., Any]


def _check_above_zero(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if seconds <= 0:
        raise click.BadParameter("0 would probe without pause; write a time such as 2s")
    return seconds


def _check_probe_interval(context: click.Context, parameter: click.Parameter, seconds: float) -> float:
    if seconds > _MAX_PROBE_INTERVAL:
        raise click.BadParameter(
            f"{seconds:g} s is longer than {_MAX_PROBE_INTERVAL:g} s, and a frozen daemon would count as ready for all "
            "that time; write a time such as 2s"
        )
    return _check_above_zero(context, parameter, seconds)


def _parse_tolerance(_: click.Context, __: click.Parameter, amount: str) -> MiB:
    if amount == "0":
        return MiB(0)
    try:
        return quantity.memory(amount)
    except InvalidQuantity as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _duration_option(name: str, default: float, help_text: str, **options: Any) -> Callable[[_Command], _Command]:
    """An option for a duration."""
    variable = f"CARDWISE_MPS_{name.upper().replace('-', '_')}"
    return option(f"--{name}", type=DURATION, default=default, envvar=variable, help=help_text, **options)


pace_options = grouped_options(
    "pace",
    DaemonPace,
    _duration_option(
        "probe-interval",
        _DEFAULT_PACE.probe_interval,
        "Time between two probes of each daemon.",
        callback=_check_probe_interval,
    ),
    _duration_option(
        "probe-timeout",
        _DEFAULT_PACE.probe_timeout,
        "Timeout of a command; a daemon that times out twice is replaced.",
        callback=_check_above_zero,
    ),
    _duration_option(
        "start-timeout", _DEFAULT_PACE.start_timeout, "Timeout until a new daemon answers and has its settings."
    ),
    _duration_option(
        "server-timeout", _DEFAULT_PACE.server_timeout, "Timeout until the server of a new daemon is active."
    ),
    _duration_option(
        "fault-grace",
        _DEFAULT_PACE.fault_grace,
        "After a client's fault: time for all clients of the GPU to end by themselves before they are detached.",
    ),
    _duration_option(
        "drain-timeout",
        _DEFAULT_PACE.drain_timeout,
        "Time for detached clients to end before their daemon is ended anyway.",
    ),
    _duration_option(
        "quit-grace",
        _DEFAULT_PACE.quit_grace,
        "Time that `quit` gives the server to end by itself before it is forced.",
    ),
    _duration_option(
        "orphan-grace",
        _DEFAULT_PACE.orphan_grace,
        "After a daemon's death: time for the clients of its server to end before the server is ended.",
    ),
)


def _build_audit_settings(
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
        passes=audit_passes,
        tolerance=audit_tolerance,
        evict_after=audit_evict_after if audit_evict else None,
        evict_per_hour=audit_evict_per_hour,
    )


audit_options = grouped_options(
    "audit",
    _build_audit_settings,
    option(
        "--audit/--no-audit",
        default=True,
        envvar="CARDWISE_MPS_AUDIT",
        help="Whether to compare the memory that processes use on the GPUs with their pods' shares. Differences are "
        "reported in events, metrics and the log.",
    ),
    _duration_option(
        "audit-interval", _DEFAULT_AUDIT.interval, "Time between two audits of the GPUs.", callback=_check_above_zero
    ),
    option(
        "--audit-passes",
        type=click.IntRange(min=1),
        default=_DEFAULT_AUDIT.passes,
        envvar="CARDWISE_MPS_AUDIT_PASSES",
        help="How many audits in a row must find the same violation before it is reported.",
    ),
    option(
        "--audit-tolerance",
        metavar="MEMORY",
        callback=_parse_tolerance,
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
    _duration_option(
        "audit-evict-after",
        _DEFAULT_EVICT_AFTER,
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
