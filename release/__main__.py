"""`make release`: all that a release has and this machine can make, in dist/. Images and signatures are the workflow's.

Without `--final` it is a trial: what is unfinished is said, and everything is made all the same.
"""

import shutil
import sys
from pathlib import Path

import click

from release import artifacts, readiness, sbom

ROOT = Path(__file__).parents[1]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "dist", help="Is emptied first. [dist]")
@click.option("--hatchling", default="hatchling", help="The program that builds the wheel.")
@click.option("--helm", default="helm", help="The program that packs the chart.")
@click.option("--final", is_flag=True, help="Refuse to release what is unfinished.")
def main(out: Path, hatchling: str, helm: str, *, final: bool) -> None:
    """Wheel, sources, chart, bill of materials, notes and checksums of the version that pyproject.toml says."""
    version = readiness.version(ROOT)
    unfinished = readiness.unfinished(ROOT, version)
    for line in unfinished:
        click.echo(f"unfinished: {line}", err=True)
    if final and unfinished:
        sys.exit(1)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    epoch = readiness.committed(ROOT)
    artifacts.python(ROOT, out, hatchling, epoch)
    artifacts.chart(ROOT, out, helm)
    (out / f"cardwise-{version}.cdx.json").write_text(sbom.of(ROOT, version, epoch))
    (out / "notes.md").write_text(readiness.notes(ROOT, version))
    for line in artifacts.checksums(out):
        click.echo(line)


if __name__ == "__main__":
    main()
