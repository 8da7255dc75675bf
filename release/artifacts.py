"""Builds wheel, source distribution, chart package and checksums of a release."""

import hashlib
import os
import subprocess
from pathlib import Path

CHECKSUMS_FILE = "SHA256SUMS"


def build_python(root: Path, out: Path, hatchling: str, epoch: int) -> None:
    """Build wheel and source distribution into `out`. The same commit gives the same bytes.

    hatchling: the program.
    epoch: the time of all files, in seconds since 1970.
    """
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    command = [hatchling, "build", "--target", "wheel", "--target", "sdist", "--directory", str(out)]
    subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)


def package_chart(root: Path, out: Path, helm: str) -> None:
    """Package the chart for `helm push` into `out`, under a name that differs from that of the source distribution."""
    command = [helm, "package", str(root / "helm" / "cardwise"), "--destination", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (packed,) = out.glob("cardwise-*.tgz")
    packed.rename(packed.with_name(packed.name.replace("cardwise-", "cardwise-chart-", 1)))


def write_checksums(out: Path) -> list[str]:
    """Write the checksums of the files in `out` beside them, for `sha256sum --check`. Returns the lines."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(out.iterdir())
        if path.name != CHECKSUMS_FILE
    ]
    (out / CHECKSUMS_FILE).write_text("".join(f"{line}\n" for line in lines))
    return lines
