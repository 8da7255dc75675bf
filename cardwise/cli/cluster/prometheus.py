"""Reads Prometheus by its HTTP API: https://prometheus.io/docs/prometheus/latest/querying/api/."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import click
import msgspec
import urllib3
from msgspec import Struct
from urllib3.exceptions import HTTPError

from cardwise.core.values import wording

_Result = TypeVar("_Result")

_TIMEOUT_SECONDS: Final = 60.0
_MAX_BYTES: Final = 256 * 1024 * 1024  # maximum size of a response: 2,000 series of 500 points are 30 MB
_EXAMPLE: Final = "http://localhost:9090"
_MAX_MESSAGE: Final = 300  # bytes


class Sample(NamedTuple):
    """A sample of an instant query."""

    labels: Mapping[str, str]
    number: float


class Series(NamedTuple):
    """A time series. points: times in seconds since 1970, with their values."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class _VectorSample(Struct, frozen=True):
    point: tuple[float, str] = msgspec.field(name="value")
    metric: dict[str, str] = {}


class _MatrixSeries(Struct, frozen=True):
    points: list[tuple[float, str]] = msgspec.field(name="values")
    metric: dict[str, str] = {}


class _Data(Struct, frozen=True):
    samples: msgspec.Raw = msgspec.field(name="result")


class _Response(Struct, frozen=True):
    data: _Data


class _Failure(Struct, frozen=True):
    error: str


class Prometheus:
    """A Prometheus server. Its methods raise ClickException if it does not answer as Prometheus does."""

    def __init__(self, url: str) -> None:
        """url: with user and password if it needs them. Raises UsageError."""
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise click.UsageError(f"--prometheus: this is not a URL; write, for example, {_EXAMPLE}")
        userinfo, at, address = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=address, query="", fragment="").geturl().rstrip("/")
        headers = urllib3.make_headers(basic_auth=unquote(userinfo)) if at else None
        timeout = urllib3.Timeout(total=_TIMEOUT_SECONDS)
        self._pool = urllib3.PoolManager(headers=headers, timeout=timeout, retries=False)

    def read_time(self) -> float:
        """Prometheus' time in seconds since 1970."""
        now, _ = self._read("query", tuple[float, str], query="time()")
        return now

    def query(self, expression: str, time: float) -> list[Sample]:
        """The samples of an instant query at a time."""
        samples = self._read("query", list[_VectorSample], query=expression, time=time)
        return [Sample(sample.metric, float(sample.point[1])) for sample in samples]

    def query_range(self, expression: str, *, start: float, end: float, step: float) -> list[Series]:
        """The series of a range query; start and end are included, and `step` is in seconds."""
        matrix = self._read("query_range", list[_MatrixSeries], query=expression, start=start, end=end, step=step)
        return [Series(series.metric, [(time, float(text)) for time, text in series.points]) for series in matrix]

    def _read(self, path: str, kind: type[_Result], **fields: Any) -> _Result:
        try:
            response = self._pool.request("GET", f"{self._url}/api/v1/{path}", fields=fields, preload_content=False)
            try:
                body = response.read(_MAX_BYTES + 1)
            finally:
                response.release_conn()
        except HTTPError as error:
            problem = wording.sanitize_message(str(error), _MAX_MESSAGE)
            raise click.ClickException(f"Prometheus at {self._url} does not answer: {problem}") from None
        if len(body) > _MAX_BYTES:
            raise click.ClickException(f"the answer of Prometheus at {self._url} is too long: shorten --since")
        try:
            if response.status == HTTPStatus.OK:
                return msgspec.json.decode(msgspec.json.decode(body, type=_Response).data.samples, type=kind)
            problem = msgspec.json.decode(body, type=_Failure).error
        except (msgspec.MsgspecError, ValueError):
            problem = f"status {response.status}, and not an answer of Prometheus' API: check the URL"
        raise click.ClickException(f"Prometheus at {self._url}: {wording.sanitize_message(problem, _MAX_MESSAGE)}")


def namespace_selector_suffix(namespace: str) -> str:
    """The selector behind the name of a metric, for the series of a namespace; "" for those of all namespaces."""
    return f"{{namespace={json.dumps(namespace)}}}" if namespace else ""
