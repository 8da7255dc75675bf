"""Groups of the manager's command-line options: its pace, and its audit."""

from collections.abc import Callable
from typing import Any

import click

from cardwise.core.values import quantity
from cardwise.core.values.quantity import InvalidQuantity, MiB
from cardwise.runtime.settings import DURATION, grouped, option
from mps.audit.audit import AuditSettings
from mps.daemon.machine import DaemonPace

_PACE = DaemonPace()
_AUDIT = AuditSettings()
_EVICT_AFTER = 300.0
_LONGEST_INTERVAL = 30.0

_Command = Callable[..., Any]


def _above_zero(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if seconds <= 0:
        raise click.BadParameter("0 would ask without end; write a time such as 2s")
    return seconds


def _interval(context: click.Context, parameter: click.Parameter, seconds: float) -> float:
    if seconds > _LONGEST_INTERVAL:
        raise click.BadParameter(
            f"{seconds:g} s is longer than {_LONGEST_INTERVAL:g} s, and a frozen daemon would be called ready for all "
            "that time; write a time such as 2s"
        )
    return _above_zero(context, parameter, seconds)


def _tolerance(_: click.Context, __: click.Parameter, value: str) -> MiB:
    if value == "0":
        return MiB(0)
    try:
        return quantity.memory(value)
    except InvalidQuantity as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}") from error


def _duration(name: str, default: float, text: str, into: str = "", **more: Any) -> Callable[[_Command], _Command]:
    """`into`: the field that it sets, if that has another name."""
    variable = f"CARDWISE_MPS_{name.upper().replace('-', '_')}"
    names = (f"--{name}", into) if into else (f"--{name}",)
    return option(*names, type=DURATION, default=default, envvar=variable, help=text, **more)


pace_options = grouped(
    "pace",
    DaemonPace,
    _duration("probe-interval", _PACE.probe, "Time between two probes of each daemon.", "probe", callback=_interval),
    _duration(
        "probe-timeout",
        _PACE.answer,
        "Time for an answer; a daemon that does not answer twice is replaced.",
        "answer",
        callback=_above_zero,
    ),
    _duration("start-timeout", _PACE.start, "Time until a new daemon answers and has its settings.", "start"),
    _duration("server-timeout", _PACE.warm, "Time until the server of a new daemon is active.", "warm"),
    _duration(
        "fault-grace",
        _PACE.fault_grace,
        "After a client's fault: time for all clients of the card to end by themselves before they are detached.",
    ),
    _duration(
        "drain-timeout",
        _PACE.drain,
        "Time for clients that are being detached to be gone, before their daemon ends all the same.",
        "drain",
    ),
    _duration(
        "quit-grace", _PACE.quit_grace, "Time that `quit` gives the server to end by itself before it forces it."
    ),
    _duration(
        "orphan-grace",
        _PACE.orphan_grace,
        "After a daemon's death: time for the clients of its server to end before the server is ended.",
    ),
)


def _audit(
    *,
    audit: bool,
    audit_interval: float,
    audit_looks: int,
    audit_tolerance: MiB,
    audit_evict: bool,
    audit_evict_after: float,
    audit_evict_per_hour: int,
) -> AuditSettings | None:
    if not audit:
        return None
    return AuditSettings(
        interval=audit_interval,
        looks=audit_looks,
        tolerance=audit_tolerance,
        evict_after=audit_evict_after if audit_evict else None,
        evict_per_hour=audit_evict_per_hour,
    )


audit_options = grouped(
    "audit",
    _audit,
    option(
        "--audit/--no-audit",
        default=True,
        envvar="CARDWISE_MPS_AUDIT",
        help="Whether to compare what processes really use of the cards with what their pods were given. Differences "
        "are reported in events, metrics and the log.",
    ),
    _duration("audit-interval", _AUDIT.interval, "Time between two looks at the cards.", callback=_above_zero),
    option(
        "--audit-looks",
        type=click.IntRange(min=1),
        default=_AUDIT.looks,
        envvar="CARDWISE_MPS_AUDIT_LOOKS",
        help="How many looks in a row must find the same difference before it is reported.",
    ),
    option(
        "--audit-tolerance",
        metavar="MEMORY",
        callback=_tolerance,
        default=f"{_AUDIT.tolerance}Mi",
        envvar="CARDWISE_MPS_AUDIT_TOLERANCE",
        help="How much more than its share a container may use for each of its processes on a card: their own "
        "contexts.",
    ),
    option(
        "--audit-evict/--no-audit-evict",
        default=False,
        envvar="CARDWISE_MPS_AUDIT_EVICT",
        help="Whether a pod that goes on using more than its share, or another card than its own, is evicted, as its "
        "disruption budget allows.",
    ),
    _duration("audit-evict-after", _EVICT_AFTER, "With --audit-evict: how long a pod must have gone on with it."),
    option(
        "--audit-evict-per-hour",
        type=click.IntRange(min=1),
        default=_AUDIT.evict_per_hour,
        envvar="CARDWISE_MPS_AUDIT_EVICT_PER_HOUR",
        help="With --audit-evict: the most pods of the node that are evicted in an hour, one at a time.",
    ),
)
