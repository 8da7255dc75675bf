"""Numbers, lists and quotations in a sentence, as events, refusals, the log and commands write them.

All that comes from outside (annotations, names, answers of other programs) may have any length and hold anything.
These functions keep it short and visible as what somebody else wrote, and they are the only ones that do: `quote_text`
and `quote_unless_name` where a value is put into a sentence, `sanitize_message` where a sentence leaves the process or
another program's sentence ends one of ours, `sanitize_line` where a line is printed.
"""

import re
from collections.abc import Sequence
from typing import Final

MOST_BYTES: Final = 1024  # of a message, in UTF-8: what Kubernetes allows for that of an Event
_MOST_QUOTED: Final = 80  # characters of a value
_MOST_NAME: Final = 317  # characters of a name: 253 of a domain, a slash, and 63
# Names, keys, users, images, taints: without a space no sentence can be written.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:=@+-]*")
# Without ink, though `str.isprintable` may say otherwise: the property Default_Ignorable_Code_Point, and blank letters,
# patterns and notes. As many as fill a row of the terminal would put what follows on a row of its own.
_INKLESS: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U00013441\U00013442\U00016fe4\U0001bca0-\U0001bca3\U0001d159"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_REPEATED_SPACE: Final = re.compile("(?<= ) ")


def pluralize(number: int, noun: str) -> str:
    """Such as "1 device", "2 devices"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def quote_text(content: object, limit: int = _MOST_QUOTED) -> str:
    """A value from outside as a sentence quotes it: text in quotes, on one line, each character and space visible.

    Of one that is longer than `limit` characters the beginning, the end and the length.
    """
    text = content if isinstance(content, str) else repr(content)
    if len(text) <= limit:
        return _escape_blanks(repr(content))
    shown = text[: limit // 2] + "..." + text[-limit // 4 :]
    shown = _escape_blanks(repr(shown)) if isinstance(content, str) else sanitize_message(shown)
    return f"{shown} ({len(text)} characters)"


def quote_unless_name(name: object) -> str:
    """A name from outside as a sentence has it: as it is where it looks like one, else as `quote_text` has it."""
    text = str(name)
    return text if len(text) <= _MOST_NAME and _NAME.fullmatch(text) else quote_text(text)


def sanitize_message(text: str, limit: int = MOST_BYTES) -> str:
    """A text for people as it leaves the process: of at most `limit` bytes, on one line, without control characters.

    What is left out of a longer text is its middle: it begins with the field and ends with the remedy. Of space between
    words a single one stays: a terminal shows what follows many as a line of its own.
    """
    return sanitize_line(" ".join(text.split()), limit)


def sanitize_line(text: str, limit: int = MOST_BYTES) -> str:
    """As `sanitize_message`, with the spaces that put words into columns."""
    text = truncate(text, limit)
    if text.isprintable() and not _INKLESS.search(text):
        return text
    return truncate("".join(map(_visible, text)), limit)


def _visible(character: str) -> str:
    if character.isprintable() and not _INKLESS.match(character):
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


def _escape_blanks(text: str) -> str:
    return _REPEATED_SPACE.sub(r"\\x20", _INKLESS.sub(lambda match: _visible(match[0]), text))


def truncate(text: str, limit: int = MOST_BYTES) -> str:
    """A text of at most `limit` bytes of UTF-8, without its middle where that would be more."""
    if text.isascii() and len(text) <= limit:
        return text
    content = text.encode(errors="backslashreplace")  # half of a surrogate pair has no bytes of its own
    if len(content) <= limit:
        return content.decode()
    mark = f" [... {len(content)} bytes in all ...] "
    kept = max(limit - len(mark), 0)
    until = kept * 2 // 3
    begin, end = content[:until], content[len(content) - (kept - until) :]
    # Characters that the cut has gone through are left out.
    return (begin.decode(errors="ignore") + mark + end.decode(errors="ignore"))[:limit]


def enumerate_first(some: Sequence[str], limit: int, noun: str = "") -> str:
    """The first of them by comma, and how many more there are; `noun`: of what, in the singular."""
    omitted = len(some) - limit
    others = pluralize(omitted, f"more {noun}") if noun else f"{omitted} more"
    return ", ".join(some[:limit]) + (f" and {others}" if omitted > 0 else "")
