"""`cardwise` as people type it, without its process, which takes a second of a core to start.

That the program starts as it is typed is shown by people/test_cli.py and people/test_docs.py.
"""

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest import mock

from cardwise.cli import main
from tests.cluster import Cluster


def cardwise(cluster: Cluster, *args: str) -> CompletedProcess[str]:
    return typed(cluster.environment(), *args)


def typed(environment: Mapping[str, str], *args: str) -> CompletedProcess[str]:
    """Where these variables are set beside the others."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["cardwise", *args]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        code = _ended()
    out, err = (stream.buffer.getvalue().decode() for stream in (stdout, stderr))  # type: ignore[attr-defined]
    return CompletedProcess(args, code, out, err)


def _ended() -> int:
    """As the interpreter ends a process."""
    try:
        main.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0
