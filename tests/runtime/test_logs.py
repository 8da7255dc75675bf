import json
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from cardwise.runtime import logs

PROGRAM = """
import logging, warnings, structlog
from cardwise.runtime import logs
early = structlog.get_logger("early")
logs.configure("webhook", {level!r}, {fmt!r})
early.info("hello", pod="ns/p", odd=object)
structlog.contextvars.bind_contextvars(request="r1")
logging.getLogger("gunicorn.error").warning("from %s", "gunicorn")
logging.getLogger("x").info("extra", extra=dict(node="n1"))
structlog.get_logger().debug("too much")
logging.getLogger("urllib3").info("too much")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("broke")
    logging.getLogger("x").exception("broke too")
"""


def lines(level: str, fmt: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(level=level, fmt=fmt)], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_every_line_is_json_and_names_its_component():
    entries = [json.loads(line) for line in lines("info", "json")]
    assert [entry["event"] for entry in entries] == ["hello", "from gunicorn", "extra", "broke", "broke too"]
    assert {entry["component"] for entry in entries} == {"webhook"}
    assert entries[0]["pod"] == "ns/p"
    assert entries[0]["logger"] == "early"
    assert [entry.get("request") for entry in entries] == [None, "r1", "r1", "r1", "r1"]
    assert entries[2]["node"] == "n1"
    assert [entry["level"] for entry in entries] == ["info", "warning", "info", "error", "error"]
    for entry in entries[3:]:
        assert "ZeroDivisionError" in entry["exception"]
    assert list(entries[0])[:4] == ["time", "level", "component", "event"]


def test_level_and_text():
    assert not any("hello" in line for line in lines("warning", "text"))
    assert any("hello" in line and "pod=ns/p" in line for line in lines("info", "text"))


LONG = """
import logging, structlog
from cardwise.runtime import logs
logs.configure("webhook", "info", {fmt!r})
long = "\\u00e9" * 100_000
structlog.get_logger().info("refused", message=long, many=[long] * 10, table={{long: long}}, odd=2**9999)
structlog.get_logger().info(long)
logging.getLogger("gunicorn.error").warning("from %s", long, extra=dict(pod=long))
try:
    raise ValueError(long)
except ValueError:
    structlog.get_logger().exception("broke", error=long)
    logging.getLogger("x").exception("broke %s", long)
"""


def test_lines_with_long_quotations_are_short():
    """120 KB of log for each refused dry run, and 81 MiB in 11 s."""
    for fmt in ("json", "text"):
        done = subprocess.run(
            [sys.executable, "-c", LONG.format(fmt=fmt)], capture_output=True, text=True, check=True, encoding="utf-8"
        )
        assert len(done.stderr.encode()) < 40_000
        assert done.stderr.count("ValueError: é") == 2
        if fmt == "json":
            entries = [json.loads(line) for line in done.stderr.splitlines()]
            assert len(entries) == 5
            for line in entries:
                for key, field in line.items():
                    assert len(str(field).encode()) <= (8192 if key == "exception" else 1024), key


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=2000) | st.just(object)
    | st.builds(lambda text, times: text * times, st.text(st.characters(exclude_categories=()), max_size=5),
                st.sampled_from([1, 500])),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["event", "pod", "error", "models"]), VALUES))
def test_each_field_is_truncated_and_no_line_is_lost(fields):
    line = json.loads(logs._json(logs._cut_fields(None, "", dict(fields))))
    assert line.keys() == fields.keys()
    for field in line.values():
        assert len(json.dumps(field, ensure_ascii=False, separators=(",", ":")).encode()) <= 8 * 1024
        assert not isinstance(field, str) or len(field.encode()) <= 1024
