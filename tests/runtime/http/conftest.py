from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cardwise.runtime.http.httpserver import Limits
from cardwise.runtime.tls.certstore import DirStore
from cardwise.runtime.tls.tls import Rotator
from tests.runtime.http.loopback import Contexts, Serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(context: Contexts | None = None, threads: int = 2, call_owner=None, kind=Serving, **limits) -> Serving:
        started.append(kind(Limits(**limits), context, threads, call_owner))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> Path:
    """The certificates of a server and of a client, in one directory."""
    directory = tmp_path_factory.mktemp("tls")
    Rotator(DirStore(directory / "store"), ["127.0.0.1"], directory, need_client=True).ensure_certificates()
    return directory
