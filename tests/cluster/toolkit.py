"""NVIDIA's container toolkit on a test node: its real runtime and tools, on NVIDIA's mock of the driver's library; or
its CDI spec of this machine's own cards.

The driver's root is the node's folder, which has the device nodes of the node's cards in `dev` already. The runtime
reads its settings at each start of a container, so a test changes them as an administrator does, and waits for nothing.
"""

import json
import os
import stat
from pathlib import Path

import yaml

from cardwise.kube.client import KubeClient
from tests.cluster import binaries, cards
from tests.cluster.processes import run

MOCK = "CARDWISE_NVML_MOCK"
RUNTIME_CLASS = "nvidia"
MODE = "nvidia-container-runtime.mode"
ENVIRONMENT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
KIND = "nvidia-container-runtime.modes.cdi.default-kind"
_PROFILE = "configs/mock-nvml-config-t4.yaml"
_LIBRARY = "libnvidia-ml.so"
_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/local/nvidia/lib64")  # where drivers are, beside what ldconfig knows
_CONTROL = ("nvidiactl", "nvidia-uvm")


def write(folder: Path, node: str, count: int) -> None:
    """The driver of a node with so many cards, and the toolkit's settings as they are by default."""
    mock = Path(os.environ[MOCK])
    profile = yaml.safe_load((mock / _PROFILE).read_text())
    profile["devices"] = profile["devices"][:count]
    for index, device in enumerate(profile["devices"]):
        device["uuid"] = cards.card_uuid(node, index, folder)
    # Not as YAML: Go takes more texts for numbers than Python does.
    (folder / "nvml.yaml").write_text(json.dumps(profile))
    libraries = folder / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True, exist_ok=True)
    real = libraries / f"{_LIBRARY}.{profile['system']['driver_version']}"
    real.write_bytes((mock / f"{_LIBRARY}.1").read_bytes())
    (libraries / f"{_LIBRARY}.1").symlink_to(real.name)
    for name, number in zip(_CONTROL, cards.device_numbers(count + len(_CONTROL))[count:], strict=True):
        os.mknod(folder / "dev" / name, 0o666 | stat.S_IFCHR, number)
        (folder / "dev" / name).chmod(0o666)
    configure(folder, {"nvidia-container-cli.root": str(folder), **_of_node(folder)})


def write_real(folder: Path) -> None:
    """The toolkit's settings on a node with this machine's own cards: by the CDI spec that it has of them."""
    configure(folder, {MODE: "cdi", ENVIRONMENT: True, KIND: "nvidia.com/gpu", **_of_node(folder)})


def runtime_class(api: KubeClient) -> None:
    """The RuntimeClass by which pods ask for this runtime."""
    manifest = {"metadata": {"name": RUNTIME_CLASS}, "handler": RUNTIME_CLASS}
    api.create("/apis/node.k8s.io/v1/runtimeclasses", manifest)


def configure(folder: Path, settings: dict[str, object]) -> None:
    """By nvidia-ctk; what it is not told stays as it is."""
    file = folder / "nvidia-container-runtime.toml"
    sets = [f"--set={name}={str(setting).lower()}" for name, setting in settings.items()]
    known = [f"--config-file={file}"] if file.exists() else []
    run([str(binaries.nvidia(lambda _: None) / "nvidia-ctk"), "--quiet", "config", *known, *sets, f"--output={file}"])


def environment(folder: Path) -> dict[str, str]:
    """Of the node's containerd, whose children the runtime and its hooks are."""
    file, mock = folder / "nvidia-container-runtime.toml", folder / "nvml.yaml"
    return {"NVIDIA_CTK_CONFIG_FILE_PATH": str(file), "MOCK_NVML_CONFIG": str(mock)}


def cdi_spec(folder: Path) -> None:
    """The node's CDI spec of its cards, as nvidia-ctk makes it."""
    _generate(folder, "nvidia", "--device-name-strategy=index", "--device-name-strategy=uuid")


def management_spec(folder: Path) -> Path:
    """A CDI spec of another kind, of all cards at once, as the GPU Operator's toolkit makes it for its own pods."""
    return _generate(folder, "management", "--mode=management", "--vendor=management.nvidia.com", "--class=gpu")


def real_spec(cdi_dir: Path) -> list[str]:
    """The command that makes the CDI spec of this machine's own cards and driver. Run where containers are made: what
    it finds elsewhere, such as a socket below /run, a container could not have.
    """
    tool = binaries.nvidia(lambda _: None) / "nvidia-ctk"
    library_paths = [f"--library-search-path={folder}" for folder in _LIBRARIES if Path(folder).is_dir()]
    roots = [f"--nvidia-cdi-hook-path={tool}", *library_paths, f"--output={cdi_dir / 'nvidia.yaml'}"]
    return [str(tool), "--quiet", "cdi", "generate", "--device-name-strategy=uuid", *roots]


def _of_node(folder: Path) -> dict[str, object]:
    """What is the same on every node: where its CDI specs are, and its log."""
    return {
        "nvidia-container-runtime.modes.cdi.spec-dirs": str(folder / "cdi"),
        "nvidia-container-runtime.debug": str(folder / "nvidia-container-runtime.log"),
    }


def _generate(folder: Path, name: str, *settings: str) -> Path:
    tool, spec_file = binaries.nvidia(lambda _: None) / "nvidia-ctk", folder / "cdi" / f"{name}.yaml"
    variables = [f"{key}={variable}" for key, variable in environment(folder).items()]
    roots = [f"--driver-root={folder}", f"--dev-root={folder}", f"--nvidia-cdi-hook-path={tool}"]
    run(["env", *variables, str(tool), "--quiet", "cdi", "generate", *roots, *settings, f"--output={spec_file}"])
    return spec_file
