"""Texts from outside are quoted in short form, on one line, with their beginning and end."""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.values import wording
from cardwise.core.values.invalid import InvalidRequest

# Includes texts cut in the middle of a character, control characters, and halves of surrogate pairs.
TEXTS = st.builds(
    lambda piece, times: piece * times,
    st.text(st.sampled_from(["a", "é", "\U0001f600", "\n", "\x1b", "\u202e", "\ud800", "\0", "'", "\\"]), max_size=5),
    st.sampled_from([1, 100, 300, 5000]),
)


@given(TEXTS, st.sampled_from([80, 512, wording.MAX_BYTES]))
def test_messages_have_one_line_and_limited_bytes(text: str, max_bytes: int) -> None:
    message = wording.sanitize_message(f"spec.x: {text}; write less", max_bytes)
    assert len(message.encode()) <= max_bytes
    assert message.isprintable()
    assert message.startswith("spec.x: ")
    assert message.endswith("; write less")


@given(st.text(max_size=1100))
def test_short_texts_are_not_truncated(text: str) -> None:
    text = " ".join(text.split())
    if len(text.encode(errors="replace")) <= wording.MAX_BYTES and INVISIBLE.isdisjoint(text) and text.isprintable():
        assert wording.sanitize_message(text) == text


@given(TEXTS)
def test_quotations_are_short_and_contain_the_length(text: str) -> None:
    quotation = wording.quote_text(text)
    assert quotation.isprintable()
    assert len(quotation) <= 1000  # characters whose escape takes ten characters
    assert quotation == repr(text) if len(text) <= 80 else f"({len(text)} characters)" in quotation


# The property Default_Ignorable_Code_Point, of DerivedCoreProperties.txt.
DEFAULT_IGNORABLE = (
    "00AD 034F 061C 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164 FE00-FE0F FEFF FFA0 FFF0-FFF8 "
    "1BCA0-1BCA3 1D173-1D17A E0000-E0FFF"
)
BLANK_NAME = re.compile(r"(BLANK|(?<!GAP )(?<!LINE )FILLER|NULL NOTEHEAD)$")  # fillers of gaps and lines are visible


def _find_invisible_characters() -> Iterator[str]:
    """All characters except the space that a terminal shows as nothing or as a blank."""
    for part in DEFAULT_IGNORABLE.split():
        first, _, last = part.partition("-")
        yield from map(chr, range(int(first, 16), int(last or first, 16) + 1))
    for character in map(chr, range(sys.maxunicode + 1)):
        category = unicodedata.category(character)
        is_blank = category[0] == "Z" or category in ("Cc", "Cf", "Cs") or BLANK_NAME.search(_name(character))
        if is_blank and character != " ":
            yield character


def _name(character: str) -> str:
    return unicodedata.name(character, "")


INVISIBLE = set(_find_invisible_characters())


@pytest.mark.parametrize(
    "show",
    [
        partial(wording.sanitize_message, limit=1 << 20),
        partial(wording.sanitize_line, limit=1 << 20),
        partial(wording.quote_text, limit=1 << 20),
        lambda text: wording.quote_text([text], 1 << 20),
        lambda text: "".join(wording.quote_unless_name(f"a{character}") for character in text),
    ],
    ids=["message", "line", "quoted", "a quoted list", "a name"],
)
def test_no_invisible_character_stays(show: Callable[[str], str]) -> None:
    assert set("\u2800\u3164\uffa0\u115f\u1160\u034f\ufe0f\U000e0041\U000e0100\u3000\u2028\x85\x1b") <= INVISIBLE
    stays = INVISIBLE.intersection(show("a".join(sorted(INVISIBLE))))
    assert len(stays) == 0


@pytest.mark.parametrize("blank", [" ", "\t", "\n", "\xa0", "\u3000", " \u2800", "\u2800 ", "\u3164", "\u2003 "])
@pytest.mark.parametrize("show", [wording.sanitize_message, wording.quote_text, wording.quote_unless_name])
def test_repeated_spaces_become_one(show: Callable[[str], str], blank: str) -> None:
    shown = show(f"begin.{blank * 20}end")
    assert "  " not in shown
    assert max(map(len, re.findall(r"[^!-~]+", shown)), default=0) <= 1


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "한국어 텍스트", "हिन्दी", "عربي", "⠓⠑⠇⠇⠕", "e\u0301"]
)
def test_texts_of_any_script_stay(text: str) -> None:
    assert wording.sanitize_message(text) == text
    assert wording.quote_text(text) == repr(text)


@pytest.mark.parametrize(
    ("quoted_object", "says"),
    [
        ("off", "'off'"),
        (7, "7"),
        (None, "None"),
        ({"a": 1}, "{'a': 1}"),
        ("x" * 120_000, f"'{'x' * 40}...{'x' * 20}' (120000 characters)"),
        (["x"] * 1000, "['x', 'x', 'x', 'x', 'x', 'x', 'x', 'x',... 'x', 'x', 'x', 'x'] (5000 characters)"),
    ],
)
def test_values_as_they_are_quoted(quoted_object: object, says: str) -> None:
    assert wording.quote_text(quoted_object) == says


def test_refusal_with_a_long_field_keeps_its_remedy() -> None:
    field = f"spec.containers[0].resources.limits[{'x' * 100_000}]"
    error = InvalidRequest(field, "y" * 100_000, "leave it out")
    assert str(error).startswith("spec.containers[0].resources.limits[xxx")
    assert str(error).endswith("; leave it out")
    assert len(str(error)) <= wording.MAX_BYTES
    assert error.field.endswith("x]")
    assert len(error.field) <= 512
