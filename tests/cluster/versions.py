"""The versions of Kubernetes, containerd and CRI-O that the tests can run on: a folder of `kube/`, `containerd/` or
`crio/` for each minor, with its go.mod and go.sum.

`added` makes such a folder of Kubernetes from its own go.mod. It pins nothing of its own: the modules that
Kubernetes keeps in its own repository have the same version as it, etcd has the version of its client, and Go's rule
of the least version gives the rest as Kubernetes itself has it.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "kube"
MAIN = FOLDER / "main.go"
CHOSEN = "CARDWISE_KUBERNETES"
CONTAINERD = Path(__file__).parent / "containerd"
CHOSEN_CONTAINERD = "CARDWISE_CONTAINERD"
CRIO = Path(__file__).parent / "crio"
CHOSEN_CRIO = "CARDWISE_CRIO"
_MODULE = "k8s.io/kubernetes"
_ETCD = "go.etcd.io/etcd/server/v3"
_ETCD_CLIENT = "go.etcd.io/etcd/client/v3"
_RELEASE = re.compile(r"v?(\d+\.\d+)(\.\d+)")


class UnknownVersion(ValueError):
    """The tests have no such version; the text says which they have."""


def minors(folder: Path | None = None) -> list[str]:
    """As "1.37", the oldest first; without a folder those of Kubernetes."""
    names = [path.parent.name for path in (folder or FOLDER).glob("*/go.mod")]
    return sorted(names, key=lambda minor: [int(part) for part in minor.split(".")])


def minor() -> str:
    """The Kubernetes of this process: `$CARDWISE_KUBERNETES`, else the newest."""
    return _chosen(CHOSEN, minors())


def at_least(number: int) -> bool:
    """Whether it is 1.`number` or newer."""
    return int(minor().split(".")[1]) >= number


def containerd() -> str:
    """The containerd of this process's real nodes, as "2.1": `$CARDWISE_CONTAINERD`, else the newest."""
    return _chosen(CHOSEN_CONTAINERD, minors(CONTAINERD))


def crio() -> str | None:
    """The CRI-O that the real nodes have in place of containerd, as "1.34": `$CARDWISE_CRIO`, else none."""
    return _chosen(CHOSEN_CRIO, minors(CRIO)) if os.environ.get(CHOSEN_CRIO) else None


def runtime() -> str:
    """The program of this process's real nodes that the kubelet asks for containers."""
    return "crio" if crio() else "containerd"


def _chosen(variable: str, known: list[str]) -> str:
    wanted = os.environ.get(variable) or known[-1]
    if wanted not in known:
        raise UnknownVersion(f"${variable}={wanted}: the tests have {', '.join(known)} (tests/cluster/README.md)")
    return wanted


def version() -> str:
    """Of `minor`, as "v1.37.2"."""
    for line in (FOLDER / minor() / "go.mod").read_text().splitlines():
        words = line.split()
        if words[:1] == [_MODULE]:
            return words[1]
    raise UnknownVersion(f"{FOLDER / minor() / 'go.mod'} names no version of {_MODULE}")


def sources() -> list[Path]:
    """The Go module of `minor`."""
    return [FOLDER / minor() / "go.mod", FOLDER / minor() / "go.sum", MAIN]


@contextmanager
def added(wanted: str, go: str) -> Iterator[str]:
    """The folder of a version ("1.38.0"), in place of what its minor had; gives the minor. After an error inside, all
    is as it was before. Raises UnknownVersion before anything is written.
    """
    match = _RELEASE.fullmatch(wanted)
    if match is None:
        raise UnknownVersion(f"{wanted}: write a release with its patch, as 1.38.0; the tests run on no other")
    name, tagged = match[1], f"v{match[1]}{match[2]}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(MAIN, folder)
        there = json.loads(_run(go, folder, "mod", "download", "-json", f"{_MODULE}@{tagged}"))
        upstream = json.loads(_run(go, folder, "mod", "edit", "-json", there["GoMod"]))
        (folder / "go.mod").write_text(module(tagged, upstream))
        _run(go, folder, "mod", "tidy")
        into, before = FOLDER / name, folder / "before"
        if into.exists():
            shutil.copytree(into, before)
        try:
            into.mkdir(exist_ok=True)
            for file in ("go.mod", "go.sum"):
                shutil.copy(folder / file, into)
            yield name
        except BaseException:
            shutil.rmtree(into)
            if before.exists():
                shutil.copytree(before, into)
            raise


def module(tagged: str, upstream: dict[str, Any]) -> str:
    """The go.mod that `go mod tidy` makes whole. `upstream` is Kubernetes's own, as `go mod edit -json` has it."""
    staged = [entry["Old"]["Path"] for entry in upstream["Replace"] if entry["New"]["Path"].startswith("./staging/")]
    same = tagged.replace("v1.", "v0.", 1)
    etcd = next(entry["Version"] for entry in upstream["Require"] if entry["Path"] == _ETCD_CLIENT)
    lines = [
        "module cardwise.dev/tests/kube",
        f"go {upstream['Go']}",
        *(f"godebug {entry['Key']}={entry['Value']}" for entry in upstream.get("GoDebug") or ()),
        f"require (\n\t{_MODULE} {tagged}\n\t{_ETCD} {etcd}\n)",
        "replace (",
        *(f"\t{path} => {path} {same}" for path in staged),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _run(go: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run([go, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnknownVersion(f"go {' '.join(arguments)} failed:\n{done.stderr or done.stdout}")
    return done.stdout
