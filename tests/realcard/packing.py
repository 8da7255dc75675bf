"""What travels to a lent machine besides the working tree, and how it is laid out there.

Theory of operation. Such a machine has no network and perhaps another Python, and takes so many MiB at a time, the
working tree included. So what `make binaries` and `make env` have made is packed into archives of few MiB, and these
are put into loads, each of which travels in a call of its own: with a limit of 64 MiB and a tree of 15, archives of 30,
10 and 35 MiB are two loads. The first load has the interpreter, so the scenarios without Kubernetes need it alone.

Only the standard library is needed to unpack, of any Python from 3.9 on.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Files = Sequence[tuple[str, Path]]  # the name in an archive, and the file

MIB = 1024 * 1024
LIMIT = 64 * MIB  # of the working tree and what is carried with it, in one call
MARGIN = 2 * MIB  # for what the transfer itself adds
FOLDER = ".lent"
_SUFFIX = ".tar.xz"
ROOT = Path(__file__).resolve().parents[2]
PYTHON = "python"  # starts the interpreter that travelled
_INTERPRETER, _OBJECTS, _CACHE, _SYSTEM = "interpreter", "objects", "cache/cardwise", "system"
# Debian's programs that nodes of the test cluster call by these paths.
_SYSTEM_FILES = (
    "/usr/sbin/runc",
    "/bin/busybox",
    "/usr/sbin/ip",
    *(f"/usr/lib/cni/{name}" for name in ("bridge", "host-local", "loopback", "portmap")),
    *(f"/usr/sbin/{name}{verb}" for name in ("iptables", "ip6tables") for verb in ("", "-save", "-restore")),
)
_SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu/xtables",)
_TEST_PACKAGES = (
    "execnet",
    "hypothesis",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "pytest",
    "pytest-randomly",
    "pytest-timeout",
    "pytest-xdist",
    "sortedcontainers",
)
# Of the C library, which is the machine's own.
_LIBC = ("ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libutil.so", "libresolv.so")


class TooLarge(Exception):
    """What is to travel does not fit into a call; the text says what and how large it is."""


def pack(folder: Path, archives: Mapping[str, Files], tree: int, limit: int = LIMIT) -> list[Path]:
    """Writes the archives into folders `1`, `2`, … of `folder`; returns these loads, in the order in which they travel.

    tree: bytes of the working tree, which travels with each load. Raises TooLarge.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def write(name: str) -> Path:
        path = folder / f"{name}{_SUFFIX}"
        with tarfile.open(path, "w:xz") as archive:
            for inside, source in archives[name]:
                archive.add(source, inside, recursive=False)
        return path

    with ThreadPoolExecutor() as pool:
        written = list(pool.map(write, archives))
    room = limit - MARGIN - tree
    loads: list[Path] = []
    remaining = 0
    for path in written:
        size = path.stat().st_size
        if size > room:
            raise TooLarge(
                f"{path.name} has {_mib(size)} MiB, and {_mib(room)} MiB can travel beside the working tree of "
                f"{_mib(tree)} MiB: have git ignore files of the tree, or leave files out in tests/realcard/packing.py"
            )
        if size > remaining:
            loads.append(folder / str(len(loads) + 1))
            loads[-1].mkdir()
            remaining = room
        remaining -= size
        path.rename(loads[-1] / path.name)
    return loads


def archives_of_this_machine() -> dict[str, Files]:
    """What `make env` and `make binaries` have made, each part with its files: their names there, and here."""
    from tests.cluster import binaries, partsimage

    def quietly(_: str) -> None:
        pass

    program = Path(sys.executable).resolve()
    files = dict(partsimage.python_files([*partsimage.locked_packages(), *_TEST_PACKAGES, "cardwise"]))
    # What is compiled is a third, and compiled again there; a .pth names this machine's tree.
    files = {name: path for name, path in files.items() if path.suffix not in (".pyc", ".pth")}
    files["usr/local/bin/python3"] = program
    objects = partsimage.shared_objects([program, *(source for source in files.values() if ".so" in source.suffixes)])
    system = {f"{_SYSTEM}{path}": Path(path) for path in _system_files()}
    theirs = partsimage.shared_objects(system.values())
    tools = [*_folder(binaries.helm(quietly)), *_folder(binaries.nvidia(quietly))]
    # Not the layer of our image, which is made there of the interpreter in some seconds.
    return {
        _INTERPRETER: [*_resolved({f"{_INTERPRETER}/{name}": path for name, path in files.items()}), *_packed(objects)],
        "kubernetes": _folder(binaries.kube(quietly)),
        "nodes": [*_folder(binaries.containerd(quietly)), *_resolved(system), *_packed(theirs)],
        "tools": tools,
    }


def tree_size() -> int:
    """Bytes of the files that travel with each call: those that git knows, and those that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    paths = [ROOT / os.fsdecode(name) for name in names if name]
    return sum(path.lstat().st_size for path in paths if path.exists())


def unpack(loads: Sequence[Path], into: Path) -> Path:
    """Unpacks what has travelled, and adds what the machine lacks. Returns the program that starts our interpreter."""
    for load in loads:
        for file in sorted(load.glob(f"*{_SUFFIX}")):
            with tarfile.open(file) as archive:
                if sys.version_info >= (3, 12):
                    archive.extractall(into, filter="fully_trusted")  # it is ours
                else:
                    archive.extractall(into)
    _add_missing(into)
    sites = list((into / _INTERPRETER).glob("usr/local/lib/python3*/site-packages"))
    if not sites:
        raise FileNotFoundError(f"{into} has no interpreter: run the call that carries load 1 first, on this machine")
    (sites[0] / "cardwise.pth").write_text(f"{ROOT}\n")
    program = into / PYTHON
    program.write_text(
        "#!/bin/sh\n"
        f'export LD_LIBRARY_PATH="{into}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" XDG_CACHE_HOME="{into}/cache"\n'
        'export PATH="$PATH:/usr/local/nvidia/bin"\n'  # where a driver that is mounted has its programs
        f'exec "{into}/{_INTERPRETER}/usr/local/bin/python3" "$@"\n'
    )
    program.chmod(0o755)
    if any((load / f"{_INTERPRETER}{_SUFFIX}").exists() for load in loads):
        # Once here, with all cores, instead of at each start in a container.
        subprocess.run(
            [program, "-m", "compileall", "-q", "-j", "0", sites[0].parent], stdout=subprocess.DEVNULL, check=False
        )
    return program


def _add_missing(into: Path) -> None:
    """Shared objects and nodes' programs that the machine has already stay its own, but for that of our interpreter."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, check=False).stdout.decode()
    (into / "lib").mkdir(exist_ok=True)
    for packed in (into / _OBJECTS).glob("*"):
        if f"\t{packed.name} " not in known or packed.name.startswith("libpython"):
            shutil.copy2(packed, into / "lib" / packed.name)
    system = into / _SYSTEM
    for packed in system.rglob("*"):
        path = Path("/") / packed.relative_to(system)
        if packed.is_file() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(packed, path)


def _system_files() -> list[str]:
    return [*_SYSTEM_FILES, *(str(path) for folder in _SYSTEM_FOLDERS for path in Path(folder).glob("*"))]


def _resolved(files: Mapping[str, Path]) -> Files:
    return [(inside, source.resolve()) for inside, source in files.items()]


def _packed(objects: Mapping[str, Path]) -> Files:
    names = {f"{_OBJECTS}/{Path(inside).name}": source for inside, source in objects.items()}
    return _resolved({name: source for name, source in names.items() if not Path(name).name.startswith(_LIBC)})


def _folder(folder: Path) -> Files:
    return [(f"{_CACHE}/{folder.name}/{path.name}", path) for path in sorted(folder.iterdir())]


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"
