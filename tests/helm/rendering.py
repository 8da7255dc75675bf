"""Runs the real Helm on our chart, and finds things in what it renders."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json

CHART = Path(__file__).parents[2] / "helm" / "cardwise"
GIVEN = ("--set", "scheduler.mode=manual,image.repository=cardwise")  # what the chart has no default for
# Values that tests have in common: a render takes a fifth of a second of a core.
ALL = (
    "networkPolicies.enabled=true",
    "scheduler.mode=own",
    "scheduler.image=kube-scheduler:v1.34.4",
)
OTHER = (  # nothing is as by default
    *ALL,
    "namespace.name=gpu",
    "crds.keep=false",
    "webhook.exemptNamespaces={quiet}",
    "webhook.gangSchedulers={one,two}",
    "webhook.isolation=mps",
    "webhook.nvidiaGpu=take",
    "extender.policy=spread",
    "extender.service.clusterIP=10.0.0.7",
    "deviceplugin.restrictToNode=false",
    "mps.audit=evict",
    "nodes.gpus=GPU-1\\,GPU-2",
    "policies.annotationWriters={me}",
)
CLAIMS = ("scheduler.mode=claims",)
OFF = (  # what can be left out is
    "crds.enabled=false",
    "policies.enabled=false",
    "webhook.enabled=false",
    "webhook.url=https://127.0.0.1:8443",
    "extender.enabled=false",
    "deviceplugin.enabled=false",
    "mps.enabled=false",
)

Objects = list[Json]
Render = Callable[..., Objects]


def template(helm: str, *sets: str, chart: Path = CHART, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`helm template` with these `--set`s, and other flags."""
    arguments = ["--namespace", names.NAMESPACE, *GIVEN, *(flag for setting in sets for flag in ("--set", setting))]
    command = [helm, "template", "cardwise", str(chart), "--kube-version", "1.34.0", *arguments, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def documents(text: str) -> Objects:
    """The documents of a rendered chart; by libyaml, since they are long."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def get_object(objects: Objects, kind: str, name: str) -> Json:
    matching = [manifest for manifest in objects if manifest["kind"] == kind and manifest["metadata"]["name"] == name]
    assert len(matching) == 1, f"{kind} {name}: {len(matching)} found"
    return matching[0]


def text(manifest: object) -> str:
    return str(yaml.dump(manifest, Dumper=yaml.CSafeDumper, width=10**6))


def conditions(hook: Json) -> dict[str, str]:
    """The CEL of a webhook entry's matchConditions, by name."""
    return {condition["name"]: condition["expression"] for condition in hook["matchConditions"]}
