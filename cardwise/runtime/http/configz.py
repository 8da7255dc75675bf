"""The page /configz beside /metrics: the settings that are in effect.

It shows each value and where it came from. Options that are secrets are hidden; there are none yet. `settings` says
what there is to set.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import click
import msgspec
from click.core import ParameterSource

REDACTED = "<redacted>"

_SECRET = re.compile(r"(?:^|_)(?:password|passphrase|token|credentials?|private_key)(?:$|_)")
_USERINFO = re.compile(r"(?<=://)[^/@\s]*(?=@)")
_SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.PROMPT: "flag",
}


def of(context: click.Context, decided: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Each option of the running command by its flag: its value and its source, `flag`, `environment` or `default`.

    `decided`: by the option's name in Python, what the part has made of one that was left out.
    """
    values = context.params | dict(decided or {})
    found: dict[str, Any] = {}
    for param in context.command.params:
        name = param.name
        if not isinstance(param, click.Option) or name not in values:
            continue
        source = context.get_parameter_source(name)
        flag = max(param.opts, key=len)
        found[flag] = {
            "value": REDACTED if _hidden(param, name) else _plain(values[name]),
            "source": _SOURCES.get(source, "default") if source is not None else "default",
        }
    return dict(sorted(found.items()))


def encode(settings: Mapping[str, Any]) -> bytes:
    """The answer of `/configz`."""
    return msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n"


def _hidden(param: click.Option, name: str) -> bool:
    return param.hide_input or _SECRET.search(name) is not None


def _plain(value: object) -> Any:
    """As JSON has it: what JSON does not know is written as people write it on the command line."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        plain = [_plain(one) for one in value]
        return sorted(plain) if isinstance(value, set | frozenset) else plain
    if dataclasses.is_dataclass(value) and type(value).__str__ is object.__str__:
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return _USERINFO.sub(REDACTED, str(value))
