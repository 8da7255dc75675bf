"""Runs the real Helm on our chart, and finds things in what it renders."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cardwise.core import names

CHART = Path(__file__).parents[2] / "helm" / "cardwise"

Object = dict[str, Any]
Objects = list[Object]
Render = Callable[..., Objects]


def template(helm: str, *sets: str) -> subprocess.CompletedProcess[str]:
    """`helm template` with these `--set`s."""
    flags = ["--namespace", names.NAMESPACE, *(flag for each in sets for flag in ("--set", each))]
    command = [helm, "template", "cardwise", str(CHART), "--kube-version", "1.34.0", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def one(objects: Objects, kind: str, name: str) -> Object:
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)} found"
    return found[0]


def text(obj: object) -> str:
    return yaml.safe_dump(obj, width=10**6)


def conditions(hook: Object) -> dict[str, str]:
    """The CEL of a webhook entry's matchConditions, by name."""
    return {each["name"]: each["expression"] for each in hook["matchConditions"]}
