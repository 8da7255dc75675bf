"""Generates the reference pages from code, CRDs and chart when the site is built, so that none is ever stale.

`conf.py` calls `write`. Each page is a function that returns CommonMark.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import yaml

from cardwise.cli.main import cli
from cardwise.core.values.refusals import Refusal
from deviceplugin.__main__ import main as deviceplugin
from docs import metricrows
from extender.__main__ import main as extender
from mps.__main__ import main as mps
from mps.agent.__main__ import USAGE as AGENT
from tests.integration.security.attacks_on_rules import ATTACKS_BY_AIM
from tests.integration.security.writes_of_parts import MAY
from webhook.__main__ import main as webhook

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "cardwise"
_WIDTH = 100


def write(folder: Path) -> None:
    """Write all pages into the folder; pages that did not change are not written."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        target, text = folder / f"{name}.md", page()
        if not target.exists() or target.read_text() != text:  # otherwise Sphinx reads it again
            target.write_text(text)


def commands() -> str:
    """The page with the help of each command of `cardwise`."""
    parts = ["# Commands\n\nFor users and admins. The `--help` of each command of `cardwise`.\n"]
    for names, command in _commands(cli, ("cardwise",)):
        parts.append(f"## {' '.join(names)}\n\n{_help(command, ' '.join(names))}\n")
    return "\n".join(parts)


def settings() -> str:
    """The page with the options of each part."""
    parts = {
        "cardwise-webhook": webhook,
        "cardwise-extender": extender,
        "cardwise-deviceplugin": deviceplugin,
        "cardwise-mps": mps,
    }
    sections = [f"## {name}\n\n{_help(command, name)}\n" for name, command in parts.items()]
    sections.append(f"## cardwise-agent\n\n```text\n{AGENT}```\n")
    intro = "For admins. The chart sets these options, except the agent's. Each part prints them with `--help`."
    return "\n".join([f"# Settings of the parts\n\n{intro}\n", *sections])


def kinds() -> str:
    """The page with the fields of Cardwise's kinds, as in `kubectl explain`."""
    parts = ["# Our objects\n\nFor users and admins. The fields of each kind, as in `kubectl explain`."]
    for path in sorted((CHART / "files" / "crds").glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        (version,) = crd["spec"]["versions"]
        schema, names = version["schema"]["openAPIV3Schema"], crd["spec"]["names"]
        short = "".join(f", short `{name}`" for name in names.get("shortNames", ()))
        parts.append(f"## {names['kind']}")
        parts.append(f"`{crd['spec']['group']}/{version['name']}`, {crd['spec']['scope']}{short}.")
        parts.append(_plain(schema.get("description", "")))
        rows = [row for top in ("spec", "status") if top in schema["properties"] for row in _fields(schema, top, "")]
        parts.append(_table("| field | type | |", rows))
    return "\n\n".join(parts) + "\n"


def values() -> str:
    """The page with the chart's values, their defaults, and their comments in `values.yaml`."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    parts = ["# Values of the chart\n\nFor admins. The values of `helm install --set`; an unknown name is an error."]
    for key, node in yaml.compose(text).value:
        comment = _comment(lines, key.start_mark.line) if isinstance(node, yaml.MappingNode) else ""
        parts += [f"## {key.value}", *([comment] if comment else [])]
        parts.append(_table("| value | default | |", _values(lines, key, node, "")))
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """The page with the metrics of each part, as the code declares them."""
    parts = ["# Metrics of the parts\n\nFor admins. What each part serves at `/metrics`, with its HELP text."]
    for heading, rows in metricrows.rows_by_part(ROOT).items():
        parts.append(f"## {heading}")
        lines = (
            f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {_plain(row.text)} |"
            for row in rows
        )
        parts.append(_table("| name | type | labels | |", lines))
    return "\n\n".join(parts) + "\n"


def attacks() -> str:
    """The page with what the tests try on a real cluster: attacks of tenants, and what each part may write."""
    intro = (
        "For admins. What the tests try on a real cluster: each attempt of a tenant with what refuses it (`node`, "
        "`extender`: the pod may run, or the call is answered, but the tenant gains nothing), then all that the "
        "account of each part may write."
    )
    parts = [f"# Attacks and rights\n\n{intro}"]
    for aim, tried in ATTACKS_BY_AIM.items():
        rows = (f"| {attack.id} | {attack.title} | {attack.refused_by} |" for attack in tried)
        parts += [f"## {aim}", _table("| | tried | refused by |", rows)]
    for part, writes in MAY.items():
        rows = (f"| {write.verb} | {write.subject} | {write.fields} |" for write in writes)
        parts += [f"## What {part} may write", _table("| verb | on | fields |", rows)]
    return "\n\n".join(parts) + "\n"


def policies() -> str:
    """The page with each ValidatingAdmissionPolicy of the chart: why it is there, and its messages."""
    intro = (
        "For admins. What the API server refuses by the chart's ValidatingAdmissionPolicies. In a message `…` stands "
        "for what the chart or the object gives."
    )
    parts = [f"# Policies\n\n{intro}"]
    for path in sorted((CHART / "templates" / "policies").glob("*.yaml")):
        for name, comment, messages in _policies(path.read_text()):
            parts += [f"## {name}.cardwise.dev", comment, "\n".join(f"- {message}" for message in messages)]
    return "\n\n".join(parts) + "\n"


def refusals() -> str:
    """The page with each reason of a node, and what the user may do."""
    intro = (
        "For users. Why a node does not take a pod, in the messages of kube-scheduler and of `cardwise explain`, which "
        "also shows the numbers."
    )
    rows = (f"| `{refusal.text}` | {refusal.remedy} |" for refusal in Refusal)
    return f"# Reasons of nodes\n\n{intro}\n\n{_table('| reason | what to do |', rows)}\n"


def packages() -> str:
    """The page with the docstring of each package of the product: its modules, what comes in, what goes out."""
    parts = ["# Packages\n\nFor engineers. What each package and each of its modules is for, as its docstring says."]
    for part in ("cardwise", "webhook", "extender", "deviceplugin", "mps"):
        for path in sorted((ROOT / part).rglob("__init__.py")):
            name = ".".join(path.parent.relative_to(ROOT).parts)
            parts.append(f"## {name}\n\n```text\n{ast.get_docstring(ast.parse(path.read_text()))}\n```")
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "kinds": kinds,
    "values": values,
    "metrics": metrics,
    "attacks": attacks,
    "policies": policies,
    "refusals": refusals,
    "packages": packages,
}


def _table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|---|" + "---|" * (head.count("|") - 2), *rows])


def _commands(command: click.Command, names: Sequence[str]) -> Iterator[tuple[Sequence[str], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                yield from _commands(inner, (*names, name))


def _help(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, terminal_width=_WIDTH, max_content_width=_WIDTH)
    return f"```text\n{command.get_help(context)}\n```"


def _fields(schema: dict[str, Any], name: str, before: str) -> Iterator[str]:
    field = schema["properties"][name]
    path = f"{before}.{name}".lstrip(".")
    inner, kind = field, field.get("type", "integer or string" if field.get("x-kubernetes-int-or-string") else "any")
    while inner.get("type") == "array":
        inner, path = inner["items"], f"{path}[]"
    needed = ", required" if name in schema.get("required", ()) else ""
    description = " ".join(filter(None, (_plain(field.get("description", "")), _one_of(field))))
    yield f"| `{path}` | {kind}{needed} | {description} |"
    for inner_name in inner.get("properties", {}):
        yield from _fields(inner, inner_name, path)


def _one_of(field: dict[str, Any]) -> str:
    return f"One of {', '.join(f'`{choice}`' for choice in field['enum'])}." if "enum" in field else ""


def _values(lines: Sequence[str], key: yaml.Node, node: yaml.Node, before: str) -> Iterator[str]:
    path = f"{before}.{key.value}".lstrip(".")
    if isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
        for inner_key, inner in node.value:
            yield from _values(lines, inner_key, inner, path)
        return
    default = yaml.safe_load(yaml.serialize(node))
    shown = yaml.safe_dump(default, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    yield f"| `{path}` | `{shown}` | {_comment(lines, key.start_mark.line)} |"


def _comment(lines: Sequence[str], at: int) -> str:
    """The comment above a line, and at its end."""
    above: list[str] = []
    for line in reversed(lines[:at]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    behind = re.search(r"\s#\s(.*)$", lines[at])
    return _plain(" ".join([*above, *([behind[1]] if behind else [])]))


def _policies(template: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, comment and messages of each policy of a template. Its comment is the last one at the margin."""
    starts = list(re.finditer(r'^{{-? include "cardwise.policy" \(dict .*"name" "(\w+)"', template, re.MULTILINE))
    ends = [*(start.start() for start in starts[1:]), len(template)]
    for start, end in zip(starts, ends, strict=True):
        before = template[: start.start()].splitlines()
        blocks = [
            list(lines) for is_comment, lines in groupby(before, lambda line: line.startswith("# ")) if is_comment
        ]
        comment = _plain(" ".join(line[2:] for line in blocks[-1]))
        text = template[start.end() : end]
        message_lines = re.findall(r"^ +message: (?:>-\n((?: {8}.+\n)+)|(.+))", text, re.MULTILINE)
        messages = [
            _plain(re.sub(r"{{.*?}}", "…", (folded or line).strip().strip('"'))) for folded, line in message_lines
        ]
        yield start[1], comment, messages


def _plain(text: str) -> str:
    """The text on one line, with the special characters of CommonMark and of tables escaped."""
    return re.sub(r"([|<>*\[\]])", r"\\\1", " ".join(text.split()))
