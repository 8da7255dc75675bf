"""What the docs say and the examples show: commands that exist, objects that can be read, every refusal explained."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from cardwise.cli.main import cli
from cardwise.core.api import classes, names, quotas, request
from cardwise.core.gangs import gangs
from cardwise.core.values.refusals import Refusal
from docs import generated
from webhook.pods import gangs as webhook_gangs
from webhook.pods.context import DEFAULT_SCHEDULER

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "reference", ROOT / "docs" / "integrations")
DOCS = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
EXAMPLES = [path for folder in ("types", "devices") for path in sorted((ROOT / "examples" / folder).glob("*.yaml"))]
README = (ROOT / "README.md").read_text()
TYPES = (ROOT / "docs" / "reference" / "types.md").read_text()


def commands() -> set[str]:
    """Every `cardwise ...` of a console block or in backquotes."""
    commands = set()
    for page in DOCS:
        text = page.read_text()
        blocks = "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
        commands |= {line.partition("#")[0].strip() for line in blocks.splitlines() if line.startswith("cardwise ")}
        commands |= set(re.findall(r"`(cardwise [^`]*)`", text))
    return commands


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_in_the_docs_exists(command):
    arguments = shlex.split(command)[1:]
    at: click.Command = cli
    context = click.Context(cli)
    while isinstance(at, click.Group):
        name, *arguments = arguments
        subcommand = at.get_command(context, name)
        assert subcommand is not None, f"{command}: there is no command {name}"
        at = subcommand
    with click.Context(at) as inner:
        at.parse_args(inner, arguments)  # raises where an option or an argument is unknown


@pytest.mark.parametrize("path", sorted(re.findall(r"examples/[\w/.-]+\.yaml", "".join(p.read_text() for p in DOCS))))
def test_every_example_that_the_docs_name_is_there(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_read(path):
    (manifest,) = yaml.safe_load_all(path.read_text())
    if manifest["kind"] == "ResourceClass":
        assert classes.parse(manifest).name == manifest["metadata"]["name"]
    elif manifest["kind"] == "GPUQuota":
        assert quotas.parse(manifest).entries
    else:
        assert manifest["apiVersion"] == "v1"


@pytest.mark.parametrize("refusal", Refusal)
def test_every_reason_of_the_scheduler_is_explained(refusal):
    assert refusal.remedy
    assert f"| `{refusal.text}` | {refusal.remedy} |" in generated.refusals()


def test_the_examples_of_devices_are_of_devices():
    manifests = [yaml.safe_load(path.read_text()) for path in EXAMPLES if path.parent.name == "devices"]
    known = {
        parsed.name: parsed.other
        for parsed in (classes.parse(manifest) for manifest in manifests if manifest["kind"] == "ResourceClass")
    }
    assert known == {"fpga": True, "rdma": True, "rdma-fast": True}
    pods = [manifest for manifest in manifests if manifest["kind"] == "Pod"]
    requested = {name for pod in pods for name in pod["spec"]["containers"][0]["resources"]["limits"]}
    assert requested == {"aliyun.com/gpu-mem", "rdma", "fpga"}


def rows_of_cards():
    table = TYPES.partition("### Names of today's GPUs")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| (\d+) \| `([^`]+)` \|$", table, re.MULTILINE)


@pytest.mark.parametrize(("model", "memory", "name"), rows_of_cards())
def test_the_classes_of_todays_cards_are_called_as_the_table_says(model, memory, name):
    assert classes.name_of_model(model) == name
    assert classes.accelerator_of_model(model) == name.replace(".", "-")
    parsed = classes.parse({"metadata": {"name": name}, "spec": classes.auto_spec(model)})
    seen = classes.card_labels(node="n", index=0, uuid="u", model=model, memory=int(memory), properties={}, own={})
    assert parsed.selector.matches(seen)


def test_the_examples_name_cards_that_drivers_know():
    """The K80 is in all of them, as the oldest that is; each other name is of the table."""
    known = {model for model, *_ in rows_of_cards()} | {"Tesla K80"}
    names = {name for *_, name in rows_of_cards()} | {"nvidia.tesla.k80"}
    text = "".join(path.read_text() for path in EXAMPLES)
    assert len(known) > 12
    assert {name for name in re.findall(r"\bnvidia\.[\w.-]*\w", text) if not name.startswith("nvidia.com")} <= names
    assert {model for line in re.findall(r"values: \[(NVIDIA .*)\]", text) for model in line.split(", ")} <= known
    assert set(re.findall(r"model: (.+)", text)) <= known


GANGS = [*(ROOT / "examples" / "gangs").glob("*.yaml"), ROOT / "examples" / "distributed" / "tf-distribute.yaml"]


@pytest.mark.parametrize("path", sorted(GANGS), ids=lambda path: path.stem)
def test_the_gangs_of_the_examples_can_start_and_their_authors_hear_the_truth(path):
    objects = list(yaml.safe_load_all(path.read_text()))
    needed, created = {}, {}
    for manifest in objects:
        if manifest["kind"] == "PodGroup":
            needed[manifest["metadata"]["name"]] = manifest["spec"]["minMember"]
        if "template" not in manifest.get("spec", {}):
            continue
        warnings = webhook_gangs.check_workload(manifest, None, f"{manifest['kind'].lower()}s", {DEFAULT_SCHEDULER})
        assert all(re.search("; fine if (other workloads create the remaining|a PodGroup)", text) for text in warnings)
        member = gangs.membership(manifest["spec"]["template"])
        assert needed.setdefault(member.name, member.minimum) in (member.minimum, None) or member.minimum is None
        created[member.name] = created.get(member.name, 0) + (
            manifest["spec"].get("replicas") or manifest["spec"]["parallelism"]
        )
    assert needed
    assert all(created[name] >= minimum for name, minimum in needed.items())


def test_the_tensorflow_job_has_servers_without_gpu():
    objects = list(yaml.safe_load_all((ROOT / "examples" / "gangs" / "tensorflow.yaml").read_text()))
    templates = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]
        for manifest in objects
        if "template" in manifest.get("spec", {})
    }
    assert request.parse(templates["tf-ps"]) is None
    assert request.parse(templates["tf-worker"]).containers[0].whole
    assert gangs.membership(templates["tf-ps"]) == gangs.membership(templates["tf-worker"])


def test_a_node_is_drained_also_of_pods_with_the_share_agent():
    """The agent's volume is an emptyDir: without the option kubectl drains nothing."""
    drains = [drain for page in DOCS for drain in re.findall(r"kubectl drain [^`\n]+", page.read_text())]
    assert drains
    assert [drain for drain in drains if "--delete-emptydir-data" not in drain] == []


def test_the_readme_says_which_pods_without_gpu_cardwise_can_refuse():
    """policies.cardwise.dev refuse a plain pod that sets the variable that opens all cards."""
    (line,) = [line for line in README.splitlines() if line.startswith("- **Out of the way.**")]
    assert "NVIDIA_VISIBLE_DEVICES" in line
    assert "gangs" in line


def test_who_uninstalls_is_told_of_the_pods_that_stay_gated():
    """Nothing takes a gang's gate away once the extender is gone; before, the webhook gates what controllers make."""
    command = f"kubectl delete pods -A -l {names.GANG} --field-selector=spec.nodeName=,status.phase=Pending"
    before, separator, _ = (ROOT / "docs" / "upgrade.md").read_text().partition(command)
    assert separator
    assert re.search(r"[Aa]fter(wards| you have uninstalled)", before[-250:])
