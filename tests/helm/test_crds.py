"""The CustomResourceDefinitions: what the contracts say, told to `kubectl explain`, and read alike by our parsers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.gangs import gangs
from cardwise.core.values import amounts
from tests.helm.rendering import Object, Render, conditions, one

DOCS = Path(__file__).parents[2] / "docs"
PLURALS = ("extendedresources", "resourceclasses", "gpuquotas", "podgroups")
# The API server describes these itself.
STANDARD = {"apiVersion", "kind", "metadata"}


def spec(render: Render, plural: str) -> Object:
    found: Object = one(render(), "CustomResourceDefinition", f"{plural}.{names.GROUP}")["spec"]
    return found


def schema(render: Render, plural: str) -> Object:
    (version,) = spec(render, plural)["versions"]
    found: Object = version["schema"]["openAPIV3Schema"]
    return found


def nodes(part: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Each part of a schema that has a place of its own, with its path."""
    yield path, part
    for name, value in part.get("properties", {}).items():
        if path or name not in STANDARD:
            yield from nodes(value, f"{path}.{name}")
    if "items" in part:
        yield from nodes(part["items"], f"{path}[]")
    if "additionalProperties" in part:
        yield from nodes(part["additionalProperties"], f"{path}{{}}")


def columns(render: Render, plural: str, *, wide: bool) -> dict[str, str]:
    """Header to jsonPath; without `wide` those that `kubectl get` shows."""
    (version,) = spec(render, plural)["versions"]
    return {
        column["name"]: column["jsonPath"]
        for column in version["additionalPrinterColumns"]
        if wide or not column.get("priority")
    }


def rules(part: Object) -> str:
    return " ".join(f"{rule['rule']} {rule['message']}" for rule in part["x-kubernetes-validations"])


@pytest.mark.parametrize(
    ("plural", "kind", "scope", "short"),
    [
        ("extendedresources", "ExtendedResource", "Cluster", "er"),
        ("resourceclasses", "ResourceClass", "Cluster", "rclass"),
        ("gpuquotas", "GPUQuota", "Namespaced", "gq"),
        ("podgroups", "PodGroup", "Namespaced", "gang"),
    ],
)
def test_they_are_named_as_the_contract_says(render: Render, plural: str, kind: str, scope: str, short: str) -> None:
    crd = spec(render, plural)
    assert (crd["group"], crd["scope"], crd["names"]["kind"]) == (names.GROUP, scope, kind)
    assert crd["names"]["shortNames"][0] == short
    assert crd["names"]["categories"] == ["cardwise"]
    (version,) = crd["versions"]
    assert version["name"] == names.VERSION
    assert version["served"]
    assert version["storage"]
    assert "status" in version["subresources"]


def test_what_the_docs_get_kubectl_knows(render: Render) -> None:
    known = {"pods", "nodes", "lease", "clusterrole", "crd", "resourcequotas", "limitranges"} | {"workloads"}  # Kueue's
    for plural in PLURALS:
        called = spec(render, plural)["names"]
        known |= {called["plural"], called["singular"], *called["shortNames"]}
    told = {
        (page.name, name)
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"kubectl get ([a-z]+)(?![a-z/])", page.read_text())
    }
    assert told
    assert [(page, name) for page, name in sorted(told) if name not in known] == []


@pytest.mark.parametrize("plural", PLURALS)
def test_kubectl_explain_has_a_word_on_everything(render: Render, plural: str) -> None:
    found = dict(nodes(schema(render, plural)))
    assert {"", ".spec", ".status"} <= set(found)
    silent = [path for path, part in found.items() if not part.get("description", "").endswith(".")]
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
    for name, path in columns(render, plural, wide=True).items():
        assert path in paths or path.startswith(".metadata."), name


def test_the_card_is_what_the_contract_says(render: Render) -> None:
    parts = schema(render, "extendedresources")["properties"]
    assert set(parts["spec"]["properties"]) == {
        "node", "kind", "index", "uuid", "model", "memoryMiB", "properties", "unschedulable", "cordon",
    }  # fmt: skip
    status = parts["status"]["properties"]
    assert set(status) == {
        "health", "reason", "cardAccess", "held", "mps", "allocated", "freeMiB", "classes", "terminating",
    }  # fmt: skip
    for said in (status["held"], status["terminating"]):
        shown = said["items"]["properties"]
        assert set(shown) == {"podUID", "namespace", "name", "memoryMiB", "corePercent", "container", "whole"}
        assert shown["podUID"]["pattern"] == names.POD_UID
        # Several entries of one pod: a key that is not unique would be refused.
        assert said["x-kubernetes-list-type"] == "atomic"
    assert set(status["allocated"]["properties"]) == {"memoryMiB", "corePercent", "shares", "whole", "pods"}
    # The device plugin and the extender each write a part of the status: nothing of it may be compulsory.
    assert "required" not in parts["status"]
    assert "required" not in status["allocated"]
    shown = list(columns(render, "extendedresources", wide=False))
    assert shown == ["Node", "Kind", "Index", "Model", "Memory", "Used-MiB", "Free-MiB", "Health", "Cordoned", "Age"]
    assert {"UUID", "Classes"} <= set(columns(render, "extendedresources", wide=True))


def test_the_class_is_what_the_contract_says(render: Render) -> None:
    parts = schema(render, "resourceclasses")["properties"]
    wanted = parts["spec"]["properties"]
    assert set(wanted) == {"selector", "resourceSelector", "labelSelector", "share", "priority"}
    for name in ("selector", "resourceSelector", "labelSelector"):
        # A map or a list: a type would refuse one of them.
        assert wanted[name]["x-kubernetes-preserve-unknown-fields"]
        assert "type" not in wanted[name]
    assert set(wanted["share"]["properties"]) == {"memoryMiB", "corePercent"}
    core = wanted["share"]["properties"]["corePercent"]
    assert (core["minimum"], core["maximum"]) == (1, 100)
    assert wanted["priority"]["default"] == 0
    status = {"cards", "healthyCards", "nodes", "memoryMiB", "usedMiB", "freeMiB", "problem", "conditions"}
    assert set(parts["status"]["properties"]) == status
    shown = columns(render, "resourceclasses", wide=False)
    assert list(shown) == ["Cards", "Free-MiB", "Used-MiB", "Share", "Priority", "Auto", "Age"]
    assert shown["Auto"].replace("\\", "") == f".metadata.labels.{names.AUTO_LABEL}"


def test_the_quota_is_what_the_contract_says(render: Render) -> None:
    parts = schema(render, "gpuquotas")["properties"]
    hard = parts["spec"]["properties"]["hard"]
    assert (hard["minItems"], hard["maxItems"]) == (1, 64)
    assert set(hard["items"]["properties"]) == {"class", "model", "shares", "memoryMiB", "cards"}
    exceed = parts["spec"]["properties"]["onExceed"]
    assert (exceed["enum"], exceed["default"]) == (["Wait", "Refuse"], "Wait")
    status = parts["status"]["properties"]
    assert set(status) == {"used", "summary", "conditions"}
    assert set(status["used"]["items"]["properties"]) == {"class", "model", "shares", "memoryMiB", "cards", "hard"}
    assert status["used"]["maxItems"] == hard["maxItems"]
    assert list(columns(render, "gpuquotas", wide=False)) == ["Summary", "Age"]


def test_the_group_is_what_the_contract_says(render: Render) -> None:
    parts = schema(render, "podgroups")["properties"]
    wanted = parts["spec"]["properties"]
    assert set(wanted) == {"minMember", "timeoutSeconds", "priority"}
    assert (wanted["minMember"]["minimum"], wanted["minMember"]["maximum"]) == (1, gangs.MOST_MEMBERS)
    status = parts["status"]["properties"]
    said = {"phase", "reason", "minMember", "members", "bound", "waitingFor", "held", "since", "conditions"}
    assert set(status) == said
    assert status["phase"]["enum"] == [str(phase) for phase in gangs.Phase]
    assert status["held"]["maxItems"] == gangs.MOST_MEMBERS
    shown = list(columns(render, "podgroups", wide=False))
    assert shown == ["Phase", "Min-Member", "Members", "Bound", "Reason", "Age"]


def test_a_group_has_a_name_that_a_label_takes(render: Render) -> None:
    (name,) = schema(render, "podgroups")["x-kubernetes-validations"]
    pattern = re.search(r"matches\('([^']*)'\)", name["rule"])
    assert pattern
    assert "size() <= 63" in name["rule"]
    assert re.match(pattern[1], "slurp-2")
    assert not re.match(pattern[1], "a.b")


def test_a_quota_that_says_nothing_or_two_things_is_refused(render: Render) -> None:
    hard = schema(render, "gpuquotas")["properties"]["spec"]["properties"]["hard"]
    assert "two entries select the same cards" in rules(hard)
    entry = rules(hard["items"])
    assert "!(has(self.class) && has(self.model))" in entry
    assert "has(self.shares) || has(self.memoryMiB) || has(self.cards)" in entry


def test_a_class_has_no_name_that_means_something_else(render: Render) -> None:
    length, meaning = schema(render, "resourceclasses")["x-kubernetes-validations"]
    assert "size() <= 48" in length["rule"]
    refused = set(re.findall(r"'([^']*)'", meaning["rule"]))
    assert refused >= {resource.removeprefix(names.CLASS_PREFIX) for resource in names.OWN_RESOURCES}
    # What is no bare name to the webhook could never be asked for.
    entries = one(render(), "MutatingWebhookConfiguration", names.WEBHOOK_CONFIGURATION)["webhooks"]
    (quotas,) = (hook for hook in entries if hook["name"] == "quotas.cardwise.dev")
    bare = conditions(quotas)["names-what-we-rewrite"]
    bare = bare[bare.index("!k.contains('/')") : bare.index("object.spec.limits.exists")]
    assert refused >= set(re.findall(r"'([^']*)'", bare)) - {"/"}


@pytest.mark.parametrize("amount", ["8138", "8Gi", "8GiB", "64Ti", "0.5Gi", ".5Gi", "8k", "1", "0100"])
@pytest.mark.parametrize("plural", ["resourceclasses", "gpuquotas"])
def test_amounts_are_read_as_the_schema_takes_them(render: Render, plural: str, amount: str) -> None:
    assert re.fullmatch(_amount_pattern(render, plural), amount)
    assert amounts.memory(amount) >= 1


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
