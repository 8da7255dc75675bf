"""JSON and YAML of every command, and what a survey could not read, on stderr."""

import json
from typing import Any

import yaml

from cardwise.cli import console
from cardwise.kube.survey import Survey


def dump(data: dict[str, Any], output: str) -> None:
    """`output`: json or yaml."""
    if output == "json":
        console.data(json.dumps(data, indent=2))
    else:
        console.data(yaml.safe_dump(data, sort_keys=False), nl=False)


def warn(seen: Survey) -> None:
    """What is not in what is shown."""
    if seen.partial:
        console.say(f"note: {seen.partial}", err=True)
    for problem in seen.problems:
        console.say(f"warning: {problem}", err=True)
