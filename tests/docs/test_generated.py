"""The reference pages that are made of code, CRDs and chart: nothing that a reader may ask for is missing in them."""

import re
import tomllib

import click
import pytest
import yaml

from cardwise.cli.main import cli
from docs import generated
from tests.integration.security.attacks_on_rules import ATTACKS_BY_AIM
from tests.integration.security.writes_of_parts import MAY


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_every_command_is_there_with_its_options(name):
    section = generated.commands().partition(f"## cardwise {name}\n")[2].partition("\n## cardwise ")[0]
    command = cli.get_command(click.Context(cli), name)
    options = [option for param in command.params if isinstance(param, click.Option) for option in param.opts]
    if not isinstance(command, click.Group):
        assert [option for option in options if option not in section] == []
    assert section.startswith("\n```text\nUsage: ")


def test_every_program_that_the_package_brings_is_there():
    scripts = tomllib.loads((generated.ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    pages = generated.commands() + generated.settings()
    assert [
        name for name in scripts if name.startswith("cardwise") and f"## {name}\n\n```text\nUsage: {name} " not in pages
    ] == []


def test_every_value_of_the_chart_is_there_with_its_default():
    page = generated.values()

    def missing(defaults, prefix=""):
        for key, default in defaults.items():
            path = f"{prefix}{key}"
            if f"| `{path}` |" not in page:
                yield from missing(default, f"{path}.") if isinstance(default, dict) and default else [path]

    defaults = yaml.safe_load((generated.CHART / "values.yaml").read_text())
    assert list(missing(defaults)) == []


def test_something_is_said_of_every_value_of_the_chart():
    rows = [row for row in generated.values().splitlines() if row.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_kind_is_there_and_each_field_says_what_it_is():
    page = generated.kinds()
    assert {"ExtendedResource", "GPUQuota", "PodGroup", "ResourceClass"} <= {
        line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")
    }
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith(" |  |")] == []


def test_every_attack_and_every_write_is_there():
    page = generated.attacks()
    attacks = [attack for tried in ATTACKS_BY_AIM.values() for attack in tried]
    assert re.findall(r"^\| (T\d+) \| .+ \| .+ \|$", page, re.MULTILINE) == [attack.id for attack in attacks]
    assert [
        write for writes in MAY.values() for write in writes if f"| {write.verb} | {write.subject} |" not in page
    ] == []


def test_every_policy_is_there_with_its_reason_and_its_messages():
    page = generated.policies()
    templates = [path.read_text() for path in (generated.CHART / "templates" / "policies").glob("*.yaml")]
    names = {name for text in templates for name in re.findall(r'"cardwise.policy" \(dict .*"name" "(\w+)"', text)}
    sections = dict(re.findall(r"^## (\w+)\.cardwise\.dev\n\n(.*?)(?=\n\n## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == names
    assert [name for name, text in sections.items() if not re.match(r"[A-Z].+\.\n\n- ", text)] == []
    assert sum(len(re.findall(r"^ +message: ", text, re.MULTILINE)) for text in templates) == page.count("\n- ")


def test_every_package_is_there_with_its_modules():
    page = generated.packages()
    packages = set(re.findall(r"^## ([\w.]+)$", page, re.MULTILINE))
    assert {
        "cardwise",
        "cardwise.core.placement.scored",
        "deviceplugin",
        "extender.gangs",
        "mps",
        "webhook",
    } <= packages
    assert page.count("```") == 2 * len(packages)


def test_pages_that_have_not_changed_are_not_written_again(tmp_path):
    generated.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    generated.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert {path.stem for path in before} == set(generated.PAGES)
