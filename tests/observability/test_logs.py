"""Log lines of all parts name a pod in the same way: `pod` as "namespace/name", and `uid`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observability.metricdocs import ROOT, parsed

PARTS = ("webhook", "extender", "deviceplugin", "mps")
_LEVELS = ("debug", "info", "warning", "error", "exception")
# The UID is unknown: a Binding names its pod by name only.
WITHOUT_UID = {"admitting a Binding without a check: its pod could not be read"}


def lines(part: str) -> Iterator[tuple[str, Path, set[str]]]:
    """Event, file and the fields of each call of a logger."""
    for path in sorted((ROOT / part).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEVELS:
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "_log" and node.args:
                    event = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                    yield str(event), path, {keyword.arg or "" for keyword in node.keywords}


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_is_named_with_its_namespace_and_uid(part: str) -> None:
    log_calls = list(lines(part))
    assert log_calls, "no line was found"
    for event, path, fields in log_calls:
        about = f"{path.relative_to(ROOT)}: {event!r} has {sorted(fields)}"
        if "pod" in fields and event not in WITHOUT_UID:
            assert "uid" in fields, about
            assert "namespace" not in fields, f"{about}; the namespace belongs into pod"
        if "uid" in fields:
            assert "pod" in fields, about
