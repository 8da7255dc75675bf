"""Gets the real nvidia-cuda-mps-control, and libcuda for its clients, from Debian into the user cache:
`python -m tests.mps.fetch`.

Both are non-free, so they are never in this repository. apt is asked with folders of its own; the system's sources,
lists and cache are neither read nor written. Needs Linux on amd64 with apt and Debian's keyring.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("nvidia-cuda-mps", "libcuda1")
# Drivers 535, 550 and, 2026-11-23, 555. Backports have no others.
SUITES = ("bookworm", "trixie", "experimental")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR = os.environ.get("CARDWISE_DEBIAN_MIRROR", "http://deb.debian.org/debian")
PROGRAM = Path("usr/bin/nvidia-cuda-mps-control")
LIBRARY = Path("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1")


def cache() -> Path:
    """Where the suites' files are; $CARDWISE_MPS_ROOT names another folder of the same shape."""
    named = os.environ.get("CARDWISE_MPS_ROOT")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cardwise"
    return Path(named) if named else base / "mps"


def programs() -> dict[str, Path]:
    """The real programs that are there, by suite; a root that holds one program itself is "real"."""
    root = cache()
    programs = {entry.name: entry / PROGRAM for entry in sorted(root.glob("*")) if (entry / PROGRAM).exists()}
    return {"real": root / PROGRAM} if (root / PROGRAM).exists() else programs


def library(program: Path) -> Path | None:
    """libcuda of the same driver as this program, None where it is not there."""
    path = program.parents[len(PROGRAM.parts) - 1] / LIBRARY
    return path if path.exists() else None


def driver(program: Path) -> int | None:
    """The driver of this program, by its libcuda; None where that is not there."""
    programs = library(program)
    return int(programs.resolve().name.split(".")[2]) if programs else None


def fetch(suite: str, into: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cardwise-apt-") as name:
        folder = Path(name)
        for part in ("lists/partial", "cache/archives/partial", "debs"):
            (folder / part).mkdir(parents=True)
        sources = folder / "sources.list"
        sources.write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main non-free\n")
        options = [
            f"-oDir::Etc::SourceList={sources}",
            "-oDir::Etc::SourceParts=/dev/null",
            f"-oDir::State::Lists={folder / 'lists'}",
            f"-oDir::Cache={folder / 'cache'}",
            "-oAPT::Sandbox::User=root",
        ]
        subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
        subprocess.run(["apt-get", "-qq", *options, "download", *PACKAGES], check=True, cwd=folder / "debs")
        scratch = into.with_name(f"{into.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        for package in sorted((folder / "debs").glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, scratch], check=True)
            print(f"{package.name} is in {into}")
        shutil.rmtree(into, ignore_errors=True)
        scratch.rename(into)


def main() -> int:
    root = cache()
    root.mkdir(parents=True, exist_ok=True)
    for suite in SUITES:
        if not (root / suite / PROGRAM).exists() or not (root / suite / LIBRARY).exists():
            fetch(suite, root / suite)
    return 0 if programs() else 1


if __name__ == "__main__":
    sys.exit(main())
