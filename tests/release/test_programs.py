"""The programs of the parts if only the command line is installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = ("cryptography", "flask", "google", "grpc", "gunicorn", "httptools", "jsonpatch", "pynvml")
PARTS = ("webhook", "extender", "deviceplugin", "mps")


def run_help(part: str, *missing_modules: str) -> subprocess.CompletedProcess[str]:
    """Run `cardwise-PART --help` without these modules. Its last line is whether it has imported rich."""
    absent = "".join(f"sys.modules[{module!r}] = None\n" for module in missing_modules)
    script = f"import sys\n{absent}sys.argv = ['cardwise-{part}', '--help']\nfrom cardwise import programs\n"
    script += f"try: programs.{part}()\nfinally: print('rich.console' in sys.modules)"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_without_its_packages_says_what_to_install(part: str) -> None:
    done = run_help(part, *SERVER)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cardwise-{part} needs ")
    assert done.stderr.endswith("which is not installed; write: pip install 'cardwise[server]'\n")


def test_a_part_with_them_runs_under_its_name() -> None:
    done = run_help("mps")
    assert done.returncode == 0, done.stderr
    assert "Usage: cardwise-mps " in done.stdout
    assert done.stdout.endswith("\nFalse\n"), "rich is for `cardwise top`"


def test_the_names_on_path_are_these_programs() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {scripts[f"cardwise-{part}"] for part in PARTS} == {f"cardwise.programs:{part}" for part in PARTS}
