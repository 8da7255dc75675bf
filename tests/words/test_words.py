"""The check of names: what it rejects, and that its lists are true."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.words.__main__ import former_names, rejected_names, rejected_phrases

_WORDS = {"variables": ["one"], "functions": ["look"]}
_CONFIG = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
_ROOT = Path(__file__).resolve().parents[2]

_SOURCE = """
def look(one, *, pods):
    for one in pods:
        self.one = one
    with pods as _one:
        pass
    [one for one in pods]

class Cards:
    def look(self): ...
    def look_up_card(self): ...
"""


def test_each_definition_of_a_rejected_name_is_found() -> None:
    rejected = [(name.line, name.kind, name.name) for name in rejected_names("a.py", _SOURCE, _WORDS, set())]
    assert sorted(rejected) == [
        (2, "function", "look"),
        (2, "variable", "one"),
        (3, "variable", "one"),
        (4, "variable", "one"),
        (5, "variable", "one"),
        (7, "variable", "one"),
        (10, "function", "look"),
    ]


def test_an_allowed_name_is_not_rejected() -> None:
    kinds = [name.kind for name in rejected_names("a.py", _SOURCE, _WORDS, {"one"})]
    assert kinds == ["function", "function"]


def test_each_folder_of_the_lists_exists() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.split()
    for folder in _CONFIG["allowed"]:
        assert any(path == folder or path.startswith(f"{folder}/") for path in tracked), folder


def test_a_name_that_was_given_up_is_found_as_a_whole_word_in_any_text() -> None:
    text = "args: [--old-name=30]\n--old-name-limit my--old-name\n`FORMER` FORMERLY\na\\.dev/\n"
    former = [(name.line, name.name) for name in former_names("a.yaml", text, ["--old-name", "FORMER", "a.dev/"])]
    assert former == [(1, "--old-name"), (3, "FORMER"), (4, "a.dev/")]


def test_no_new_name_is_among_those_that_were_given_up() -> None:
    assert len(set(_CONFIG["former"])) == len(_CONFIG["former"])
    assert not set(_CONFIG["former"]) & {*_CONFIG["variables"], *_CONFIG["functions"]}


def test_a_phrase_is_found_in_docstrings_and_comments_and_across_their_lines() -> None:
    source = '"""Counts\nanew. """\nx = "anew"  # not in strings\n# It is\n# no card.\ny = 1  # fine\n'
    rejected = [
        (phrase.line, phrase.name) for phrase in rejected_phrases("a.py", source, [r"\banew\b", r"\bis no \w+"])
    ]
    assert rejected == [(1, "anew"), (4, "is no card")]


@pytest.mark.parametrize(
    "sentence", ["There is no card.", "The card is no longer there.", "the one with the most pods"]
)
def test_right_sentences_are_not_rejected(sentence: str) -> None:
    assert not [*rejected_phrases("a.py", f"# {sentence}\n", _CONFIG["phrases"])]


@pytest.mark.parametrize(
    "sentence", ["Counts anew.", "The text is no number.", "the most bytes of a body", "all parts"]
)
def test_sentences_that_need_two_readings_are_rejected(sentence: str) -> None:
    assert [*rejected_phrases("a.py", f"# {sentence}\n", _CONFIG["phrases"])]
