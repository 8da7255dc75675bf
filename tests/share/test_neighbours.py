"""examples/isolation, and what the page on MPS in pods has its reader run in these pods: as far as it needs no GPU."""

import re
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import mps, names
from cardwise.core.values.quantity import MiB
from tests.webhook.reviews import Known
from tests.webhook.sharing import admitted, env
from webhook.cluster.cards import CardSizes

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "isolation" / "two-tenants.yaml"
PROGRAM = (ROOT / "tests" / "realcard" / "tenant.py").read_text()
PAGE = (ROOT / "docs" / "reference" / "mps-pods.md").read_text().partition("## What a neighbour can do")[2]
H200 = Known(known_cards=CardSizes(largest=MiB(143_771), max_cards=1), scopes=frozenset({"card"}))


@pytest.mark.parametrize("annotations", [{}, {names.ISOLATION: "none"}], ids=["default", "none"])
@pytest.mark.parametrize("pod", list(yaml.safe_load_all(EXAMPLE.read_text())), ids=lambda pod: pod["metadata"]["name"])
def test_both_tenants_are_admitted_with_the_limit_that_the_page_removes(pod, annotations):
    metadata = pod["metadata"] | {"annotations": pod["metadata"]["annotations"] | annotations, "namespace": "default"}
    after, warnings = admitted(pod | {"metadata": metadata}, H200)
    assert warnings == ()
    variables = env(after["spec"]["containers"][0])
    assert variables.get(mps.LIMIT_ENV, {}).get("value") == (None if annotations else "0=4096M")
    assert f"env -u {mps.LIMIT_ENV}`" in PAGE
    assert f"env {mps.PIPE_ENV}=/none`" in PAGE


def test_the_page_names_programs_that_a_tenant_has():
    programs = set(re.findall(r'case "(\w+)":', PROGRAM))
    commands = re.findall(r"tenant\.py (\w+)", PAGE) + re.findall(r"`(\w+)(?: \d+)*`[, ]", PAGE)
    assert {"busy", "fill", "work", "crash"} <= set(commands) & programs
    assert set(re.findall(r"tenant\.py (\w+)", PAGE)) <= programs
