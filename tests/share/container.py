"""A folder as it is mounted, an image's packages of the tests' own making, and a Python that has both."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from cardwise.share import installation

HALF = {"CARDWISE_MEM_LIMIT_MIB": "8138", "CARDWISE_MEM_FRACTION": "0.5"}
LIMIT_BYTES = 8138 * 1024 * 1024


class Container:
    """What a container has: the mounted folder, the image's own packages, and the environment."""

    def __init__(self, tmp_path: Path, python: str | Path = sys.executable) -> None:
        self.python = python
        self.mount = tmp_path / "mount"
        self.site = tmp_path / "site"
        self.work = tmp_path / "work"
        self.site.mkdir()
        self.work.mkdir()
        installation.install_files(self.mount)
        self.path = [self.mount, self.site]
        self.env = {
            **{name: setting for name, setting in os.environ.items() if not name.startswith(("CARDWISE_", "PYTHON"))},
            "CARDWISE_SHARE_FILE": str(tmp_path / "share.json"),
            # As on a read-only mount: no bytecode is kept.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.share_file = tmp_path / "share.json"

    def install(self, files: dict[str, str], below: Path | None = None) -> None:
        """Put packages into the image."""
        for name, source in files.items():
            path = (below or self.site) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))

    def run(self, program: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A program, as a file, since workers of multiprocessing import it again."""
        file = self.work / "program.py"
        file.write_text(textwrap.dedent(program))
        return self.start([*flags, str(file)], **env)

    def start(self, arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments],
            env={**self.env, "PYTHONPATH": os.pathsep.join(map(str, self.path)), **env},
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
        )

    def output_of(self, program: str, *flags: str, **env: str) -> str:
        """What a program prints that must end well, in silence otherwise."""
        process = self.run(program, *flags, **env)
        assert process.returncode == 0, process.stderr
        assert process.stderr == ""
        return process.stdout.strip()

    def json_of(self, program: str, *flags: str, **env: str) -> Any:
        """The JSON that a program prints last; it must end well, and may be noisy."""
        process = self.run(program, *flags, **env)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])
