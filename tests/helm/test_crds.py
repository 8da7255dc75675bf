"""The CustomResourceDefinitions: what the contracts say, told to `kubectl explain`, and read alike by our parsers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.values import amounts
from cardwise.core.values.decoded import Json
from tests.helm.rendering import Render, get_object

DOCS = Path(__file__).parents[2] / "docs"
PLURALS = ("extendedresources", "resourceclasses", "gpuquotas", "podgroups")
# The API server describes these itself.
STANDARD = {"apiVersion", "kind", "metadata"}


def spec(render: Render, plural: str) -> Json:
    spec_of_kind: Json = get_object(render(), "CustomResourceDefinition", f"{plural}.{names.GROUP}")["spec"]
    return spec_of_kind


def schema(render: Render, plural: str) -> Json:
    (version,) = spec(render, plural)["versions"]
    schema_of_version: Json = version["schema"]["openAPIV3Schema"]
    return schema_of_version


def nodes(part: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Each part of a schema that has a place of its own, with its path."""
    yield path, part
    for name, subpart in part.get("properties", {}).items():
        if path or name not in STANDARD:
            yield from nodes(subpart, f"{path}.{name}")
    if "items" in part:
        yield from nodes(part["items"], f"{path}[]")
    if "additionalProperties" in part:
        yield from nodes(part["additionalProperties"], f"{path}{{}}")


def test_what_the_docs_get_kubectl_knows(render: Render) -> None:
    known = {"pods", "nodes", "lease", "clusterrole", "crd", "resourcequotas", "limitranges", "deploy", "events"} | {
        "workloads"
    }  # Kueue's
    for plural in PLURALS:
        called = spec(render, plural)["names"]
        known |= {called["plural"], called["singular"], *called["shortNames"]}
    resources = {
        (page.name, name)
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"kubectl get ([a-z]+)(?![a-z/])", page.read_text())
    }
    assert resources
    assert [(page, name) for page, name in sorted(resources) if name not in known] == []


@pytest.mark.parametrize("plural", PLURALS)
def test_kubectl_explain_has_a_word_on_everything(render: Render, plural: str) -> None:
    parts_by_path = dict(nodes(schema(render, plural)))
    assert {"", ".spec", ".status"} <= set(parts_by_path)
    silent = [path for path, part in parts_by_path.items() if not part.get("description", "").endswith(".")]
    assert not silent


@pytest.mark.parametrize("plural", PLURALS)
def test_what_the_api_server_computes_on_is_bounded(render: Render, plural: str) -> None:
    for path, part in nodes(schema(render, plural)):
        if part.get("type") == "array":
            assert part.get("maxItems"), f"{path}: CEL and etcd need an end"
        if part.get("type") == "string" and part.get("format") != "date-time":
            assert part.get("maxLength") or part.get("enum"), f"{path}: CEL and etcd need an end"


@pytest.mark.parametrize("plural", PLURALS)
def test_every_column_shows_a_field_that_there_is(render: Render, plural: str) -> None:
    paths = {path for path, _ in nodes(schema(render, plural))}
    (version,) = spec(render, plural)["versions"]
    for column in version["additionalPrinterColumns"]:
        assert column["jsonPath"] in paths or column["jsonPath"].startswith(".metadata."), column["name"]


def test_what_reports_and_gangs_may_say_is_what_the_extender_takes(render: Render) -> None:
    status = schema(render, "extendedresources")["properties"]["status"]
    # The device plugin and the extender each write a part of it: nothing of it may be compulsory.
    assert "required" not in status
    assert "required" not in status["properties"]["allocated"]
    for list_field in ("reported", "terminating"):
        assert status["properties"][list_field]["items"]["properties"]["podUID"]["pattern"] == names.POD_UID
        # Several entries of one pod: a key that is not unique would be refused.
        assert status["properties"][list_field]["x-kubernetes-list-type"] == "atomic"
    group = schema(render, "podgroups")["properties"]
    assert group["spec"]["properties"]["minMember"]["maximum"] == gangs.MAX_MEMBERS
    assert group["status"]["properties"]["reserved"]["maxItems"] == gangs.MAX_MEMBERS
    assert group["status"]["properties"]["phase"]["enum"] == [str(phase) for phase in gangs.GangPhase]


@pytest.mark.parametrize("amount", ["8138", "8Gi", "8GiB", "64Ti", "0.5Gi", ".5Gi", "8k", "1", "0100"])
@pytest.mark.parametrize("plural", ["resourceclasses", "gpuquotas"])
def test_amounts_are_read_as_the_schema_takes_them(render: Render, plural: str, amount: str) -> None:
    assert re.fullmatch(_amount_pattern(render, plural), amount)
    assert amounts.parse_memory_mib(amount) >= 1


@pytest.mark.parametrize("amount", ["", "a lot", "-1", "8 Gi", "8gb", "Gi", "64X", "8B"])
@pytest.mark.parametrize("plural", ["resourceclasses", "gpuquotas"])
def test_what_is_no_amount_is_refused(render: Render, plural: str, amount: str) -> None:
    assert not re.fullmatch(_amount_pattern(render, plural), amount)


@pytest.mark.parametrize("amount", ["0", "0Gi", "0.0", "00", ".0Mi"])
def test_nothing_is_a_limit_but_no_share(render: Render, amount: str) -> None:
    assert re.fullmatch(_amount_pattern(render, "gpuquotas"), amount)
    assert not re.fullmatch(_amount_pattern(render, "resourceclasses"), amount)


def _amount_pattern(render: Render, plural: str) -> str:
    parts = dict(nodes(schema(render, plural)))
    part = parts[".spec.share.memoryMiB" if plural == "resourceclasses" else ".spec.hard[].memoryMiB"]
    assert part["x-kubernetes-int-or-string"]
    assert part["minimum"] == (1 if plural == "resourceclasses" else 0)
    pattern: str = part["pattern"]
    return pattern
