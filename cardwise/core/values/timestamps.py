"""Timestamps of the Kubernetes API. No other module parses them.

The API server accepts times that Python cannot represent: "9999-12-31T23:59:59-23:59" is a valid `startTime`, and the
API server returns it as "10000-01-01T23:58:59Z".
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

EARLIEST: Final = datetime.min.replace(tzinfo=UTC)  # for all times before year 1
LATEST: Final = datetime.max.replace(tzinfo=UTC)  # for all times after year 9999

_MIDDLE_YEAR: Final = 5000
_TIMESTAMP: Final = re.compile(r"(-?[0-9]{1,9})-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)", re.ASCII)


def parse_timestamp(text: object) -> datetime | None:
    """Parse a timestamp of the API into a time in UTC; None if the text is not a timestamp, or if its time zone is
    missing. Never raises.

    Times that Python cannot represent become `EARLIEST` or `LATEST`.
    """
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text)
        return None if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        timestamp = _TIMESTAMP.fullmatch(text)
        return None if timestamp is None else _nearest_time(int(timestamp[1]))


def _nearest_time(year: int) -> datetime | None:
    """`EARLIEST` or `LATEST`, for a timestamp that Python cannot parse. None if Python can represent times of the year,
    because then the timestamp is invalid.
    """
    if EARLIEST.year < year < LATEST.year:
        return None
    return EARLIEST if year < _MIDDLE_YEAR else LATEST


def format_timestamp(time: datetime) -> str:
    """Format a time in UTC as Kubernetes writes it, to the second."""
    return time.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def subtract_seconds(time: datetime, seconds: float) -> datetime:
    """The time minus a number of seconds, in UTC; `EARLIEST` or `LATEST` if Python cannot represent it."""
    try:
        return time - timedelta(seconds=seconds)
    except OverflowError:
        return EARLIEST if seconds > 0 else LATEST
