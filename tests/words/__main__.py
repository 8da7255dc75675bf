"""Reject names that say nothing, names that were given up, and phrases: `python -m tests.words [--count]`.

Reads words.toml beside this file. Prints each rejected name with its place, and ends with 1 if there is any. Names that
were given up are looked for in all text files, in documents and templates as well as in code.
Phrases are looked for in the docstrings and comments of the product. `--count` prints how many names each folder has.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_MAY_NAME_FORMER = {"tests/words/words.toml"}
_PRODUCT = ("cardwise", "extender", "webhook", "deviceplugin", "mps")


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


def former_names(path: str, text: str, former: list[str]) -> Iterator[Rejected]:
    """The names in a text that were given up, as whole words, also where a regular expression escapes their dots."""
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, former))})(?![\w-])")
    for number, line in enumerate(text.splitlines(), 1):
        for match in pattern.finditer(line.replace("\\", "")):
            yield Rejected(path, number, "former name", match[0])


def prose_in(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module: the line, and the text with single spaces. Comments on lines of their
    own that follow each other are one text.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                yield line, " ".join(text.split())
    block: list[str] = []
    last = first = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_alone = token.line.lstrip().startswith("#")
        if block and not (is_alone and line == last + 1):
            yield first, " ".join(block)
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("#: "))
        last = line if is_alone else -1
    if block:
        yield first, " ".join(block)


def rejected_phrases(path: str, source: str, phrases: list[str]) -> Iterator[Rejected]:
    """The phrases in the docstrings and comments of one module that the list rejects."""
    pattern = re.compile("|".join(phrases))
    for line, text in prose_in(source):
        for match in pattern.finditer(text):
            yield Rejected(path, line, "phrase", match[0])


def _former_in_all_files(former: list[str]) -> Iterator[Rejected]:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True, text=True)
    for path in filter(None, tracked.stdout.split("\0")):
        if path in _MAY_NAME_FORMER or not (_ROOT / path).is_file():
            continue
        try:
            text = (_ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # a picture
        yield from former_names(path, text, former)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def main() -> int:
    """Check all tracked modules; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.words", description="Reject names that say nothing, and names that were given up."
    )
    parser.add_argument("--count", action="store_true", help="count the names of each folder")
    parser.add_argument("paths", nargs="*", help="check these files or folders only")
    options = parser.parse_args()
    config = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=_ROOT, check=True, capture_output=True, text=True)
    rejected: list[Rejected] = []
    for path in tracked.stdout.split():
        if path.endswith("_pb2.py") or not (_ROOT / path).exists():
            continue
        if options.paths and not any(_is_below(path, folder.rstrip("/")) for folder in options.paths):
            continue
        allowed = {name for folder, names in config["allowed"].items() if _is_below(path, folder) for name in names}
        source = (_ROOT / path).read_text()
        rejected += rejected_names(path, source, config, allowed)
        if any(_is_below(path, folder) for folder in _PRODUCT):
            rejected += rejected_phrases(path, source, config["phrases"])
    if options.count:
        folders = Counter("/".join(Path(name.path).parts[:2]) for name in rejected)
        for folder, count in folders.most_common():
            print(f"{count:6} {folder}")
        print(f"{len(rejected):6} in all")
        return 0
    if not options.paths:
        rejected += _former_in_all_files(config["former"])
    for name in rejected:
        print(f"{name.path}:{name.line}: {name.kind} `{name.name}`: use the word of the field (tests/words/words.toml)")
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main())
