"""A function that has nothing to return returns None, never an empty text; and a text has one meaning.

`""` is a text, and mypy cannot see that it means "no problem" to one caller and a name to another. The end of a
sentence is a text that may be empty: the name of its function ends in `_suffix`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("cardwise", "extender", "webhook", "deviceplugin", "mps")
# Functions that may return "", with the reason.
EMPTY = {
    ("cardwise/cli/doctor/exposure.py", "_termination_message"): "a container may end with an empty message",
    ("cardwise/devices/sysfs.py", "_read_text"): "a file of sysfs that cannot be read counts as an empty one",
    ("cardwise/devices/sysfs.py", "_read_link"): "as _read_text",
    ("cardwise/kube/leases/election.py", "_as_text"): "to the API an empty field is an unset one",
    (
        "cardwise/kube/leases/election.py",
        "holder",
    ): "the empty holder of a released Lease is what the API server stores",
    ("cardwise/kube/leases/lease.py", "holder"): "as in election.py",
    (
        "cardwise/runtime/http/httpserver.py",
        "limited_address",
    ): "the key of the queue that all clients with a certificate share",
    ("extender/records/pod.py", "version"): "the API server sets it in each object",
    ("extender/records/pod.py", "created"): "the API server sets it in each object",
    ("webhook/server/app.py", "namespace_of"): "the key of the queue that reviews without a namespace share",
}
# Functions that return a text or something else, with the reason.
UNIONS = {("cardwise/core/placement/nodestate.py", "card_of"): "two kinds of identifiers: the UUID, or the index"}
_DEFAULT_OF = {"next": 1, "get": 1, "pop": 1, "getattr": 2}  # the position of the default among the arguments

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, Function):
                    yield str(path.relative_to(ROOT)), node


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def may_be_empty(node: ast.expr | None, empty_names: frozenset[str] = frozenset()) -> bool:
    """Whether an expression names an empty text as one of its values.

    empty_names: variables to which an empty text is assigned.
    """
    match node:
        case ast.Constant(value=""):
            return True
        case ast.Name(id=name):
            return name in empty_names
        case ast.IfExp(body=body, orelse=orelse):
            return may_be_empty(body, empty_names) or may_be_empty(orelse, empty_names)
        case ast.BoolOp(op=ast.Or(), values=operands):  # an empty text before the last operand is passed over
            return may_be_empty(operands[-1], empty_names)
        case ast.BoolOp(values=operands):
            return any(may_be_empty(operand, empty_names) for operand in operands)
        case ast.Tuple(elts=elements):
            return any(may_be_empty(element, empty_names) for element in elements)
        case ast.Call(func=ast.Name(id="str"), args=[text]):
            return may_be_empty(text, empty_names)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments, keywords=keywords):
            position = _DEFAULT_OF.get(name, len(arguments))
            defaults = [*arguments[position : position + 1], *(k.value for k in keywords if k.arg == "default")]
            return any(may_be_empty(default, empty_names) for default in defaults)
    return False


def assigned_empty(function: Function) -> frozenset[str]:
    """The variables of a function to which an empty text is assigned, and that are not compared with None."""
    names = set()
    for node in own_nodes(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=assigned)
                | ast.AnnAssign(target=ast.Name(id=name), value=assigned)
            ):
                if may_be_empty(assigned):
                    names.add(name)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=sources)):
                for target, source in zip(targets, sources, strict=False):
                    if isinstance(target, ast.Name) and may_be_empty(source):
                        names.add(target.id)
    return frozenset(names)


def returns_empty_text(function: Function) -> bool:
    if function.returns is None or "str" not in ast.unparse(function.returns) or function.name.endswith("_suffix"):
        return False
    if ast.unparse(function.returns) in ("str", "str | None"):
        summary = (ast.get_docstring(function) or "").partition("\n\n")[0]
        if '""' in summary:
            return True
    empty_names = assigned_empty(function)
    returned = [node.value for node in own_nodes(function) if isinstance(node, ast.Return)]
    return any(may_be_empty(expression, empty_names) for expression in returned)


def has_text_union(function: Function) -> bool:
    """Whether the function returns a text or something else than None."""
    members: list[str] = []
    pending = [function.returns] if function.returns is not None else []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            pending += [node.left, node.right]
        else:
            members.append(ast.unparse(node))
    return "str" in members and len(set(members) - {"None"}) > 1


def test_no_function_returns_an_empty_text_for_nothing() -> None:
    offenders = {(path, function.name) for path, function in functions() if returns_empty_text(function)}
    assert offenders - EMPTY.keys() == set(), "return None, or name the end of a sentence ..._suffix"
    assert EMPTY.keys() - offenders == set(), "exceptions that are no longer needed"


def test_no_function_returns_a_text_or_something_else() -> None:
    offenders = {(path, function.name) for path, function in functions() if has_text_union(function)}
    assert offenders == UNIONS.keys(), "return a small frozen result for each outcome"


@pytest.mark.parametrize(
    ("body", "is_empty"),
    [
        ('return ""', True),
        ('return x if x else ""', True),
        ('return x or ""', True),
        ("return x or None", False),
        ('return "" or None', False),
        ('return x and ""', True),
        ('return x.get("a", "")', True),
        ('return x.get("")', False),
        ('return next(iter(x), "")', True),
        ('return max(x, default="")', True),
        ('return str(x or "")', True),
        ('return x, ""', True),
        ('text = ""\n    return text', True),
        ('text = ""\n    return text or None', False),
        ('text: str = ""\n    return text', True),
        ('a, text = 1, ""\n    return text', True),
        ('"""The name; "" if unknown."""\n    return x', True),
        ('"""The name.\n\n    x: "" if unknown.\n    """\n    return x', False),
        ('def inner() -> None:\n        return ""\n    return x', False),
    ],
)
def test_empty_texts_are_found(body: str, is_empty: bool) -> None:
    (function,) = ast.parse(f"def name(x) -> str:\n    {body}\n").body
    assert isinstance(function, ast.FunctionDef)
    assert returns_empty_text(function) is is_empty


@pytest.mark.parametrize(
    ("annotation", "is_union"),
    [("str | None", False), ("str | Refusal | None", True), ("int | str", True), ("list[str] | Refusal", False)],
)
def test_unions_with_a_text_are_found(annotation: str, is_union: bool) -> None:
    (function,) = ast.parse(f"def name() -> {annotation}: ...").body
    assert isinstance(function, ast.FunctionDef)
    assert has_text_union(function) is is_union
