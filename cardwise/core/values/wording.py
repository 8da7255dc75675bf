"""Numbers, lists and quotations in a sentence, for events, refusals, logs and commands.

Text from outside (annotations, names, output of other programs) may have any length and content. Only these functions
shorten such text and mark it as a quotation: Use `quote_text` or `quote_unless_name` for a value in a sentence, and
`sanitize_line` for a printed line. Use `sanitize_message` for a sentence that leaves the process or that ends with
another program's sentence.
"""

import re
from collections.abc import Sequence
from typing import Final

MAX_BYTES: Final = 1024  # bytes of a message in UTF-8; Kubernetes' limit for the message of an Event
_MAX_QUOTED: Final = 80  # characters of a quoted value
_MAX_NAME_LENGTH: Final = 317  # characters of a name: 253 of a domain, a slash, and 63
# Names, keys, users, images, taints. Such a string has no spaces, so it cannot look like a part of the sentence.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:=@+-]*")
# Invisible characters that `str.isprintable` may accept: those with the property Default_Ignorable_Code_Point, and
# blank letters, patterns and notes.
_INVISIBLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U00013441\U00013442\U00016fe4\U0001bca0-\U0001bca3\U0001d159"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# A space after a space. Spaces that fill the row of a terminal would move the text after them to a new row.
_REPEATED_SPACE: Final = re.compile("(?<= ) ")


def pluralize(number: int, noun: str) -> str:
    """A number with its noun, such as "1 device" or "2 devices"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def quote_text(content: object, limit: int = _MAX_QUOTED) -> str:
    """A value from outside as a quotation: in quotes, on one line, with each character and space visible.

    A string of more than `limit` characters is shortened to its beginning, its end and its length.
    """
    text = content if isinstance(content, str) else repr(content)
    if len(text) <= limit:
        return _escape_blanks(repr(content))
    shown = text[: limit // 2] + "..." + text[-limit // 4 :]
    shown = _escape_blanks(repr(shown)) if isinstance(content, str) else sanitize_message(shown)
    return f"{shown} ({len(text)} characters)"


def quote_unless_name(name: object) -> str:
    """A name from outside in a sentence: unchanged if it is a valid name, else as `quote_text`."""
    text = str(name)
    return text if len(text) <= _MAX_NAME_LENGTH and _NAME.fullmatch(text) else quote_text(text)


def sanitize_message(text: str, limit: int = MAX_BYTES) -> str:
    """A text for users as it leaves the process: at most `limit` bytes, on one line, without control characters.

    A longer text is cut in the middle, because errors begin with the field and end with the remedy. Several spaces
    become one space, because a terminal might show the text after many spaces on a new row.
    """
    return sanitize_line(" ".join(text.split()), limit)


def sanitize_line(text: str, limit: int = MAX_BYTES) -> str:
    """As `sanitize_message`, but keeps the spaces between columns."""
    text = truncate(text, limit)
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return truncate("".join(map(_visible, text)), limit)


def _visible(character: str) -> str:
    if character.isprintable() and not _INVISIBLE.match(character):
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


def _escape_blanks(text: str) -> str:
    return _REPEATED_SPACE.sub(r"\\x20", _INVISIBLE.sub(lambda match: _visible(match[0]), text))


def truncate(text: str, limit: int = MAX_BYTES) -> str:
    """The text with at most `limit` bytes in UTF-8; a longer text is cut in the middle."""
    if text.isascii() and len(text) <= limit:
        return text
    content = text.encode(errors="backslashreplace")  # half of a surrogate pair cannot be encoded
    if len(content) <= limit:
        return content.decode()
    mark = f" [... {len(content)} bytes in all ...] "
    kept_bytes = max(limit - len(mark), 0)
    split_at = kept_bytes * 2 // 3
    begin, end = content[:split_at], content[len(content) - (kept_bytes - split_at) :]
    # A character that was cut in two is left out.
    return (begin.decode(errors="ignore") + mark + end.decode(errors="ignore"))[:limit]


def enumerate_first(texts: Sequence[str], limit: int, noun: str = "") -> str:
    """The first `limit` texts, separated by commas, and the number of the remaining ones: "a, b and 3 more pods".

    noun: the noun after that number, in the singular.
    """
    omitted = len(texts) - limit
    others = pluralize(omitted, f"more {noun}") if noun else f"{omitted} more"
    return ", ".join(texts[:limit]) + (f" and {others}" if omitted > 0 else "")
