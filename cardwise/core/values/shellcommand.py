"""Shell commands in remedies. No other module inserts values into shell commands.

Many values come from objects that tenants write: names in Events, labels, annotations. An administrator who copies a
command must not execute a value such as `; curl … | sh`.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from cardwise.core.values import objectnames

_FIELD: Final = re.compile(r"\{([a-z_]+)(:text)?\}")


def command(template: str, **arguments: str | int | Sequence[str]) -> str:
    """The command with values in place of its fields.

    A field `{node}` takes the names of one or more Kubernetes objects. If a name is invalid, the field becomes a
    placeholder in capitals (NODE) for the reader. A field `{user:text}` takes any text and quotes it.
    """

    def format_field(field: re.Match[str]) -> str:
        argument = arguments[field[1]]
        words = [str(argument)] if isinstance(argument, str | int) else list(argument)
        if field[2]:
            return " ".join(map(shlex.quote, words))
        return " ".join(words) if all(map(objectnames.is_subdomain, words)) else field[1].upper()

    return _FIELD.sub(format_field, template)
