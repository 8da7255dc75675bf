"""JSON and YAML of every command, and what a survey could not read, on stderr."""

import json
from typing import Any

import click
import yaml

from cardwise.kube.survey import Survey


def dump(data: dict[str, Any], output: str) -> None:
    """`output`: json or yaml."""
    if output == "json":
        click.echo(json.dumps(data, indent=2))
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False), nl=False)


def warn(seen: Survey) -> None:
    """What is not in what is shown."""
    if seen.partial:
        click.echo(f"note: {seen.partial}", err=True)
    for problem in seen.problems:
        click.echo(f"warning: {problem}", err=True)
