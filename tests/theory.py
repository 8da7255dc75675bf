"""The theory of operation at the top of a module, for the tests that compute its example."""

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
HEADING: Final = "Theory of operation"


def theory_of(module: str) -> str:
    """The module's docstring from its theory of operation on, in one line. `module`: its dotted name."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return theory_in(path.read_text())


def theory_in(source: str) -> str:
    """As `theory_of`, "" if the module has none."""
    _, heading, theory = " ".join((ast.get_docstring(ast.parse(source)) or "").split()).partition(HEADING)
    return heading + theory
