"""What of the sources has to agree before a version is released, and what its notes say."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

_SECTION = re.compile(
    r"^## (?P<version>\d+\.\d+\.\d+), (?P<when>[^\n]+)$\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def version(root: Path) -> str:
    """As the wheel will have it."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def committed(root: Path) -> int:
    """Seconds since 1970: the time that all files of the release bear, so that who builds again gets the same."""
    return int(_git(root, "log", "-1", "--format=%ct"))


def unfinished(root: Path, version: str) -> list[str]:
    """What a person has to do first, a line each."""
    chart = yaml.safe_load((root / "helm" / "cardwise" / "Chart.yaml").read_text())
    found = [
        f"helm/cardwise/Chart.yaml: {field} is {chart[field]}, pyproject.toml says {version}"
        for field in ("version", "appVersion")
        if chart[field] != version
    ]
    when = next((each["when"] for each in _SECTION.finditer(_changelog(root)) if each["version"] == version), None)
    if when is None:
        found.append(f"CHANGELOG.md has no section {version}")
    elif not _DAY.fullmatch(when):
        found.append(f"CHANGELOG.md: {version} has no day, but {when!r}")
    if _git(root, "status", "--porcelain"):
        found.append("the working tree has changes that are not committed")
    if _git(root, "tag", "--list", f"v{version}") and not _git(root, "tag", "--points-at", "HEAD", f"v{version}"):
        found.append(f"the tag v{version} is of another commit")
    return found


def notes(root: Path, version: str) -> str:
    """The section of the changelog; empty where there is none."""
    return next(
        (each["text"].strip() + "\n" for each in _SECTION.finditer(_changelog(root)) if each["version"] == version), ""
    )


def _changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text()


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()
