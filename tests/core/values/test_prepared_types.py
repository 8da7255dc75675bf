"""Types of `msgspec.convert` are prepared when modules are imported: two threads that build them may crash."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAMS = ("extender", "webhook", "deviceplugin", "mps", "cardwise/core", "cardwise/kube", "cardwise/runtime")


def calls_of(name: str) -> set[tuple[str, str]]:
    """The files that call a function of this name, with the last names of its arguments."""
    found_calls = set()
    for part in PROGRAMS:
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                    arguments = [ast.unparse(argument).rpartition(".")[2] for argument in node.args]
                    found_calls |= {(str(path.relative_to(ROOT)), argument) for argument in arguments}
    return found_calls


def test_each_type_that_threads_convert_to_is_prepared_in_the_module_that_converts():
    prepared = calls_of("prepare_types")
    converting = {
        (path, argument)
        for path, argument in calls_of("convert")
        if "msgspec.convert(" in (ROOT / path).read_text() and argument.lstrip("_")[:1].isupper()
    }
    assert converting
    assert converting - prepared == set()
