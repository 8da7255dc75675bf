"""The HTTP paths of the extender, the same as gpushare's: one function for each verb, without decisions.

Errors, by verb:

- filter, bind: status 200 and the field `Error`. kube-scheduler does not show users the body of a response with another
  status.
- preempt: its response has no field for errors, so the extender refuses such a call with status 503. Nominations stay.
- prioritize: the response has no field for errors, and kube-scheduler ignores failures of this verb. A malformed call
  gets status 400; otherwise the list of scores is empty.

The calls of kube-scheduler's four verbs do not pass through Flask. These verbs only need the body of the call, and
Flask took more than a third of their CPU time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import structlog
from flask import Flask, Response, request

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from cardwise.runtime.http import httpcalls
from cardwise.runtime.http.httpcalls import Environ, TakesLong, WsgiApp
from extender.api import verbs
from extender.api.metrics import Metrics, most_frequent
from extender.api.verbs import AnswerSettings
from extender.binding.binder import Binder, BindFailed
from extender.cache import statelock
from extender.leadership.leadership import Leadership
from extender.placing.placing import Call
from extender.records import wire
from extender.records.wire import BindResult, FilterResult, Malformed
from extender.state import State

_log = structlog.get_logger(__name__)

# Bytes of a call. With nodeCacheCapable: false kube-scheduler sends whole Nodes: 5,000 Nodes take less than this.
MAX_BODY_BYTES = 256 << 20
Verb = Callable[[Environ], object]
_BUSY_TEXT = "not ready: the extender is busy with another operation"
_FAILED_TEXT = "the extender failed on this call; see its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppComponents:
    """The components of the extender that the HTTP paths call.

    unsynced_lists: returns the incomplete lists, one line for each. Calls are served once all lists are complete. A
        standby is ready as well; otherwise a rolling update would stop.
    outdated_watches: returns the interrupted watches, one line for each. While a watch is interrupted, no pod is
        placed. The process stays ready, because another extender would have no newer data.
    disconnected_seconds: returns for each kind of object the seconds without an open watch. In this time events may be
        missed.
    notice: see `verbs.filter_nodes`.
    inspect_unit: the unit of memory in the responses of inspect.
    """

    state: State
    binder: Binder
    metrics: Metrics
    preferences: AnswerSettings
    unsynced_lists: Callable[[], list[str]]
    outdated_watches: Callable[[], list[str]] = list
    disconnected_seconds: Callable[[], Mapping[str, float]] = dict
    leadership: Leadership = field(default_factory=Leadership)
    notice: verbs.NotifyFullQuota | None = None
    inspect_unit: Unit = Unit.MIB


def create_app(components: AppComponents) -> Flask:
    """Make the WSGI application."""
    app = Flask("cardwise-extender", static_folder=None)
    prefix = names.EXTENDER_PREFIX
    app.wsgi_app = _PostHandler(  # type: ignore[method-assign]
        app.wsgi_app,
        components.metrics,
        {
            f"{prefix}/filter": ("filter", lambda environ: _serve_filter(components, environ)),
            f"{prefix}/prioritize": ("prioritize", lambda environ: _serve_prioritize(components, environ)),
            f"{prefix}/preempt": ("preempt", lambda environ: _serve_preempt(components, environ)),
            f"{prefix}/bind": ("bind", lambda environ: BindResult(error=_serve_bind(components, environ) or "")),
        },
    )

    @app.get(f"{prefix}/inspect")
    @app.get(f"{prefix}/inspect/<node>")
    def inspect(node: str | None = None) -> Response:
        if _is_busy(components):
            return Response(f"{_BUSY_TEXT}\n", status=503, mimetype="text/plain")
        with components.metrics.measure_call("inspect"):
            return Response(
                wire.encode(verbs.inspect(components.state, node, components.inspect_unit)), mimetype="application/json"
            )

    @app.get("/version")
    def version() -> Response:
        return Response(metadata.version("cardwise"), mimetype="text/plain")

    @app.get("/healthz")
    def healthz() -> Response:
        return Response("ok\n", mimetype="text/plain")

    @app.get("/readyz")
    def readyz() -> Response:
        unsynced_lists = components.unsynced_lists()
        lines = unsynced_lists or ["ok"]
        if "verbose" in request.args:
            lines = [*lines, components.leadership.summary(), *watch_lines(components.disconnected_seconds())]
        text = "".join(f"{line}\n" for line in lines)
        return Response(text, status=503 if unsynced_lists else 200, mimetype="text/plain")

    return app


def watch_lines(disconnected: Mapping[str, float]) -> list[str]:
    """Lines for people: for each kind of object, the seconds since its watch was interrupted."""

    def age(seconds: float) -> str:
        if seconds == math.inf:
            return "not listed yet"
        return f"no watch for {seconds:.0f} s" if seconds else "current"

    return [f"{kind}: {age(seconds)}" for kind, seconds in sorted(disconnected.items())]


class _Unavailable(Exception):
    """The call cannot be served, and the verb has no field for an error."""


class _PostHandler:
    """WSGI middleware: serves POSTs to the paths of `verbs` itself, as JSON; passes all other calls to the app."""

    def __init__(self, app: WsgiApp, metrics: Metrics, verbs: Mapping[str, tuple[str, Verb]]) -> None:
        self._app = app
        self._metrics = metrics
        self._verbs = verbs

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        route = self._verbs.get(environ["PATH_INFO"]) if environ["REQUEST_METHOD"] == "POST" else None
        if route is None:
            return self._app(environ, start_response)
        name, verb = route
        status, kind = "200 OK", "application/json"
        with self._metrics.measure_call(name):
            try:
                answer = wire.encode(verb(environ))
            except _Unavailable as error:
                status, answer = "503 Service Unavailable", wire.encode({"Error": str(error)})
            except Malformed as error:
                line = f"{' '.join(str(error).split())}\n"
                status, kind, answer = "400 Bad Request", "text/plain", line.encode(errors="replace")
            finally:
                structlog.contextvars.clear_contextvars()
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(answer)))])
        return [answer]


def _read_body(environ: Environ) -> bytes:
    """The body of the call. Raises Malformed if it is larger than `MAX_BODY_BYTES`."""
    length = int(environ.get("CONTENT_LENGTH") or "0")
    if length > MAX_BODY_BYTES:
        raise Malformed(f"the call is larger than {MAX_BODY_BYTES >> 20} MiB")
    body: bytes = environ["wsgi.input"].read(length)
    return body


def _is_busy(components: AppComponents) -> bool:
    """Whether a thread holds the state's lock for so long already that a call should not wait for it."""
    return components.state.lock_held_seconds() > statelock.REFUSE_SECONDS


def _unavailable_reason(components: AppComponents, environ: Environ) -> str | None:
    """Why this extender cannot serve the call now; None if it can serve it."""
    unsynced_lists = components.unsynced_lists()
    if _is_busy(components) and not environ.get(httpcalls.SLOW_KEY):
        return _BUSY_TEXT
    denial = components.leadership.denial()
    if denial is not None and denial.served_elsewhere:
        # Close the connection: kube-scheduler reaches another extender only by a new connection.
        environ.get(httpcalls.CLOSE_KEY, bool)()
        return denial.text
    if unsynced_lists:
        return f"not ready: {unsynced_lists[0]}"
    if denial is not None:
        return denial.text
    outdated = components.outdated_watches()
    return f"not ready: {outdated[0]}" if outdated else None


def _bind_log_context(args: wire.FilterArgs | wire.PreemptArgs) -> str:
    """Add the pod to all log lines of this call. Returns its UID."""
    ref = args.parsed_pod.ref
    structlog.contextvars.bind_contextvars(pod=ref.pod, uid=ref.uid)
    return ref.uid


def _read_filter_args(environ: Environ) -> wire.FilterArgs:
    """The arguments of filter or prioritize. Raises Malformed.

    Raises TakesLong if the call may take long. The server then continues the call in separate threads, which all
    namespaces share fairly.
    """
    args = wire.decode_filter_args(_read_body(environ))
    if verbs.takes_long(args):
        httpcalls.move_long_call(environ, args.parsed_pod.ref.namespace)
    return args


def _call_of(environ: Environ) -> Call:
    """The arrival time and the connection of the call, which limit a search for nodes."""
    return Call(environ.get(httpcalls.ARRIVED_KEY), lambda: httpcalls.is_abandoned(environ))


def _serve_filter(components: AppComponents, environ: Environ) -> FilterResult:
    unavailable = _unavailable_reason(components, environ)
    if unavailable:
        return FilterResult(error=unavailable)
    components.binder.throttle.delay_filter()
    try:
        args = _read_filter_args(environ)
        uid = _bind_log_context(args)
        answer = verbs.filter_nodes(
            components.state, components.preferences, args, components.notice, _call_of(environ)
        )
    except Malformed as error:
        return FilterResult(error=str(error))
    except TakesLong:
        raise
    except Exception:  # noqa: BLE001 - the outermost frame of a call; the protocol has a field for errors
        _log.exception("filter failed")
        return FilterResult(error=_FAILED_TEXT)
    reasons = answer.failed_nodes or answer.failed_and_unresolvable_nodes
    if reasons:
        reason = most_frequent(reasons)
        components.metrics.count_refusal(reason)
        with components.state.queue() as queue:
            queue.set_refusal_reason(uid, reason)
    return answer


def _serve_prioritize(components: AppComponents, environ: Environ) -> list[wire.HostPriority]:
    """The scores; none if the call cannot be served. Raises Malformed."""
    if _unavailable_reason(components, environ):
        return []
    try:
        args = _read_filter_args(environ)
        _bind_log_context(args)
        return verbs.prioritize(components.state, components.preferences, args, _call_of(environ))
    except Malformed as error:
        _log.info("failed to parse a prioritize call", error=str(error))
        raise
    except TakesLong:
        raise
    except Exception:  # noqa: BLE001 - as in filter
        _log.exception("prioritize failed")
    return []  # the response has no field for errors; without these scores kube-scheduler uses only its own


def _serve_preempt(components: AppComponents, environ: Environ) -> wire.PreemptResult:
    """The victims by node. Raises _Unavailable."""
    unavailable = _unavailable_reason(components, environ)
    if unavailable:
        raise _Unavailable(unavailable)
    try:
        args = wire.decode_preempt_args(_read_body(environ))
        httpcalls.move_long_call(environ, args.parsed_pod.ref.namespace)
        _bind_log_context(args)
        return verbs.preempt(components.state, components.preferences, args)
    except (Malformed, InvalidRequest) as error:
        raise _Unavailable(str(error)) from error
    except TakesLong:
        raise
    except Exception as error:
        _log.exception("preempt failed")
        raise _Unavailable(_FAILED_TEXT) from error


def _serve_bind(components: AppComponents, environ: Environ) -> str | None:
    """The error for kube-scheduler; None if the pod is bound."""
    unavailable = _unavailable_reason(components, environ)
    if unavailable:
        components.metrics.count_bind("not_ready")
        return unavailable
    outcome = "failed"
    text: str | None = _FAILED_TEXT
    try:
        args = wire.decode_bind_args(_read_body(environ))
        structlog.contextvars.bind_contextvars(pod=f"{args.pod_namespace}/{args.pod_name}", uid=args.pod_uid)
        connection, slow = environ.get(httpcalls.SOCKET_KEY), environ.get(httpcalls.SLOW_KEY, True)
        outcome = components.binder.bind(
            args, arrived=environ.get(httpcalls.ARRIVED_KEY), connection=connection, may_wait=slow
        )
        text = None
    except Malformed as error:
        outcome, text = "malformed", str(error)
    except BindFailed as error:
        outcome, text = error.outcome, str(error)
        with components.state.queue() as queue:
            queue.on_bind_failed(args.pod_uid)
    except Exception:  # noqa: BLE001 - as in filter
        _log.exception("bind failed")
    components.metrics.count_bind(outcome)
    return text
