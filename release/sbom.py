"""The bill of materials: what our image has of others, as CycloneDX 1.6 says it.

It is of the lock, whose hashes pip has checked when the image was built. What the base image has, its own bill says.
"""

import json
import re
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_LOCKED = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)==(?P<version>[^\s;\\]+)", re.MULTILINE)
_PYTHON = re.compile(r"^ARG PYTHON=(\S+)$", re.MULTILINE)
_BASE = "slim-bookworm"


def of(root: Path, version: str, epoch: int) -> str:
    """The document, the same for the same commit."""
    ours = {"type": "application", "name": "cardwise", "version": version, "bom-ref": f"pkg:pypi/cardwise@{version}"}
    licence = {"licenses": [{"license": {"id": "Apache-2.0"}}]}
    components = [_base(root), *_packages(root)]
    text = json.dumps(components, sort_keys=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'cardwise {version} {text}')}",
        "version": 1,
        "metadata": {"timestamp": datetime.fromtimestamp(epoch, UTC).isoformat(), "component": ours | licence},
        "components": components,
    }
    return json.dumps(document, indent=2) + "\n"


def _base(root: Path) -> dict[str, Any]:
    (tag,) = _PYTHON.findall((root / "Dockerfile").read_text())
    return {"type": "container", "name": "python", "version": f"{tag}-{_BASE}", "bom-ref": "base"}


def _packages(root: Path) -> list[dict[str, Any]]:
    found = _LOCKED.finditer((root / "requirements" / "run.lock").read_text())
    return [
        {"type": "library", "name": each["name"], "version": each["version"], "purl": purl, "bom-ref": purl}
        for each in found
        if (purl := f"pkg:pypi/{each['name'].lower()}@{each['version']}")
    ]
