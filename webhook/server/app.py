"""The HTTP layer: POST /mutate, /mutate/defaults, /validate, /validate/bindings and /advise; GET /healthz.

A path with the suffix /gib is for namespaces where gpu-mem numbers without a unit mean GiB. The API server chooses the
path by the namespace's label (namespaceSelector), so the meaning of a number does not depend on a cache.

This module only decodes, calls the decision, encodes and counts. A call gets status 400 with the reason if the body is
not an AdmissionReview, or if the reviewed resource belongs to another path (`RESOURCES_BY_PATH`). An unexpected error
gets 500 and a log line, never a traceback in the answer.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values import wording
from cardwise.core.values.quantity import Unit
from cardwise.kube.errors import KubeError
from cardwise.runtime.http import httpcalls
from cardwise.runtime.logs import LineLimit
from webhook import deadline, metrics
from webhook.pods.context import Lookups, WebhookSettings
from webhook.server import decisions, review
from webhook.server.decisions import Decide
from webhook.server.review import Decision, Review
from webhook.templates import templates

# An object is at most 1.5 MiB in etcd and 3 MiB in a request; a review holds two.
MAX_BODY = 8 * 1024 * 1024

_ADVICE_PATH = "/advise"  # the path that never refuses
# The path of reviews of Bindings. The API server waits one second for the response and then continues without it, so
# these reviews must not wait behind large reviews.
BINDINGS_PATH = "/validate/bindings"

DECIDE_BY_PATH: Mapping[str, Decide] = {
    "/mutate": decisions.decide_mutate,
    "/mutate/defaults": decisions.decide_defaults,
    "/validate": decisions.decide_validate,
    BINDINGS_PATH: decisions.decide_validate,
    _ADVICE_PATH: decisions.decide_advise,
}

# The resources that the chart's webhook configurations send to each path; /advise also gets those of
# `webhook.workloadKinds`. A review of another resource is refused before it is decoded: a class that takes long to
# compare must not occupy the threads for Bindings.
RESOURCES_BY_PATH: Final[Mapping[str, frozenset[str]]] = {
    "/mutate": templates.KINDS | {"pods", "resourcequotas", "limitranges", "resourceclasses"},
    "/mutate/defaults": frozenset({"pods"}),
    "/validate": (templates.KINDS - {"daemonsets", "podtemplates"})
    | {"pods", "namespaces", "resourceclasses", "gpuquotas"},
    BINDINGS_PATH: frozenset({"pods/binding", "bindings"}),
    _ADVICE_PATH: (templates.KINDS - {"podtemplates"}) | {"pods", "resourcequotas", "limitranges"},
}
_KNOWN_RESOURCES: Final = frozenset[str]().union(*RESOURCES_BY_PATH.values())

# The unit of gpu-mem numbers without a unit, by the suffix of the path.
UNIT_BY_PATH_END: Final[Mapping[str, Unit]] = {"": Unit.MIB, "/gib": Unit.GIB}

_NAMESPACE_PATTERN: Final = re.compile(rb'"namespace":\s*"([a-z0-9.-]{1,253})"')
# The namespace is within so many bytes: before it are a uid, kinds, resources and a name of at most 253 bytes each.
_NAMESPACE_WITHIN_BYTES: Final = 4096

_log = structlog.get_logger("webhook.app")


def namespace_of(environ: Mapping[str, Any]) -> str:
    """The namespace of a review, for fair queueing; "" if there is none. The API server sends the reviews of all
    namespaces. Without fair queueing, a user who creates pods in parallel, even as dry runs, would delay other users.

    The API server writes the namespace before the object. So only the first 4 KiB are searched, instead of decoding 8
    MiB. A match is never inside a string, where its quotes would be escaped. If a client other than the API server
    sends a false namespace, only the order of its own calls changes.
    """
    match = _NAMESPACE_PATTERN.search(environ["wsgi.input"].getvalue(), 0, _NAMESPACE_WITHIN_BYTES)
    return match[1].decode() if match is not None else ""


def accepts_resource(path: str, resource: str) -> bool:
    """Whether the API server sends reviews of the resource (with its subresource) to the path."""
    return resource in RESOURCES_BY_PATH[path] or (path == _ADVICE_PATH and resource not in _KNOWN_RESOURCES)


def deadline_of(environ: Mapping[str, Any], clock: Clock) -> float:
    """The time, as of `clock.now`, until which a review must be decided. The time in which the call arrived and waited
    for a thread counts.
    """
    arrived: float = environ.get(httpcalls.ARRIVED_KEY, clock.now())
    return arrived + deadline.seconds_of(environ.get("QUERY_STRING", ""))


def create_app(view: Lookups, settings: WebhookSettings, clock: Clock = SYSTEM) -> Flask:
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY

    refusals, failures = LineLimit(_log, clock), LineLimit(_log, clock)
    by_unit = {unit: replace(settings, unit=unit) for unit in UNIT_BY_PATH_END.values()}

    def answer_review(path: str, decide: Decide, unit: Unit) -> Response:
        started = time.perf_counter()
        structlog.contextvars.clear_contextvars()  # clears the log context of the thread's former review
        # Not `request.mimetype`: werkzeug reads the parameters too, which takes 95 ms for 60 KB of them.
        media_type = request.environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise review.InvalidReview(f"Content-Type must be application/json, but is {media_type or 'nothing'}")
        try:
            received = review.decode(request.get_data(cache=False), partial(accepts_resource, path))
        except review.UndecodableReview as error:
            # The user would see an HTTP error only as "the server rejected our request for an unknown reason".
            namespace, uid = "", error.uid
            decision = Decision(allowed=path == _ADVICE_PATH, message=str(error))
        else:
            structlog.contextvars.bind_contextvars(**_log_context(received))
            namespace, uid = received.namespace, received.uid
            received = replace(received, caller=httpcalls.client_network(request.environ["REMOTE_ADDR"]))
            with deadline.review_deadline(clock, deadline_of(request.environ, clock)):
                decision = decide(received, view, by_unit[unit])
        body = review.encode(uid, decision)
        metrics.REVIEWS.labels(path, _outcome(decision)).inc()
        metrics.REVIEW_SECONDS.labels(path).observe(time.perf_counter() - started)
        if not decision.allowed:
            metrics.REFUSALS.labels(path, metrics.refusal_reason(decision.about)).inc()
            refusals.log("info", namespace, "refused", path=path, message=decision.message)
        return Response(body, mimetype="application/json")

    for path, decide in DECIDE_BY_PATH.items():
        for suffix, unit in UNIT_BY_PATH_END.items():
            arguments = {"path": path, "decide": decide, "unit": unit}
            app.add_url_rule(path + suffix, path + suffix, answer_review, methods=["POST"], defaults=arguments)
    app.add_url_rule("/healthz", "healthz", lambda: _text_response("ok", 200), methods=["GET"])
    app.register_error_handler(review.InvalidReview, _answer_malformed)
    app.register_error_handler(HTTPException, _answer_http_error)
    app.register_error_handler(Exception, lambda error: _answer_failure(error, failures))
    return app


def _log_context(received: Review) -> dict[str, str]:
    """The object's keys in log lines. A pod that is being created may have only the beginning of its name."""
    metadata = received.object.get("metadata") or {}
    name = received.name or metadata.get("name") or metadata.get("generateName") or ""
    subject = (
        {"pod": f"{received.namespace}/{name}"}
        if received.resource.partition("/")[0] in ("pods", "bindings")
        else {"resource": received.resource, "object": f"{received.namespace}/{name}" if received.namespace else name}
    )
    return subject | {"uid": str(metadata.get("uid") or "")}


def _outcome(decision: Decision) -> str:
    if not decision.allowed:
        return "refused"
    return "patched" if decision.patch else "allowed"


def _request_path() -> str:
    """The path of the request, as metrics and logs name it."""
    path = request.path.removesuffix("/gib")
    return path if path in DECIDE_BY_PATH else "other"


def _answer_malformed(error: review.InvalidReview) -> Response:
    metrics.REVIEWS.labels(_request_path(), "malformed").inc()
    return _text_response(str(error), 400)


def _answer_http_error(error: HTTPException) -> Response:
    return _text_response(f"{error.name}: {error.description}", error.code or 500)


def _answer_failure(error: Exception, log_limit: LineLimit) -> Response:
    path = _request_path()
    metrics.REVIEWS.labels(path, "failed").inc()
    if isinstance(error, deadline.ReviewTimeout):
        # The API server shows the text of a 503 to the user. At paths that never refuse it ignores the answer.
        seconds = deadline.seconds_of(request.environ.get("QUERY_STRING", ""))
        log_limit.log("warning", "cannot decide in time", "cannot decide in time", path=path, seconds=seconds)
        return _text_response(
            f"the webhook did not finish this review within {seconds:g} s, because it or the API server is busy; try "
            "again, or raise webhook.timeoutSeconds of the chart",
            503,
        )
    if isinstance(error, KubeError):
        # The API server shows the text to the user who created the object.
        log_limit.log("warning", "cannot decide", "cannot decide", path=path, error=str(error))
        return _text_response("the webhook cannot read what it needs from the API server; try again", 503)
    log_limit.log("error", "review failed", "review failed", path=path, exc_info=error)
    return _text_response("the webhook failed to handle this review; see its log", 500)


def _text_response(message: str, status: int) -> Response:
    return Response(wording.sanitize_message(message) + "\n", status, mimetype="text/plain")
