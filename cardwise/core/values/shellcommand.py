"""Shell commands in remedies: the only module that inserts values into one.

Many values come from objects that tenants write: names in Events, labels, annotations. An administrator who copies a
command must not run a name such as `; curl … | sh`.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from cardwise.core.values import objectnames

_FIELD: Final = re.compile(r"\{([a-z_]+)(:text)?\}")


def command(template: str, **arguments: str | int | Sequence[str]) -> str:
    """The command with values in place of its fields.

    `{node}` takes the name of a Kubernetes object, or several; an invalid name is not printed, and a placeholder in
    capitals (NODE) is left for the reader. `{user:text}` takes any text and quotes it.
    """

    def format_field(field: re.Match[str]) -> str:
        argument = arguments[field[1]]
        words = [str(argument)] if isinstance(argument, str | int) else list(argument)
        if field[2]:
            return " ".join(map(shlex.quote, words))
        return " ".join(words) if all(map(objectnames.is_subdomain, words)) else field[1].upper()

    return _FIELD.sub(format_field, template)
