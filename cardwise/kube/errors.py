"""Errors of calls to the API server.

The classes differ by how a caller reacts: read again (Conflict), list again (Gone), wait (TooManyRequests, ServerError,
Unreachable), or report the error to the user. Bodies of responses are shortened, because objects may contain secrets
and a log line must stay one line. Callers can catch these errors without importing the transport.
"""

from collections.abc import Mapping

import msgspec

from cardwise.core.values import wording

MAX_MESSAGE = 512  # bytes


class KubeError(Exception):
    """A call to the API server failed: there was an error response, or no response.

    status: the HTTP status; 0 if there was no response.
    reason: the reason of the Status object, such as "AlreadyExists".
    message: the server's message, at most 512 bytes.
    retry_after: the seconds of the Retry-After header; None if there was none.
    """

    def __init__(self, status: int, reason: str = "", message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(status, reason, message)
        self.status = status
        self.reason = reason
        self.message = wording.sanitize_message(message, MAX_MESSAGE)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.status} {self.reason}: {self.message}" if self.status else f"{self.reason}: {self.message}"


class BadRequest(KubeError):
    """400: the request is malformed; repeating it cannot help."""


class InvalidName(BadRequest):
    """The name is invalid for every kind of object, so the request was not sent. The message quotes the name."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "InvalidName", message)

    def __str__(self) -> str:
        return self.message


class Unauthorized(KubeError):
    """401: the credentials are missing or no longer valid."""


class Forbidden(KubeError):
    """403: RBAC, an admission webhook or a quota refused."""


class NotFound(KubeError):
    """404: the object or its kind does not exist."""


class UnknownKind(NotFound):
    """404: the API server does not know the kind (is the CRD installed?)."""


class Conflict(KubeError):
    """409: the object has changed; read it again and decide again."""


class AlreadyExists(Conflict):
    """409 on create: the object exists already."""


class Gone(KubeError):
    """410: the resourceVersion or the continue token is too old; list again."""


class Invalid(KubeError):
    """422: the object breaks its schema or an immutable field, or a JSON patch `test` failed."""


class TooManyRequests(KubeError):
    """429: wait `retry_after` seconds. For an eviction: a PodDisruptionBudget does not allow it."""


class ServerError(KubeError):
    """5xx: the server failed; it may or may not have carried out the request."""


class Unreachable(KubeError):
    """There was no complete response: the connection was refused, timed out or broke. The server may or may not have
    carried out the request.
    """

    def __init__(self, message: str) -> None:
        super().__init__(0, "Unreachable", message)


class WatchSilent(Unreachable):
    """A watch sent nothing for longer than a healthy API server does: its connection may be lost."""


class TimedOut(Unreachable):
    """There was no response in time. The cause may be the object and not the server: writes of an object with a MiB of
    labels or `managedFields` take seconds.
    """


class TooLarge(Unreachable):
    """The response is larger than the caller accepts; the rest was not read."""


class KubeConfigError(Exception):
    """There are no usable credentials; the message names the sources that were tried."""


_ERROR_BY_STATUS: dict[int, type[KubeError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


_UNAVAILABLE_STATUS = 503
_NO_SUCH_RESOURCE = "the server could not find the requested resource"


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: float = 0


class _Status(msgspec.Struct, rename="camel"):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


_decode_status = msgspec.json.Decoder(_Status).decode


def would_fail_other_writes(error: KubeError) -> bool:
    """Whether the API server or the network failed. Then a write to another object would fail as well.

    Do not use this for evictions: there, 429 means that a disruption budget forbids the eviction.
    """
    if isinstance(error, TimedOut):
        return False
    return isinstance(error, (Unreachable, Unauthorized, TooManyRequests)) or error.status == _UNAVAILABLE_STATUS


def from_response(status: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    """The error of an HTTP response with status 400 or above; `body` is a Status object, or a proxy's text."""
    try:
        status_object = _decode_status(body)
    except msgspec.DecodeError:
        status_object = _Status(message=body[:MAX_MESSAGE].decode(errors="replace").strip())
    return _build(status, status_object, _retry_after(headers.get("Retry-After")))


def from_status(body: bytes) -> KubeError:
    """The error of an ERROR event in a watch, whose object is a Status."""
    try:
        status_object = _decode_status(body)
    except msgspec.DecodeError:
        status_object = _Status(message="undecodable Status in a watch", code=500)
    return _build(status_object.code or 500, status_object, None)


def _build(status: int, status_object: _Status, retry_after: float | None) -> KubeError:
    kind = _ERROR_BY_STATUS.get(status, ServerError if status >= 500 else KubeError)
    # For an unknown API group the server sends no Status object; for an unknown kind of a known group, this message.
    if status == 404 and (not status_object.reason or status_object.message == _NO_SUCH_RESOURCE):
        kind = UnknownKind
    if status == 409 and status_object.reason == "AlreadyExists":
        kind = AlreadyExists
    # An expired resourceVersion: some proxies change the code to another one, so the reason decides.
    if status_object.reason in ("Expired", "Gone"):
        kind = Gone
    if retry_after is None and status_object.details is not None and status_object.details.retry_after_seconds > 0:
        retry_after = status_object.details.retry_after_seconds
    return kind(status, status_object.reason, status_object.message, retry_after=retry_after)


def _retry_after(header: str | None) -> float | None:
    # The API server writes whole seconds. Only a proxy writes a date; then the caller's own back-off is used.
    return float(header) if header is not None and header.isdigit() else None
