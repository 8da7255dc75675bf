"""The public seams are named in the docstrings of their packages, each with an example that runs."""

import doctest
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

SEAMS = {
    "Clock": "cardwise.clock",
    "Devices": "cardwise.devices",
    "Gpus": "cardwise.gpus",
    "Leadership": "extender.leadership",
    "Ledger": "cardwise.core.placement",
    "Policy": "cardwise.core.api.policies",
    "Rule": "webhook.pods",
}


@pytest.mark.parametrize("seam", SEAMS)
def test_a_public_seam_has_an_example_that_runs(seam: str, tmp_path: Path):
    module = importlib.import_module(SEAMS[seam])
    text = module.__doc__ or ""
    assert f"Public seam: `{seam}`" in text
    variables = {"folder": tmp_path, "context": SimpleNamespace(namespace="research")}
    example = doctest.DocTestParser().get_doctest(text, vars(module) | variables, seam, module.__file__, 0)
    assert 2 <= sum(not line.source.startswith("from ") for line in example.examples) <= 7
    assert example.examples[-1].want, "the example shows its result"
    output: list[str] = []
    assert doctest.DocTestRunner().run(example, out=output.append).failed == 0, "".join(output)
