"""Histories as files: `python -m tests.property.replay FILE…` executes them again, and `--shrink` makes them shorter.

A history is a list of steps, the first of which is the world; in a file there is one on each line.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.property.blackbox import Build, History, replay, today

SECONDS = 60.0  # for which a history is made smaller


def read(path: Path) -> History:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def write(path: Path, history: History) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(step) + "\n" for step in history))


def broken(history: History, build: Build = today) -> str:
    """The rule that the history breaks; "" for none."""
    try:
        replay(history, build)
    except Exception as error:  # noqa: BLE001 - of whatever is wrong
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def shrunk(history: History, build: Build = today, *, seconds: float = SECONDS) -> History:
    """The history without steps that are not needed to break the same rule."""
    kind = _kind(broken(history, build))
    return less(history, lambda less: _kind(broken(less, build)) == kind, seconds=seconds) if kind else history


def less(history: History, still: Callable[[History], bool], *, seconds: float = SECONDS) -> History:
    """The history without steps that are not needed for `still` to return True."""
    until = time.monotonic() + seconds
    size = len(history) // 2
    while size and time.monotonic() < until:
        at, before = len(history) - size, len(history)
        while at >= 1 and time.monotonic() < until:
            rest = history[:at] + history[at + size :]
            if still(rest):
                history = rest
            at -= size
        size = min(size, len(history) - 1) if len(history) < before else size // 2
    return history


def _kind(text: str) -> str:
    """The broken rule, without the names of objects."""
    return "".join(
        letter for letter in text.split("[", maxsplit=1)[0].split("Given(", maxsplit=1)[0] if not letter.isdigit()
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.property.replay", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--shrink", action="store_true", help="write FILE anew, without the steps that are not needed")
    args = parser.parse_args()
    bad = 0
    for path in args.files:
        history = read(path)
        if args.shrink:
            history = shrunk(history)
            write(path, history)
        message = broken(history)
        bad += bool(message)
        print(f"{path}: {len(history) - 1} steps: {message or 'all rules hold'}")
    return 1 if bad else 0


def in_order(module: str) -> None:
    """Restart the process with a fixed hash seed, because the order of sets affects the history."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    in_order("tests.property.replay")
    sys.exit(main())
