"""Checks that the sources are ready for a release, and reads its version and notes from them."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

_SECTION = re.compile(
    r"^## (?P<version>\d+\.\d+\.\d+), (?P<day>[^\n]+)$\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def version(root: Path) -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def commit_time(root: Path) -> int:
    """The time of the last commit, in seconds since 1970. All files get it, so that builds are reproducible."""
    return int(_git(root, "log", "-1", "--format=%ct"))


def find_problems(root: Path, version: str) -> list[str]:
    """What has to be done before `version` can be released, one line each."""
    chart = yaml.safe_load((root / "helm" / "cardwise" / "Chart.yaml").read_text())
    problems = [
        f"helm/cardwise/Chart.yaml: {field} is {chart[field]}, pyproject.toml says {version}"
        for field in ("version", "appVersion")
        if chart[field] != version
    ]
    day = next(
        (section["day"] for section in _SECTION.finditer(_changelog(root)) if section["version"] == version), None
    )
    if day is None:
        problems.append(f"CHANGELOG.md has no section {version}")
    elif not _DAY.fullmatch(day):
        problems.append(f"CHANGELOG.md: {version} has no day, but {day!r}")
    if _git(root, "status", "--porcelain"):
        problems.append("the working tree has changes that are not committed")
    if _git(root, "tag", "--list", f"v{version}") and not _git(root, "tag", "--points-at", "HEAD", f"v{version}"):
        problems.append(f"the tag v{version} is of another commit")
    return problems


def release_notes(root: Path, version: str) -> str:
    """The changelog's section of the version; empty if it has none."""
    sections = _SECTION.finditer(_changelog(root))
    return next((section["text"].strip() + "\n" for section in sections if section["version"] == version), "")


def _changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True).stdout.strip()
