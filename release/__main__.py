"""`make release`: builds the files of a release in dist/, except images and signatures, which the workflow makes.

Without `--final` it is a trial: problems are printed, and the files are built nevertheless.
"""

import shutil
import sys
from pathlib import Path

import click

from release import artifacts, readiness

ROOT = Path(__file__).parents[1]


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=ROOT / "dist",
    help="Folder of the files; it is emptied first. [dist]",
)
@click.option("--hatchling", default="hatchling", help="The program that builds the wheel.")
@click.option("--helm", default="helm", help="The program that packs the chart.")
@click.option("--final", is_flag=True, help="Fail if anything is unfinished.")
def main(out: Path, hatchling: str, helm: str, *, final: bool) -> None:
    """Build wheel, sources, chart, notes and checksums of the version in pyproject.toml."""
    version = readiness.version(ROOT)
    problems = readiness.find_problems(ROOT, version)
    for problem in problems:
        click.echo(f"unfinished: {problem}", err=True)
    if final and problems:
        sys.exit(1)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    epoch = readiness.commit_time(ROOT)
    artifacts.build_python(ROOT, out, hatchling, epoch)
    artifacts.package_chart(ROOT, out, helm)
    (out / "notes.md").write_text(readiness.release_notes(ROOT, version))
    for line in artifacts.write_checksums(out):
        click.echo(line)


if __name__ == "__main__":
    main()
