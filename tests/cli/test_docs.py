"""What the docs say and the examples show: commands that exist, objects that can be read, every refusal explained."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from cardwise.cli.main import cli
from cardwise.core import classes, quotas
from cardwise.core.selectors import _OPERATORS
from cardwise.core.verdict import Refusal

ROOT = Path(__file__).parents[2]
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples" / "types").glob("*.yaml"))
REFUSALS = (ROOT / "docs" / "reference" / "refusals.md").read_text()
TYPES = (ROOT / "docs" / "reference" / "types.md").read_text()


def commands() -> set[str]:
    """Every `cardwise ...` of a console block or in backquotes."""
    found = set()
    for page in DOCS:
        text = page.read_text()
        blocks = "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
        found |= {line.partition("#")[0].strip() for line in blocks.splitlines() if line.startswith("cardwise ")}
        found |= set(re.findall(r"`(cardwise [^`]*)`", text))
    return found


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_in_the_docs_exists(command):
    arguments = shlex.split(command)[1:]
    at: click.Command = cli
    context = click.Context(cli)
    while isinstance(at, click.Group):
        name, *arguments = arguments
        found = at.get_command(context, name)
        assert found is not None, f"{command}: there is no command {name}"
        at = found
    with click.Context(at) as inner:
        at.parse_args(inner, arguments)  # raises where an option or an argument is unknown


def test_the_docs_have_commands():
    assert {"cardwise classes", "cardwise quota -A"} <= commands()


@pytest.mark.parametrize("path", sorted(re.findall(r"examples/[\w/.-]+\.yaml", "".join(p.read_text() for p in DOCS))))
def test_every_example_that_the_docs_name_is_there(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_read(path):
    (obj,) = yaml.safe_load_all(path.read_text())
    if obj["kind"] == "ResourceClass":
        assert classes.parse(obj).name == obj["metadata"]["name"]
    elif obj["kind"] == "GPUQuota":
        assert quotas.parse(obj).entries
    else:
        assert obj["apiVersion"] == "v1"
        assert path.read_text().startswith("# ")


@pytest.mark.parametrize("refusal", Refusal)
def test_every_reason_of_the_scheduler_is_explained(refusal):
    assert f"| `{refusal.text}` |" in REFUSALS


def test_every_operator_is_explained():
    table = TYPES.partition("| operator |")[2]
    assert [operator for operator in _OPERATORS if f"`{operator}`" not in table] == []


def test_every_label_that_all_cards_have_is_explained():
    seen = classes.labels(node="n", index=0, uuid="u", model="m", memory=1, properties={}, own={})
    table = TYPES.partition("## Labels of a card")[2].partition("## ")[0]
    assert [key for key in seen if f"`{key}`" not in table] == []


@pytest.mark.parametrize("crd", ["resourceclasses", "gpuquotas", "extendedresources"])
def test_every_field_of_the_kinds_is_explained(crd):
    obj = yaml.safe_load((ROOT / "helm" / "cardwise" / "crds" / f"{crd}.yaml").read_text())
    (version,) = obj["spec"]["versions"]
    section = TYPES.partition(f"## {obj['spec']['names']['kind']} ")[2].partition("\n## ")[0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    fields = [name for part in ("spec", "status") for name in properties[part]["properties"]]
    assert [name for name in fields if not re.search(rf"`([\w.\[\]]+\.)?{name}[\[\]]*(\.\w+)?`", section)] == []
