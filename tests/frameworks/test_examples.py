"""The programs of examples/frameworks as they stand in the pods, under real frameworks, with and without the hook."""

from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


@pytest.mark.parametrize("switch", ["off", ""])
@pytest.mark.parametrize("name", ["tensorflow", "pytorch", "jax"])
def test_it_takes_its_fraction_from_the_environment(container, name, switch):
    (main,) = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["spec"]["containers"]
    assert main["command"] == ["python", "-c"]
    done = container.run(main["args"][0], CARDWISE_FRAMEWORKS=switch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["sum of ones: 1000.0", "fraction: 0.5"]
