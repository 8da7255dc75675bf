"""Reject names that say nothing: `python -m tests.words [--count]`.

Reads words.toml beside this file. Prints each rejected name with its place, and ends with 1 if there is any.
`--count` prints how many names each folder has, the folders that are not renamed yet included.
"""

import argparse
import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[2]


class Rejected(NamedTuple):
    """A name that the list rejects, and its place."""

    path: str
    line: int
    kind: str
    name: str


def names_in(source: str) -> Iterator[tuple[int, str, str]]:
    """The names that a module defines, as line, kind (`variable` or `function`) and name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, "variable", name.lstrip("_")
            case ast.arg(arg=name):
                yield node.lineno, "variable", name.lstrip("_")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, "function", name.lstrip("_")


def rejected_names(path: str, source: str, words: dict[str, list[str]], allowed: set[str]) -> Iterator[Rejected]:
    """The names of one module that the list rejects."""
    for line, kind, name in names_in(source):
        if name in words[f"{kind}s"] and name not in allowed:
            yield Rejected(path, line, kind, name)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def main() -> int:
    """Check all tracked modules; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.words", description="Reject names that say nothing.")
    parser.add_argument("--count", action="store_true", help="count the names of each folder, pending ones included")
    parser.add_argument("paths", nargs="*", help="check these files or folders, pending or not")
    options = parser.parse_args()
    config = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=_ROOT, check=True, capture_output=True, text=True)
    rejected: list[Rejected] = []
    for path in tracked.stdout.split():
        if path.endswith("_pb2.py") or not (_ROOT / path).exists():
            continue
        if options.paths:
            if not any(_is_below(path, folder.rstrip("/")) for folder in options.paths):
                continue
        elif not options.count and any(_is_below(path, folder) for folder in config["pending"]):
            continue
        allowed = {name for folder, names in config["allowed"].items() if _is_below(path, folder) for name in names}
        rejected += rejected_names(path, (_ROOT / path).read_text(), config, allowed)
    if options.count:
        folders = Counter("/".join(Path(name.path).parts[:2]) for name in rejected)
        for folder, count in folders.most_common():
            print(f"{count:6} {folder}")
        print(f"{len(rejected):6} in all")
        return 0
    for name in rejected:
        print(f"{name.path}:{name.line}: {name.kind} `{name.name}`: use the word of the field (tests/words/words.toml)")
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main())
