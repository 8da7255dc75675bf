"""The scripts that the chart runs in its hooks, as modules."""

import importlib.util
from types import ModuleType

from tests.helm.rendering import CHART


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"chart_{name}", CHART / "files" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
