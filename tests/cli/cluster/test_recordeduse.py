"""Idle times from the steps that Prometheus has recorded."""

import pytest

from cardwise.cli.cluster.recordeduse import compute_idle_time

STEP, END = 1260, 1_000_000.0  # seconds


def points(steps: str) -> list[tuple[float, float]]:
    """The steps up to the end: `#` computed, `.` did not, a blank is unknown."""
    first = END - (len(steps) - 1) * STEP
    return [(first + i * STEP, float(step == "#")) for i, step in enumerate(steps) if step != " "]


@pytest.mark.parametrize(
    ("steps", "idle_time"),
    [
        ("#..........", (10 * STEP, False)),  # the docstring's: 210 minutes
        ("# ..........", (9 * STEP, True)),  # and at least 189
        ("..........", (9 * STEP, True)),
        ("#.# ..", (STEP, True)),
        (".....#", (0.0, False)),
        ("..... ", None),
        ("", None),
    ],
)
def test_the_idle_time_goes_back_to_the_last_step_that_computed_or_is_unknown(steps, idle_time):
    assert compute_idle_time(points(steps), END, STEP) == idle_time
