"""Builds the root file system of the share agent's image: Python, the modules that the agent imports, their libraries.

Every node that runs pods with MPS pulls this image, so it contains nothing else: no shell, no packages.
Usage, in the Dockerfile: `python agentroot.py ROOT SITE`, with Cardwise's packages in SITE.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from modulefinder import Module, ModuleFinder
from pathlib import Path

MODULES = ("mps.agent.__main__", "mps.agent.probe", "mps.agent.running", "cardwise.share.installation")
DATA = ("cardwise/share",)  # the agent copies these files into the pod's containers, sources included
# Modules that the standard library imports, but that the agent does not use.
EXCLUDED_MODULES = (
    "_hashlib", "_ssl", "asyncio", "bz2", "concurrent", "ctypes", "doctest", "email", "ftplib", "getpass", "http",
    "importlib.metadata", "lzma", "multiprocessing", "pdb", "pydoc", "ssl", "tarfile", "tkinter", "unittest",
    "urllib.request", "zipfile",
)  # fmt: skip
_FIRST = (
    "encodings.ascii",
    "encodings.latin_1",
    "encodings.utf_8",
    "os",
)  # imported by Python before the agent's first line
_COMMAND = """\
#!/usr/local/bin/python3 -ES
import sys
sys.path.append("/opt/agent")
from mps.agent.__main__ import main
main()
"""
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def build_root(root: Path, site: Path) -> None:
    """Create the files in the empty folder `root`; `site` has Cardwise's packages."""
    lib = root / f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    interpreter = Path(sys.executable).resolve()
    objects = [_copy(interpreter, root / "usr/local/bin/python3")]
    for module in _modules(site):
        file = Path(module.__file__ or "")  # type: ignore[attr-defined]  # typeshed does not have it
        if file.is_relative_to(site):
            _copy(file, root / "opt/agent" / file.relative_to(site))
        elif file.is_relative_to(stdlib):
            copied = _copy(file, lib / file.relative_to(stdlib))
            objects += [copied] if ".so" in file.suffixes else []
    (lib / "lib-dynload").mkdir(exist_ok=True)
    for name in DATA:
        shutil.copytree(
            site / name, root / "opt/agent" / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    _add_libraries(root, [interpreter, *objects])
    command = root / "usr/local/bin/cardwise-agent"
    command.write_text(_COMMAND)
    command.chmod(0o755)
    # The file system is read-only at run time, so without this each probe would compile the modules.
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    for folder, final_path in ((lib, "/" / lib.relative_to(root)), (root / "opt/agent", Path("/opt/agent"))):
        subprocess.run([*compiling, "-s", str(folder), "-p", str(final_path), str(folder)], check=True)
    (root / "tmp").mkdir(mode=0o1777)
    etc = root / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("nonroot:x:65532:65532:nonroot:/tmp:/\n")


def _modules(site: Path) -> list[Module]:
    """All modules that the agent may import, found without running it."""
    finder = ModuleFinder(
        [str(site), *[path for path in sys.path if "site-packages" not in path]], excludes=list(EXCLUDED_MODULES)
    )
    for name in (*MODULES, *_FIRST):
        finder.import_hook(name)
    return [finder.modules[name] for name in sorted(finder.modules)]


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    return source


def _add_libraries(root: Path, objects: list[Path]) -> None:
    """Copy the shared libraries of `objects` beside the C library, where the loader looks without ld.so.cache.

    The loader keeps its own path.
    """
    libraries: set[Path] = set()
    environment = os.environ | {"LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR") or ""}
    for path in objects:
        output = subprocess.run(["ldd", path], capture_output=True, text=True, check=True, env=environment).stdout
        libraries |= {Path(library) for library in _LIBRARY.findall(output)}
    (libc,) = (path for path in libraries if path.name.startswith("libc.so"))
    for path in libraries:
        target = path if path.name.startswith("ld-") else libc.parent / path.name
        _copy(path.resolve(), root / target.relative_to("/"))


if __name__ == "__main__":
    build_root(Path(sys.argv[1]), Path(sys.argv[2]))
