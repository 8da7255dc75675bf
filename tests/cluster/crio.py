"""CRI-O on a real node, in place of containerd: its configuration, and how it gets images.

What it writes to fixed places of /run and /var/lib is private to the node, whose namespace has empty folders there.
Images come by skopeo, which writes to CRI-O's storage as a pull would.
"""

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import images

# Debian packages, by a program of each.
PACKAGES = {"conmon": Path("/usr/bin/conmon"), "skopeo": Path("/usr/bin/skopeo")}

# containerd's: with CRI-O's own, tests that a container with them cannot open another's card would try nothing.
_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)

BOOTED = b"Registered SIGHUP"  # in its log: it listens by then
_RUNTIME = """\
[crio.runtime.runtimes.{name}]
  runtime_path = "{binary}"
  runtime_root = "{base}/{name}"
"""


def config(
    folder: Path,
    *,
    socket: Path,
    runtimes: Mapping[str, str],
    environment: Mapping[str, str],
    cni_conf: Path,
    cdi_dir: str,
) -> str:
    """The configuration of a CRI-O that has this folder, where its policy of signatures is written.

    `runtimes`: programs by name, the default one first. `environment`: theirs; CRI-O does not hand on its own.
    """
    policy = folder / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    return f"""\
[crio]
  root = "{folder}/root"
  runroot = "{folder}/run"
  storage_driver = "overlay"
[crio.api]
  listen = "{socket}"
[crio.runtime]
  hooks_dir = ["{folder}/hooks"]
  default_runtime = "{next(iter(runtimes))}"
  cgroup_manager = "cgroupfs"
  conmon_cgroup = "pod"
  conmon_env = {json.dumps([f"{key}={setting}" for key, setting in environment.items()])}
  cdi_spec_dirs = ["{cdi_dir}"]
  default_capabilities = {json.dumps(_CAPABILITIES)}
[crio.image]
  pause_image = "{images.PAUSE}"
  signature_policy = "{policy}"
  signature_policy_dir = "{folder}/policies"
[crio.network]
  network_dir = "{cni_conf}"
  plugin_dirs = ["/usr/lib/cni"]
{"".join(_RUNTIME.format(name=name, binary=binary, base=folder) for name, binary in runtimes.items())}"""


def mounted_controllers() -> str:
    """/proc/cgroups without what is mounted nowhere: CRI-O sets a limit of hugetlb wherever the kernel has it."""
    lines = Path("/proc/cgroups").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.split()[1] != "0")


def load_commands(folder: Path, archive: Path) -> list[list[str]]:
    """What gives the node of this folder an image, by each of its names."""
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        names = [entry["annotations"][images.NAME_ANNOTATIONS[0]] for entry in json.load(index)["manifests"]]
    copy = ["skopeo", "copy", "--quiet", "--insecure-policy"]
    store = f"containers-storage:[overlay@{folder}/root+{folder}/run]"
    return [[*copy, f"oci-archive:{archive}:{name}", f"{store}{name}"] for name in names]
