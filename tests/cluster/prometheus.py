"""A real Prometheus for the tests, with promtool: Debian's package in the user cache, unpacked and not installed.

`binaries` builds from sources, this does not: Prometheus with its web interface would take the cache longer than the
rest together, and tests need none of it but the engine.
"""

import json
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import binaries, debian, ports
from tests.cluster.processes import PATIENCE, CommandFailed, Process, run

PACKAGE = "prometheus"


def programs(say: binaries.Say) -> Path:
    """Folder with prometheus and promtool. Raises NoBinaries where there is none to be had."""
    program = shutil.which("prometheus")
    if program and shutil.which("promtool"):
        return Path(program).parent
    ready = binaries.cache_root() / PACKAGE
    if not (ready / "usr/bin/promtool").exists():
        with binaries.locked("prometheus.lock", say):
            if not (ready / "usr/bin/promtool").exists():
                _unpack(ready, say)
    return ready / "usr" / "bin"


def _unpack(into: Path, say: binaries.Say) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise binaries.NoBinaries("there is no prometheus in PATH, and no apt-get to get Debian's")
    say(f"getting Debian's package {PACKAGE} into the cache")
    with tempfile.TemporaryDirectory(prefix="cardwise-prometheus-", dir=binaries.cache_root()) as name:
        folder = Path(name)
        scratch = folder / "unpacked"
        try:
            debian.download(PACKAGE, folder, say)
            run(["dpkg-deb", "-x", *map(str, folder.glob("*.deb")), str(scratch)])
        except CommandFailed as error:
            raise binaries.NoBinaries(str(error)) from error
        shutil.rmtree(into, ignore_errors=True)
        scratch.rename(into)


class Prometheus:
    """One that scrapes `targets`, which are addresses with labels by job, every second. `state` is its folder."""

    def __init__(self, folder: Path, state: Path, targets: Mapping[str, Mapping[str, Mapping[str, str]]]) -> None:
        self._process = Process(state, PACKAGE)
        self._program = folder / "prometheus"
        self._state = state
        self._targets = targets
        (self.port,) = ports.free(1)

    def start(self, *rules: Path) -> None:
        """Until it is ready. `rules`: files of rules."""
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [*map(str, rules)],
            "scrape_configs": [
                {
                    "job_name": job,
                    "honor_labels": True,
                    "static_configs": [
                        {"targets": [address], "labels": dict(labels)} for address, labels in addresses.items()
                    ],
                }
                for job, addresses in self._targets.items()
            ],
        }
        self._state.mkdir(parents=True, exist_ok=True)
        file = self._state / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self._process.start(
            [
                str(self._program),
                f"--config.file={file}",
                f"--storage.tsdb.path={self._state / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ]
        )
        self._process.wait_until(self._ready, "/-/ready")

    def stop(self) -> None:
        self._process.stop()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises ValueError with Prometheus' word where it takes it for wrong."""
        answer = self.query_api("query", query=expression)
        if answer["resultType"] in ("scalar", "string"):
            return [{"metric": {}, "value": answer["result"]}]
        samples: list[dict[str, Any]] = answer["result"]
        return samples

    def query_api(self, path: str, **parameters: str) -> Any:
        """What a call of its HTTP API has as data. Raises ValueError."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode(errors='replace')}") from error

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
