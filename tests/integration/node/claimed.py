"""Pods by ResourceClaim without webhook and extender: what they write is written by hand."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cardwise.core.api import claims, names
from cardwise.core.api.assignment import Assignment
from cardwise.kube import paths
from tests.integration.sharing import Space

Change = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes a claim and its status before they are written."""


def use_claim(spec: dict[str, Any]) -> None:
    """Turn a pod's spec with slots into one with a claim, as the webhook would."""
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        if container["resources"]["limits"].pop(names.SHARE, None):
            container["resources"]["claims"] = [{"name": names.POD_CLAIM, "request": container["name"]}]
    spec["resourceClaims"] = [{"name": names.POD_CLAIM, "resourceClaimName": claims.format_name(os.urandom(8))}]


def allocate(
    space: Space, name: str, assignment: Assignment, node: str, change: Change = lambda *_: None
) -> dict[str, Any]:
    """Create and allocate the claim of a pod, as the extender would; returns the claim."""
    pod = claims.read_pod(space.get(name))
    assert pod is not None
    claim = claims.new_claim(pod, assignment)
    status = claims.new_status(pod, assignment, node, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    change(claim, status)
    return write(space, claim, status)


def write(space: Space, claim: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """Create a claim with this status; returns the claim."""
    api, name = space.cluster.api, claim["metadata"]["name"]
    api.create(paths.resourceclaims(space.name), claim)
    return dict(api.patch(paths.resourceclaims(space.name, name, "status"), {"status": status}, "merge"))


def blocked_starts(cdi_dir: Path) -> list[str]:
    """Why containers with a claim may not start on the node, one text for each."""
    reasons = []
    for path in cdi_dir.glob("cardwise.dev-share-*.json"):
        with contextlib.suppress(FileNotFoundError):  # replaced or removed just now
            (device,) = json.loads(path.read_text())["devices"]
            nodes = device["containerEdits"].get("deviceNodes", ())
            reasons += [node["hostPath"] for node in nodes if node.get("hostPath", "").startswith("/dev/cardwise: ")]
    return reasons
