"""The bill of materials of the image, as CycloneDX 1.6: the locked Python packages and the base image.

pip checks the lock's hashes when the image is built. The base image has a bill of materials of its own.
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


def bill_of_materials(root: Path, version: str, epoch: int) -> str:
    """The document; the same for the same commit. `epoch`: its time, in seconds since 1970."""
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
    locked = _LOCKED.finditer((root / "requirements" / "run.lock").read_text())
    return [
        {"type": "library", "name": package["name"], "version": package["version"], "purl": purl, "bom-ref": purl}
        for package in locked
        if (purl := f"pkg:pypi/{package['name'].lower()}@{package['version']}")
    ]
