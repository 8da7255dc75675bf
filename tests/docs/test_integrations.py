"""The manifests of examples/integrations: pods in kinds that Cardwise looks at; and values in their pages."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import names, request
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests.build import resource_class
from tests.helm.conftest import helm  # noqa: F401 - a fixture
from tests.helm.rendering import CHART, GIVEN
from tests.webhook.nodeoffers import offers, with_cards
from tests.webhook.reviews import Known, body, resource_classes
from webhook.cluster.cards import CardSizes
from webhook.pods.context import WebhookSettings
from webhook.server import decisions, review

FOLDER = Path(__file__).parents[2] / "docs" / "integrations"
PAGES = sorted(FOLDER.glob("*.md"))
EXAMPLES = sorted((FOLDER.parents[1] / "examples" / "integrations").glob("*.yaml"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Kinds that make no pods, or, as Argo's, none that a template of a pod is in.
OTHERS = {"ResourceFlavor", "ClusterQueue", "LocalQueue", "Configuration", "Workflow"}
PROGRAMS = {"cardwise", "gpu-operator", "jupyterhub", "kueue"}  # whose values or configuration a block may be


def blocks() -> Iterator[tuple[str, str]]:
    """Each block of YAML, with its page. Its first line says whose values it has."""
    for page in PAGES:
        for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            yield page.stem, text


def owner(text: str) -> str:
    return text.splitlines()[0].removeprefix("# ")


MANIFESTS = [(path.stem, manifest) for path in EXAMPLES for manifest in yaml.safe_load_all(path.read_text())]
CHART_VALUES = [
    pytest.param(text, id=f"{page}-{i}") for i, (page, text) in enumerate(blocks()) if owner(text) == "cardwise"
]


def test_every_page_has_one_and_says_whose_values_they_are() -> None:
    assert {page for page, _ in blocks()} | {path.stem for path in EXAMPLES} == {page.stem for page in PAGES}
    assert {owner(text) for _, text in blocks()} == PROGRAMS


@pytest.mark.parametrize("text", CHART_VALUES)
def test_the_chart_takes_the_values(text: str, helm: str, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "values.yaml"
    file.write_text(text)
    command = [helm, "template", "cardwise", str(CHART), "-n", names.NAMESPACE, "--kube-version", "1.34.0"]
    done = subprocess.run([*command, *GIVEN, "-f", file], capture_output=True, text=True, check=False)
    chosen = yaml.safe_load(text)
    assert done.returncode == 0, done.stderr
    assert [key for key in chosen if key not in VALUES] == []
    mode = chosen.get("scheduler", {}).get("mode")
    if mode == "own":  # GIVEN stands behind the file, so that is rendered by itself
        flags = ["--set", "image.repository=cardwise", "-f", str(file)]
        alone = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
        assert alone.returncode == 0, alone.stderr
        assert chosen["scheduler"]["image"] in alone.stdout


def known() -> Known:
    classes = resource_classes(resource_class("nvidia.l4", model="NVIDIA L4"))
    return Known(
        known_cards=CardSizes(MiB(23034), 2),
        known_classes=classes,
        cards_of={"nvidia.l4": CardSizes(MiB(23034), 2)},
        offered=offers(n1=with_cards()),
    )


@pytest.mark.parametrize(
    ("page", "manifest"), [pytest.param(*case, id=f"{case[0]}-{case[1]['kind']}") for case in MANIFESTS]
)
def test_what_makes_pods_is_looked_at_and_has_nothing_to_be_warned_of(page: str, manifest: Json) -> None:
    assert manifest["apiVersion"]
    assert {"name", "generateName"} & manifest["metadata"].keys()
    if manifest["kind"] in OTHERS:
        return
    plural = f"{manifest['kind'].lower()}s"
    group = manifest["apiVersion"].partition("/")[0]
    if group not in ("apps", "batch"):
        assert f"{plural}.{group}" in VALUES["webhook"]["workloadKinds"]
    asking = review.decode(body(manifest, plural))
    assert decisions.decide_advise(asking, known(), WebhookSettings(min_share=256)).warnings == ()
    assert names.GPU_MEM in yaml.safe_dump(manifest)


def test_a_step_of_argo_asks_for_a_share() -> None:
    (workflow,) = (manifest for _, manifest in MANIFESTS if manifest["kind"] == "Workflow")
    (step,) = workflow["spec"]["templates"]
    parsed = request.parse({"metadata": {}, "spec": {"containers": [step["container"]]}})
    assert parsed is not None
    assert parsed.containers[0].mem == 8192


def test_kueue_leaves_out_our_marks_and_covers_what_is_counted() -> None:
    text = next(text for page, text in blocks() if page == "kueue" and owner(text) == "kueue")
    left_out = yaml.safe_load(text)["resources"]["excludeResourcePrefixes"]
    assert set(left_out) == {names.SHARE, names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE, names.GPU_CORE}
    (queue,) = (manifest for _, manifest in MANIFESTS if manifest["kind"] == "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    assert {resource["name"] for resource in group["flavors"][0]["resources"]} == set(group["coveredResources"])
    assert names.WHOLE_GPU in group["coveredResources"]
    # Nothing that a user may ask for is neither: Kueue would not admit it.
    changed = {transformation["input"] for transformation in yaml.safe_load(text)["resources"]["transformations"]}
    assert set(names.REQUESTED) <= {*left_out, *changed, *group["coveredResources"]}


def test_shares_of_jupyterhub_are_amounts_that_a_pod_may_ask_for() -> None:
    text = next(text for page, text in blocks() if owner(text) == "jupyterhub")
    hub = yaml.safe_load(text)
    assert hub["scheduling"]["userScheduler"]["enabled"] is False
    for profile in hub["singleuser"]["profileList"]:
        limits = profile.get("kubespawner_override", {}).get("extra_resource_limits", {})
        pod = {"metadata": {}, "spec": {"containers": [{"name": "notebook", "resources": {"limits": limits}}]}}
        assert (request.parse(pod) is None) == (not limits)


def test_a_driver_upgrade_by_the_operator_drains_pods_with_a_share() -> None:
    """By default it evicts only pods that ask for nvidia.com/gpu or MIG, and stops at an emptyDir, as the agent's."""
    blocks_of_page = [
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", _page("driver-upgrades"), re.DOTALL)
    ]
    (policy,) = [block["driver"]["upgradePolicy"] for block in blocks_of_page if "driver" in block]
    assert policy["drain"]["enable"] is policy["drain"]["deleteEmptyDir"] is True
    assert any(
        block.get("nodes", {}).get("selector") == {"nvidia.com/gpu.deploy.client": "true"} for block in blocks_of_page
    )


def _page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()
