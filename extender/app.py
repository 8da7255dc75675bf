"""The HTTP shell: gpushare's paths, one function a verb, no decisions.

Whatever is wrong with a call, filter and bind answer 200 with `Error`: kube-scheduler hides the body of anything else
from the user.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import structlog
from flask import Flask, Response, request
from werkzeug.exceptions import RequestEntityTooLarge

from cardwise.core import names
from cardwise.runtime import gthreads
from extender import verbs, wire
from extender.binder import Binder, Failed
from extender.metrics import Metrics
from extender.requests import Requests
from extender.state import State
from extender.verbs import Preferences
from extender.wire import BindResult, FilterResult, Malformed

_log = structlog.get_logger(__name__)

_MOST_BYTES = 256 << 20  # 5,000 whole Nodes, as a scheduler with nodeCacheCapable: false sends them, and to spare
_TROUBLE = "the extender failed on this call; see its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the shell calls. `missing`: why no answer can be given yet, a line each."""

    state: State
    requests: Requests
    binder: Binder
    metrics: Metrics
    preferences: Preferences
    missing: Callable[[], list[str]]


def create_app(parts: Parts) -> Flask:
    """The WSGI application."""
    app = Flask("cardwise-extender", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = _MOST_BYTES
    prefix = names.EXTENDER_PREFIX

    @app.post(f"{prefix}/filter")
    def filter_() -> Response:
        with parts.metrics.timed("filter"):
            return _json(_filter(parts))

    @app.post(f"{prefix}/prioritize")
    def prioritize() -> Response:
        with parts.metrics.timed("prioritize"):
            return _json(_prioritize(parts))

    @app.post(f"{prefix}/bind")
    def bind() -> Response:
        with parts.metrics.timed("bind"):
            return _json(BindResult(error=_bind(parts)))

    @app.get(f"{prefix}/inspect")
    @app.get(f"{prefix}/inspect/<node>")
    def inspect(node: str | None = None) -> Response:
        with parts.metrics.timed("inspect"):
            return _json(verbs.inspect(parts.state, node))

    @app.get("/version")
    def version() -> Response:
        return Response(metadata.version("cardwise"), mimetype="text/plain")

    @app.get("/healthz")
    def healthz() -> Response:
        return Response("ok\n", mimetype="text/plain")

    @app.get("/readyz")
    def readyz() -> Response:
        missing = parts.missing()
        text = "".join(f"{line}\n" for line in missing) or "ok\n"
        return Response(text, status=503 if missing else 200, mimetype="text/plain")

    return app


def _body() -> bytes:
    """Of the call that is being answered. Raises Malformed."""
    try:
        return request.get_data(cache=False)
    except RequestEntityTooLarge as error:
        raise Malformed(f"the call is larger than {_MOST_BYTES >> 20} MiB") from error


def _filter(parts: Parts) -> FilterResult:
    missing = parts.missing()
    if missing:
        return FilterResult(error=f"not ready: {missing[0]}")
    parts.binder.wait_for_calm()
    try:
        answer = verbs.filter_nodes(parts.state, parts.requests, parts.preferences, wire.filter_args(_body()))
    except Malformed as error:
        return FilterResult(error=str(error))
    except Exception:  # noqa: BLE001 - the outermost frame of a call; logged, and answered as the protocol wants
        _log.exception("filter failed")
        return FilterResult(error=_TROUBLE)
    if answer.failed_nodes or answer.failed_and_unresolvable_nodes:
        parts.metrics.refused(answer.failed_nodes or answer.failed_and_unresolvable_nodes)
    return answer


def _prioritize(parts: Parts) -> list[wire.HostPriority]:
    try:
        return verbs.prioritize(parts.state, parts.preferences, wire.filter_args(_body()))
    except Malformed as error:
        _log.info("unreadable prioritize call", error=str(error))
    except Exception:  # noqa: BLE001 - as in filter
        _log.exception("prioritize failed")
    return []  # the verb knows no error; without scores the scheduler uses its own


def _bind(parts: Parts) -> str:
    """The error for the scheduler, or ""."""
    missing = parts.missing()
    if missing:
        parts.metrics.bound("early")
        return f"not ready: {missing[0]}"
    outcome, text = "failed", _TROUBLE
    try:
        args = wire.bind_args(_body())
        arrived = request.environ.get(gthreads.ARRIVED, time.monotonic())
        outcome, text = parts.binder.bind(args, arrived=arrived), ""
    except Malformed as error:
        outcome, text = "malformed", str(error)
    except Failed as error:
        outcome, text = error.outcome, str(error)
    except Exception:  # noqa: BLE001 - as in filter
        _log.exception("bind failed")
    parts.metrics.bound(outcome)
    return text


def _json(answer: object) -> Response:
    return Response(wire.encode(answer), mimetype="application/json")
