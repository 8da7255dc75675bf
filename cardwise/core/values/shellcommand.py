"""Commands that people are advised to run in a shell: the only place that puts values into one.

Many values come from objects that tenants write: names in Events, labels, annotations. A name with `; curl … | sh` in
it would be run by the administrator who copies the command.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from cardwise.core.values import objectnames

_FIELD: Final = re.compile(r"\{([a-z_]+)(:text)?\}")


def command(template: str, **arguments: str | int | Sequence[str]) -> str:
    """The command with values in the place of its fields.

    `{node}` takes the name of a Kubernetes object, or several; what can be no such name is not printed, and the field
    is left as a placeholder in capitals (NODE) for the reader to fill in. `{user:text}` takes any text and quotes it.
    """

    def format_field(field: re.Match[str]) -> str:
        argument = arguments[field[1]]
        words = [str(argument)] if isinstance(argument, str | int) else list(argument)
        if field[2]:
            return " ".join(map(shlex.quote, words))
        return " ".join(words) if all(map(objectnames.is_subdomain, words)) else field[1].upper()

    return _FIELD.sub(format_field, template)
