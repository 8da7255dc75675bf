"""Logging: one stream per component, as JSON lines (or text for people) on stderr.

Each field of a line has a maximum size: texts of tenants must not fill the node's disk.

Lines of structlog, the standard library and gunicorn have the same format, and each names its component. `logger` is
part of a line, so a module that moves keeps the name of its logger.
"""

import logging
import math
import sys
import threading
from collections import Counter
from typing import Any, Final, Literal

import msgspec
import structlog

from cardwise.clock import Clock
from cardwise.core.values import wording

_MAX_TRACEBACK_BYTES: Final = 8 * wording.MAX_BYTES

_MINUTE: Final = 60.0  # seconds
_MAX_LINES: Final = 200  # maximum number of lines of one `LineLimit` in a minute
_MAX_LINES_OF_KEY: Final = 20

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Libraries whose info lines do not help administrators.
_QUIET_LIBRARIES = ("urllib3", "kubernetes", "asyncio")


def configure(component: str, level: LogLevel = "info", fmt: LogFormat = "json") -> None:
    """Configure logging. Call this once, early in `main`. Each line has the field `component`."""
    number = logging.getLevelNamesMapping()[level.upper()]

    def add_component(_logger: Any, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["component"] = component
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        add_component,
        structlog.stdlib.ExtraAdder(),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(fmt)],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[
            *shared[:-1],
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


class LineLimit:
    """Limits log lines that clients can cause at will: a number of lines per minute for each key, and for all keys
    together.

    A user can repeat a refused dry run thousands of times without any cost. Metrics count the dropped lines. When the
    first line is dropped, the log says so at once. After the minute, the next line reports the number of dropped lines.
    Any thread may call the methods.
    """

    def __init__(self, log: Any, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._minute_end = -math.inf  # the end of the minute
        self._lines = 0
        self._lines_of: Counter[str] = Counter()  # by key
        self._dropped = 0

    def log(self, level: LogLevel, key: str, event: str, **about: Any) -> None:
        """Log a line, or drop it. `key`: the owner of the line, such as a namespace; the kind of line if there is no
        owner.
        """
        with self._lock:
            now = self._clock.now()
            dropped, is_minute_over = self._dropped, self._minute_end
            if now >= self._minute_end:
                self._minute_end, self._lines, self._dropped = now + _MINUTE, 0, 0
                self._lines_of.clear()
            is_full = self._lines >= _MAX_LINES or self._lines_of[key] >= _MAX_LINES_OF_KEY
            if is_full:
                self._dropped += 1
            else:
                self._lines += 1
                self._lines_of[key] += 1
            is_first_dropped, seconds = self._dropped == 1, self._minute_end - now
        if dropped and now >= is_minute_over:
            self._log.info("dropped log lines", lines=dropped, seconds_ago=round(now - is_minute_over))
        if not is_full:
            getattr(self._log, level)(event, **about)
        elif is_first_dropped:
            self._log.info("dropping log lines: too many of this kind", key=key, seconds=round(seconds))


def _renderers(fmt: LogFormat) -> list[structlog.typing.Processor]:
    bounds: list[structlog.typing.Processor] = [structlog.processors.format_exc_info, _cut_fields]
    if fmt == "text":
        plain = structlog.dev.plain_traceback  # without the values of local variables
        return [*bounds, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [*bounds, structlog.processors.JSONRenderer(serializer=_json)]


def _cut_fields(_logger: Any, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The line with fields of at most 1 KiB each; a traceback may have 8 KiB."""
    for key, field in event.items():
        event[key] = _cut_field(field, _MAX_TRACEBACK_BYTES if key == "exception" else wording.MAX_BYTES)
    return event


def _cut_field(field: Any, max_bytes: int) -> Any:
    if isinstance(field, str):
        return wording.truncate(field, max_bytes)
    try:
        content = msgspec.json.encode(field, enc_hook=repr)
    # A value that JSON cannot express must not prevent the log line.
    except (TypeError, ValueError, OverflowError, RecursionError):
        return wording.quote_text(field)
    return field if len(content) <= max_bytes else wording.truncate(content.decode(), max_bytes)


def _json(event: Any, **_: Any) -> str:
    # The order in which people read the fields.
    ordered = {key: event.pop(key) for key in ("time", "level", "component", "event") if key in event}
    return msgspec.json.encode(ordered | event, enc_hook=repr).decode()
