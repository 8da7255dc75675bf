"""The page /configz: the settings in effect, with their sources.

Secret options would be hidden, but no option is secret yet. `settings` has the options that all components have.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import click
import msgspec
from click.core import ParameterSource

REDACTED = "<redacted>"

_SECRET_NAME_PATTERN = re.compile(r"(?:^|_)(?:password|passphrase|token|credentials?|private_key)(?:$|_)")
_USERINFO_PATTERN = re.compile(r"(?<=://)[^/@\s]*(?=@)")
_SOURCE_NAMES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.PROMPT: "flag",
}


def describe_options(context: click.Context) -> dict[str, Any]:
    """The options of the running command by flag, with value and source: `flag`, `environment` or `default`."""
    settings = context.params
    options: dict[str, Any] = {}
    for param in context.command.params:
        name = param.name
        if not isinstance(param, click.Option) or name not in settings:
            continue
        source = context.get_parameter_source(name)
        flag = max(param.opts, key=len)
        options[flag] = {
            "value": REDACTED if _is_hidden(param, name) else _to_json(settings[name]),
            "source": _SOURCE_NAMES.get(source, "default") if source is not None else "default",
        }
    return dict(sorted(options.items()))


def encode_settings(settings: Mapping[str, Any]) -> bytes:
    """The response of `/configz`."""
    return msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n"


def _is_hidden(param: click.Option, name: str) -> bool:
    return param.hide_input or _SECRET_NAME_PATTERN.search(name) is not None


def _to_json(setting: object) -> Any:
    """Convert a setting to JSON. A type that JSON does not have is written as on the command line."""
    if setting is None or isinstance(setting, bool | int | float):
        return setting
    if isinstance(setting, Mapping):
        return {str(key): _to_json(part) for key, part in setting.items()}
    if isinstance(setting, list | tuple | set | frozenset):
        plain = [_to_json(part) for part in setting]
        return sorted(plain) if isinstance(setting, set | frozenset) else plain
    if dataclasses.is_dataclass(setting) and type(setting).__str__ is object.__str__:
        return {part.name: _to_json(getattr(setting, part.name)) for part in dataclasses.fields(setting)}
    return _USERINFO_PATTERN.sub(REDACTED, str(setting))
