import json
import subprocess
import sys

PROGRAM = """
import logging, warnings, structlog
from cardwise.runtime import logs
early = structlog.get_logger("early")
logs.setup("webhook", {level!r}, {fmt!r})
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


def test_every_line_is_json_and_says_which_part():
    got = [json.loads(line) for line in lines("info", "json")]
    assert [each["event"] for each in got] == ["hello", "from gunicorn", "extra", "broke", "broke too"]
    assert {each["component"] for each in got} == {"webhook"}
    assert got[0]["pod"] == "ns/p"
    assert got[0]["logger"] == "early"
    assert [each.get("request") for each in got] == [None, "r1", "r1", "r1", "r1"]
    assert got[2]["node"] == "n1"
    assert [each["level"] for each in got] == ["info", "warning", "info", "error", "error"]
    for each in got[3:]:
        assert "ZeroDivisionError" in each["exception"]
    assert list(got[0])[:4] == ["time", "level", "component", "event"]


def test_level_and_text():
    assert not any("hello" in line for line in lines("warning", "text"))
    assert any("hello" in line and "pod=ns/p" in line for line in lines("info", "text"))
