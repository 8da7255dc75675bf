"""What is told of texts from outside is short, on one line, and begins and ends as they do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.values import wording
from cardwise.core.values.invalid import InvalidRequest

# Also what is cut in the middle of a character, moves a cursor, or has no bytes of its own.
TEXTS = st.builds(
    lambda piece, times: piece * times,
    st.text(st.sampled_from(["a", "é", "\U0001f600", "\n", "\x1b", "\u202e", "\ud800", "\0", "'", "\\"]), max_size=5),
    st.sampled_from([1, 100, 300, 5000]),
)


@given(TEXTS, st.sampled_from([80, 512, wording.MOST_BYTES]))
def test_a_message_has_so_many_bytes_at_most_and_one_line(text: str, max_bytes: int) -> None:
    message = wording.message(f"spec.x: {text}; write less", max_bytes)
    assert len(message.encode()) <= max_bytes
    assert message.isprintable()
    assert message.startswith("spec.x: ")
    assert message.endswith("; write less")


@given(st.text(max_size=1100))
def test_of_a_short_text_nothing_is_left_out(text: str) -> None:
    if len(text.encode(errors="replace")) <= wording.MOST_BYTES and text.isprintable():
        assert wording.message(text) == text


@given(TEXTS)
def test_a_quotation_is_short_and_says_how_long_the_text_is(text: str) -> None:
    quotation = wording.quoted(text)
    assert quotation.isprintable()
    assert len(quotation) <= 1000  # of characters that need ten to be shown
    assert quotation == repr(text) if len(text) <= 80 else f"({len(text)} characters)" in quotation


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
    assert wording.quoted(quoted_object) == says


def test_a_refusal_keeps_its_remedy_whatever_its_field_is_called() -> None:
    field = f"spec.containers[0].resources.limits[{'x' * 100_000}]"
    error = InvalidRequest(field, "y" * 100_000, "leave it out")
    assert str(error).startswith("spec.containers[0].resources.limits[xxx")
    assert str(error).endswith("; leave it out")
    assert len(str(error)) <= wording.MOST_BYTES
    assert error.field.endswith("x]")
    assert len(error.field) <= 512
