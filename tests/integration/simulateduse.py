"""What the driver of a real node's simulated GPUs reports of the pods' processes."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from cardwise.core.values.decoded import Json
from tests.integration.sharing import Space, assigned

_BUSY_PERCENT = 40.0  # of the SMs, of a pod that computes


def simulate_use(space: Space, node: str, used: Mapping[str, tuple[int, bool]]) -> float:
    """Each of these pods has one process with so many MiB, which computes or not. Returns when, on the boot clock."""
    path = space.cluster.node(node).folder / "cards.yaml"
    inventory = yaml.safe_load(path.read_text())
    pods = {name: space.get(name) for name in used}
    uuids = {name: {share.uuid for share in assigned(pod).shares()} for name, pod in pods.items()}
    for card in inventory["cards"]:
        card["processes"] = [
            {
                "pid": process_of(pods[name]),
                "memoryMiB": mib,
                "smPercent": _BUSY_PERCENT if computes else 0.0,
            }
            for name, (mib, computes) in used.items()
            if card["uuid"] in uuids[name]
        ]
    scratch = path.with_suffix(".new")
    scratch.write_text(yaml.safe_dump(inventory))
    scratch.replace(path)
    return boot_seconds()


def process_of(pod: Json) -> int:
    """The first process of the pod's only container, by its cgroup."""
    (status,) = pod["status"]["containerStatuses"]
    container = status["containerID"].rpartition("/")[2]
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with contextlib.suppress(OSError):
            if container in (folder / "cgroup").read_text():
                return int(folder.name)
    raise LookupError(f"{pod['metadata']['name']} has no process")


def boot_seconds() -> float:
    """The clock by which the manager counts minutes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wait_within_minute() -> None:
    """The manager keeps the peak of each minute: use that changes at the end of one may be in the next."""
    while not 2 < boot_seconds() % 60 < 50:
        time.sleep(0.5)
