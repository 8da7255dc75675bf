"""Cardwise's own image, made on the spot: what `Dockerfile` makes, without an engine and without a registry.

The interpreter that runs us, the packages of requirements/run.lock and the shared objects of both are one layer, which
is kept in the user cache; our code is a second, small one.
"""

import hashlib
import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from release import agentroot
from tests.cluster import binaries, images, mps
from tests.cluster.images import Layer

NAME = "cardwise.local/cardwise"
AGENT = "cardwise.local/cardwise-agent:test"
TAG = "test"
FORMER = "former"  # tag of the same with the code of an earlier commit
SCHEDULER = "cardwise.local/kube-scheduler:test"

_ROOT = Path(__file__).parents[2]
_LOCK = _ROOT / "requirements" / "run.lock"
_PACKAGES = ("cardwise", "webhook", "extender", "deviceplugin", "mps")
_BIN = "usr/local/bin"
_PYTHON = f"{_BIN}/python3"
_PATH = "/usr/local/bin:/bin:/sbin:/usr/bin:/usr/sbin:/usr/local/nvidia/bin"  # the last: see Dockerfile
_LIB = f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}"
_OF_DEBIAN = "deb_system" in sysconfig.get_scheme_names()  # its interpreter has another name for this folder
_SITE = f"{_LIB}/{'dist' if _OF_DEBIAN else 'site'}-packages"
_OBJECTS = "lib/x86_64-linux-gnu"  # where the loader looks without a cache of its own
# Of the standard library and of `kubernetes`, what no part imports: half of the size.
_LEFT_OUT = re.compile(
    r"^(test|idlelib|tkinter|turtledemo|lib2to3|ensurepip|pydoc_data|site-packages|config-[^/]*)(/|$)"
    r"|^lib-dynload/(_tkinter|_curses|_sqlite3|_dbm|_gdbm|readline|_test|_ctypes_test|xx)"
    r"|^kubernetes/(aio|docs|test|e2e_test)/"
    r"|\.pyi$|\.opt-[12]\.pyc$|(^|/)tests?/|\.a$"
)
_SONAME = re.compile(r"^\s*(\S+) => (/\S+)", re.MULTILINE)


def write(path: Path, say: binaries.Say, root: Path = _ROOT, tag: str = TAG, *, double: bool = True) -> None:
    """The OCI archive of the image `NAME:tag` with the code in `root`; `double`: with that of NVIDIA's MPS."""
    layers = [Layer.plain(_base(say)), Layer.packed(_code(root, double=double))]
    images.write_layers(path, [f"{NAME}:{tag}"], layers, [f"/{_PYTHON}"], PATH=_PATH)


def write_agent(path: Path, root: Path = _ROOT) -> None:
    """The OCI archive of the image `AGENT`: the files that the Dockerfile's stage `agent` has."""
    with tempfile.TemporaryDirectory() as scratch, io.BytesIO() as buffer:
        agentroot.build_root(Path(scratch), root)
        with tarfile.open(fileobj=buffer, mode="w") as layer:
            layer.add(scratch, ".", filter=_of_root)
        images.write(path, [AGENT], buffer.getvalue(), ["/usr/local/bin/cardwise-agent"])


def write_scheduler(path: Path, kube_bin: Path) -> None:
    """That of the image `SCHEDULER`: kube-scheduler alone, as the real one has it."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as scratch:
        with tarfile.open(scratch.name, "w") as layer:
            _folders(layer, [f"{_BIN}/kube-scheduler"])
            layer.add((kube_bin / "kube-scheduler").resolve(), f"{_BIN}/kube-scheduler", filter=_of_root)
        images.write_layers(path, [SCHEDULER], [Layer.plain(Path(scratch.name))], ["/usr/local/bin/kube-scheduler"])


def _base(say: binaries.Say) -> Path:
    """The tar of interpreter and packages, from the cache where it is there."""
    digest = hashlib.sha256(_LOCK.read_bytes() + sys.version.encode() + Path(__file__).read_bytes()).hexdigest()
    kept = binaries.cache_root() / f"image-{digest[:16]}.tar"
    if not kept.exists():
        say("making the layer of Python and its packages (once)")
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix="image-", delete=False) as scratch:
            _write_base(Path(scratch.name))
        Path(scratch.name).rename(kept)
    return kept


def _write_base(path: Path) -> None:
    files = dict(python_files(locked_packages()))
    program = Path(sys.executable).resolve()
    objects = shared_objects([program, *(source for source in files.values() if ".so" in source.suffixes)])
    with tarfile.open(path, "w") as layer:
        _folders(layer, [*files, f"{_BIN}/x", f"{_OBJECTS}/x", "lib64/x", "etc/x", "dev/x", "proc/x", "sys/x", "run/x"])
        _folder(layer, "tmp", 0o1777)
        images.add(layer, "etc/passwd", b"root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/tmp:/\n")
        layer.add(program, _PYTHON, filter=_of_root)
        for name, source in {**files, **objects}.items():
            layer.add(source.resolve(), name, filter=_of_root)


def locked_packages() -> list[str]:
    """The packages that our parts need."""
    return re.findall(r"^([A-Za-z0-9_.-]+)==", _LOCK.read_text(), re.MULTILINE)


def python_files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """The standard library and these packages: path in the image, without the slash, and here."""
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*")):
        inside = source.relative_to(library).as_posix()
        if source.is_file() and not _LEFT_OUT.search(inside):
            yield f"{_LIB}/{inside}", source
    for name in packages:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another system than ours
        for file in distribution.files or ():
            inside, source = file.as_posix(), Path(str(distribution.locate_file(file)))
            if inside.startswith("..") or _LEFT_OUT.search(inside) or not source.is_file():
                continue
            yield f"{_SITE}/{inside}", source
            compiled = Path(f"{source.parent}/__pycache__/{source.stem}.{sys.implementation.cache_tag}.pyc")
            if source.suffix == ".py" and compiled.exists():
                # Nobody can write them there, and every start would compile anew.
                yield f"{_SITE}/{Path(inside).parent.as_posix()}/__pycache__/{compiled.name}", compiled


def shared_objects(users: Iterable[Path]) -> dict[str, Path]:
    """The shared objects that these programs and objects need, and the loader."""
    objects: dict[str, Path] = {}
    listed = subprocess.run(["ldd", *map(str, users)], capture_output=True, text=True, check=False).stdout
    for soname, source in _SONAME.findall(listed):
        if "site-packages" not in source:  # packages bring theirs along, and know where
            objects[f"{_OBJECTS}/{soname}"] = Path(source)
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    return {**objects, f"lib64/{loader.name}": loader}


def _code(root: Path, *, double: bool) -> bytes:
    """Our packages, their commands, and where it is asked for the double of NVIDIA's MPS."""
    scripts = metadata.distribution("cardwise").entry_points.select(group="console_scripts")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for package in _PACKAGES:
            for source in sorted((root / package).rglob("*")):
                if source.suffix in (".py", ".pyc") and source.is_file():
                    layer.add(source, f"{_SITE}/{source.relative_to(root).as_posix()}", filter=_of_root)
        info = (metadata.distribution("cardwise").read_text("METADATA") or "").encode()
        images.add(layer, f"{_SITE}/cardwise-{metadata.version('cardwise')}.dist-info/METADATA", info)
        for script in scripts:
            text = f"#!/{_PYTHON}\nimport sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
            images.add(layer, f"{_BIN}/{script.name}", text.encode(), 0o755)
        for program in sorted(mps.DOUBLE.iterdir()) if double else ():
            if program.is_file():
                first, _, rest = program.read_bytes().partition(b"\n")
                text = re.sub(rb"^#!/usr/bin/env (-S )?python3", f"#!/{_PYTHON}".encode(), first) + b"\n" + rest
                images.add(layer, f"{_BIN}/{program.name}", text, 0o755)
    return buffer.getvalue()


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    return info


def _folders(layer: tarfile.TarFile, files: Iterable[str]) -> None:
    """Every folder on the way to the files."""
    for folder in sorted({parent.as_posix() for file in files for parent in Path(file).parents} - {"."}):
        _folder(layer, folder)


def _folder(layer: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    layer.addfile(info)
