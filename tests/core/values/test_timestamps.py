"""Timestamps of the API, including times that Python cannot represent."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.values.timestamps import EARLIEST, LATEST, format_timestamp, parse_timestamp, subtract_seconds

ROOT = Path(__file__).parents[3]
# The rotation of certificates writes and reads its own times.
PARSERS = {"cardwise/core/values/timestamps.py", "cardwise/runtime/tls/rotation.py"}


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-30T02:21:00Z", datetime(2026, 11, 30, 2, 21, tzinfo=UTC)),
        ("2026-11-30T02:21:00.123456Z", datetime(2026, 11, 30, 2, 21, 0, 123456, tzinfo=UTC)),
        ("2026-11-30T02:21:00+02:00", datetime(2026, 11, 30, 0, 21, tzinfo=UTC)),
        ("10000-01-01T23:58:59Z", LATEST),  # as the API server returns 9999-12-31T23:59:59-23:59
        ("9999-12-31T23:59:59-23:59", LATEST),
        ("292277026596-12-04T15:30:08Z", None),  # no API server writes it: a time has four or five digits
        ("0000-01-01T00:00:00Z", EARLIEST),
        ("-0001-12-31T00:01:00Z", EARLIEST),
        ("0001-01-01T00:00:00+23:59", EARLIEST),
        ("2026-13-30T02:21:00Z", None),
        ("2026-11-30T02:21:00", None),  # without a zone
        ("2026-11-30", None),
        ("9" * 10_000, None),
        ("", None),
        (None, None),
        (5, None),
    ],
)
def test_a_time_and_the_nearest_time_that_python_has(text, time):
    assert parse_timestamp(text) == time


@given(
    st.text() | st.from_regex(r"-?[0-9]{1,12}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2})")
)
def test_any_text_is_a_time_in_utc_or_none_and_can_be_computed_with(text):
    time = parse_timestamp(text)
    if time is not None:
        assert time.utcoffset() == EARLIEST.utcoffset()
        assert isinstance((LATEST - time).total_seconds() + time.timestamp(), float)
        assert parse_timestamp(format_timestamp(time)) == time.replace(microsecond=0)


def test_a_time_is_written_with_four_digits_of_its_year():
    assert format_timestamp(datetime(273, 4, 2, 3, 31, 50, 7, tzinfo=UTC)) == "0273-04-02T03:31:50Z"


@pytest.mark.parametrize(
    ("seconds", "time"),
    [(60, "2026-11-30T02:20:00Z"), (2**63 - 1, "0001-01-01T00:00:00Z"), (-(2**63), "9999-12-31T23:59:59Z")],
)
def test_any_number_of_seconds_can_be_subtracted(seconds, time):
    assert format_timestamp(subtract_seconds(datetime(2026, 11, 30, 2, 21, tzinfo=UTC), seconds)) == time


def test_no_other_module_parses_timestamps():
    listed = subprocess.run(
        [
            "git",
            "grep",
            "-lE",
            "fromisoformat|strptime",
            "--",
            "cardwise",
            "deviceplugin",
            "extender",
            "mps",
            "webhook",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(listed.stdout.split()) == PARSERS
