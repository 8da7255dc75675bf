"""Logging: one stream for a part, JSON lines (or text for people) on stderr, whoever wrote the line.

structlog, the standard library's loggers and gunicorn's go through one formatter, and every line says which part it is
from. `logger` is part of a line: where a module moves, its logger keeps its name.
"""

import logging
import sys
from typing import Any, Literal

import msgspec
import structlog

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Libraries that tell at info what only their authors need.
_QUIET = ("urllib3", "kubernetes", "asyncio")


def setup(component: str, level: LogLevel = "info", fmt: LogFormat = "json") -> None:
    """Call once, early, in `main`. Lines carry `component`; bind more by `structlog.contextvars.bind_contextvars`."""
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
    for name in _QUIET:
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


def _renderers(fmt: LogFormat) -> list[structlog.typing.Processor]:
    if fmt == "text":
        plain = structlog.dev.plain_traceback  # not the values of all variables
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]


def _json(event: Any, **_: Any) -> str:
    # The order people read in; what cannot be encoded must not lose the line.
    ordered = {key: event.pop(key) for key in ("time", "level", "component", "event") if key in event}
    return msgspec.json.encode(ordered | event, enc_hook=repr).decode()
