"""Prints JSON and YAML for every command, and warnings on stderr about lists that could not be read."""

import json
from typing import Any, Final

import yaml

from cardwise.cli import console
from cardwise.core.values import wording
from cardwise.kube.clusterstate import ClusterState

_MAX_LISTED: Final = 3  # maximum number of objects named in one warning


def print_object(data: dict[str, Any], output: str) -> None:
    """Print an object in the format `output`: json or yaml."""
    if output == "json":
        console.print_data(json.dumps(data, indent=2))
    else:
        console.print_data(yaml.safe_dump(data, sort_keys=False), nl=False)


def print_cluster_warnings(cluster_state: ClusterState) -> None:
    """Warn about lists that could not be read."""
    if cluster_state.partial:
        console.print_text(f"note: {cluster_state.partial}", err=True)
    objects_by_problem: dict[str, list[str]] = {}
    for problem in cluster_state.problems:
        name, _, text = problem.partition(": ")
        objects_by_problem.setdefault(text, []).append(name)
    for text, objects in objects_by_problem.items():
        console.print_text(f"warning: {wording.enumerate_first(objects, _MAX_LISTED)}: {text}", err=True)
