"""The chart as people install it: by the real Helm, its parts in pods on the real nodes."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cardwise.core.api import names, schedulerconfig
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from tests.cluster import binaries, node, partsimage, versions
from tests.cluster.processes import PATIENCE, run

RELEASE = "cardwise"
CHART = Path(__file__).parents[2] / "helm" / "cardwise"
EXTENDER_ADDRESS = "10.96.0.50"
WAITS = ("--wait", f"--timeout={PATIENCE:.0f}s")  # flags of Helm's verbs
_MARGIN = 30  # seconds for Helm to say what was not ready
GPU_LABEL = "nvidia.com/gpu.present"  # by which the chart knows nodes with cards

# What differs from the defaults: images without a registry, cards without hardware, and no DNS.
VALUES: Mapping[str, Any] = {
    "image": {"repository": partsimage.NAME, "tag": partsimage.TAG, "pullPolicy": "Never"},
    "scheduler": {"mode": "manual"},
    "webhook": {"timeoutSeconds": 15},  # a busy machine is slow, and that is no failure
    "nodes": {"simulatedGPUs": f"{node.OWN_FOLDER}/cards.yaml"},
    "extender": {"service": {"clusterIP": EXTENDER_ADDRESS}, "leaseSeconds": 5},
}


class Chart:
    """The release of one cluster."""

    def __init__(self, state: Path, kubeconfig: Path, values: Mapping[str, Any], installed: Path = CHART) -> None:
        """`installed` is what `install` takes; what it is upgraded to is the chart of this tree."""
        self._installed = installed
        self._state = state
        self._kubeconfig = kubeconfig
        self._values = merged(VALUES, values)

    def install(self) -> str:
        """Returns when all parts are ready, and the notes."""
        return self._apply("install", self._installed, ["--create-namespace"], {})

    def upgrade(self, values: Mapping[str, Any], *flags: str) -> str:
        """The same with values changed, which stay so."""
        return self._apply("upgrade", CHART, flags, values)

    def helm(self, *args: str, check: bool = True) -> str:
        """Run Helm in the namespace of the release. Raises CommandFailed."""
        program = str(binaries.helm(lambda _: None) / "helm")
        flags = [f"--kubeconfig={self._kubeconfig}", f"--namespace={names.NAMESPACE}"]
        return run([program, *args, *flags], timeout=PATIENCE + _MARGIN, check=check)

    def cleanup(self) -> Path:
        """A manifest of what an uninstallation runs at its end."""
        file = self._state / "cleanup.yaml"
        flags = (
            f"--values={self._state / 'values.yaml'}",
            f"--kube-version={versions.version()}",  # a Helm that is no release takes an old one
            "--show-only=templates/uninstall/cleanup.yaml",
        )
        file.write_text(self.helm("template", RELEASE, str(CHART), *flags))
        return file

    def stanzas(self, client: KubeClient) -> list[dict[str, Any]]:
        """What an admin gives kube-scheduler, with the certificates that the extender has made."""
        data = client.get(paths.secrets(names.NAMESPACE, "cardwise-extender-tls"))["data"]
        folder = self._state / "extender-tls"
        folder.mkdir(exist_ok=True)
        for name in ("ca.crt", "client.crt", "client.key"):
            (folder / name).write_bytes(base64.b64decode(data[name]))
        return schedulerconfig.extender_stanzas(
            filter_url=f"https://{EXTENDER_ADDRESS}:12345",
            bind_url=f"https://{EXTENDER_ADDRESS}:12346",
            ca_file=str(folder / "ca.crt"),
            cert_file=str(folder / "client.crt"),
            key_file=str(folder / "client.key"),
        )

    def _apply(self, verb: str, chart: Path, flags: Sequence[str], values: Mapping[str, Any]) -> str:
        file = self._state / "values.yaml"
        if file.exists():
            self._values = yaml.safe_load(file.read_text())
        self._values = merged(self._values, values)
        file.write_text(yaml.safe_dump(json.loads(json.dumps(self._values))))
        return self.helm(verb, RELEASE, str(chart), f"--values={file}", *WAITS, *flags)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Maps one in the other, as Helm merges values."""
    merged_map = dict(under)
    for key, setting in over.items():
        before = merged_map.get(key)
        are_maps = isinstance(before, Mapping) and isinstance(setting, Mapping)
        merged_map[key] = merged(before, setting) if are_maps and isinstance(before, Mapping) else setting
    return merged_map
