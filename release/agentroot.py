"""The root file system of the share agent's image: an interpreter, the modules that the agent imports, their libraries.

Every node that runs pods with MPS pulls it, from any namespace, so it has nothing else: no shell, no packages. Run by
the Dockerfile: `python agentroot.py ROOT SITE`, with our packages in SITE.
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
DATA = ("cardwise/share",)  # laid out for the pod's containers as they are, sources too
# What modules of the standard library import for uses that the agent has not.
LEFT_OUT = (
    "_hashlib", "_ssl", "asyncio", "bz2", "concurrent", "ctypes", "doctest", "email", "ftplib", "getpass", "http",
    "importlib.metadata", "lzma", "multiprocessing", "pdb", "pydoc", "ssl", "tarfile", "tkinter", "unittest",
    "urllib.request", "zipfile",
)  # fmt: skip
_FIRST = ("encodings.ascii", "encodings.latin_1", "encodings.utf_8", "os")  # before the first line of ours
_COMMAND = """\
#!/usr/local/bin/python3 -ES
import sys
sys.path.append("/opt/agent")
from mps.agent.__main__ import main
main()
"""
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def make(root: Path, site: Path) -> None:
    """Fills the folder, which must be empty."""
    lib = root / f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    interpreter = Path(sys.executable).resolve()
    objects = [_copied(interpreter, root / "usr/local/bin/python3")]
    for module in _modules(site):
        file = Path(module.__file__ or "")
        if file.is_relative_to(site):
            _copied(file, root / "opt/agent" / file.relative_to(site))
        elif file.is_relative_to(stdlib):
            there = _copied(file, lib / file.relative_to(stdlib))
            objects += [there] if ".so" in file.suffixes else []
    (lib / "lib-dynload").mkdir(exist_ok=True)
    for name in DATA:
        shutil.copytree(
            site / name, root / "opt/agent" / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    _add_libraries(root, [interpreter, *objects])
    command = root / "usr/local/bin/cardwise-agent"
    command.write_text(_COMMAND)
    command.chmod(0o755)
    # At run time nobody may write beside the sources, and each probe would compile them anew.
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    for folder, seen in ((lib, "/" / lib.relative_to(root)), (root / "opt/agent", Path("/opt/agent"))):
        subprocess.run([*compiling, "-s", str(folder), "-p", str(seen), str(folder)], check=True)
    (root / "tmp").mkdir(mode=0o1777)
    etc = root / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("nonroot:x:65532:65532:nonroot:/tmp:/\n")


def _modules(site: Path) -> list[Module]:
    """All that can come to be imported, found without running it."""
    finder = ModuleFinder(
        [str(site), *[one for one in sys.path if "site-packages" not in one]], excludes=list(LEFT_OUT)
    )
    for name in (*MODULES, *_FIRST):
        finder.import_hook(name)
    return [finder.modules[name] for name in sorted(finder.modules)]


def _copied(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    return source


def _add_libraries(root: Path, objects: list[Path]) -> None:
    """Where the loader looks without a cache of its own: beside the C library. The loader itself is where it is."""
    found: set[Path] = set()
    environment = os.environ | {"LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR") or ""}
    for one in objects:
        said = subprocess.run(["ldd", one], capture_output=True, text=True, check=True, env=environment).stdout
        found |= {Path(path) for path in _LIBRARY.findall(said)}
    (libc,) = (path for path in found if path.name.startswith("libc.so"))
    for path in found:
        target = path if path.name.startswith("ld-") else libc.parent / path.name
        _copied(path.resolve(), root / target.relative_to("/"))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
