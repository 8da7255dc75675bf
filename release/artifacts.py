"""The files of a release: wheel, sources, chart, checksums."""

import hashlib
import os
import subprocess
from pathlib import Path

SUMS = "SHA256SUMS"


def python(root: Path, out: Path, hatchling: str, epoch: int) -> None:
    """Wheel and source distribution, the same to the byte from the same commit."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    command = [hatchling, "build", "--target", "wheel", "--target", "sdist", "--directory", out]
    subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)


def chart(root: Path, out: Path, helm: str) -> None:
    """As `helm push` takes it, under a name that nobody takes for that of the sources."""
    command = [helm, "package", root / "helm" / "cardwise", "--destination", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (packed,) = out.glob("cardwise-*.tgz")
    packed.rename(packed.with_name(packed.name.replace("cardwise-", "cardwise-chart-", 1)))


def checksums(out: Path) -> list[str]:
    """Writes them beside the files, as `sha256sum --check` reads them, and returns the lines."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(out.iterdir())
        if path.name != SUMS
    ]
    (out / SUMS).write_text("".join(f"{line}\n" for line in lines))
    return lines
