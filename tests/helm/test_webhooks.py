"""Which objects the API server sends to the webhook. That the CEL is right is tried on the real one."""

import re
from copy import deepcopy

import pytest

from cardwise.cli.cluster import installation
from cardwise.core.api import lookalikes, names
from cardwise.core.values.decoded import Json
from tests.helm.rendering import OFF, OTHER, Objects, Render, conditions, get_object, text
from webhook.cluster import namespaces, view
from webhook.server import app

KINDS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
TEMPLATES = {  # where the template's pod spec is
    "workloads.cardwise.dev": "object.?spec.?template.?spec",
    "cronjobs.cardwise.dev": "object.?spec.?jobTemplate.?spec.?template.?spec",
    "podtemplates.cardwise.dev": "object.?template.?spec",
}
OF_OTHER_UNIT = "-of-other-unit"  # of entries for namespaces whose label differs from webhook.gpuMemUnit
HURRIED = {
    "bindings.cardwise.dev",
    *(f"{name}.cardwise.dev" for name in ("advice", "cronadvice", "otheradvice", "foreign", "quotaadvice")),
}
IGNORED = {*HURRIED, "namespaces.cardwise.dev", "gangs.cardwise.dev", "crongangs.cardwise.dev"}


def hooks(objects: Objects, kind: str) -> dict[str, Json]:
    """The entries of all our configurations of the kind, which have different names."""
    webhooks = [hook for manifest in objects if manifest["kind"] == kind for hook in manifest["webhooks"]]
    assert len({hook["name"] for hook in webhooks}) == len(webhooks)
    return {hook["name"]: hook for hook in webhooks}


def rules_of(hook: Json) -> set[str]:
    """`group/resource` and operations that the entry is for."""
    return {
        f"{operation} {group or 'core'}/{resource}"
        for rule in hook["rules"]
        for operation in rule["operations"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def resources_by_path(objects: Objects) -> dict[str, set[str]]:
    """The resources that the API server sends to each path, without the path's unit and the resources' groups."""
    sent: dict[str, set[str]] = {}
    for hook in (hook for kind in KINDS for hook in hooks(objects, kind).values()):
        path = hook["clientConfig"]["service"]["path"].removesuffix("/gib")
        sent.setdefault(path, set()).update(resource for rule in hook["rules"] for resource in rule["resources"])
    return sent


@pytest.mark.parametrize("sets", [(), OTHER])
def test_each_path_takes_what_the_api_server_sends_there(render: Render, sets: tuple[str, ...]) -> None:
    assert resources_by_path(render(*sets, "webhook.workloadKinds=null")) == app.RESOURCES_BY_PATH
    kinds = resources_by_path(render(*sets))["/advise"] - app.RESOURCES_BY_PATH["/advise"]
    assert len(kinds) > 10
    assert all(app.accepts_resource("/advise", kind) for kind in kinds)


def writes(*resources: str) -> set[str]:
    return {f"{operation} {resource}" for operation in ("CREATE", "UPDATE") for resource in resources}


def lists(expression: str) -> list[set[str]]:
    """The CEL lists of texts in an expression."""
    return [set(re.findall(r"'([^']*)'", listing)) for listing in re.findall(r"\[('[^]]*')]", expression)]


def test_explain_reads_from_the_configuration_which_namespaces_are_exempt(render: Render) -> None:
    for sets, exempt in (((), {"kube-system", names.NAMESPACE}), (OTHER, {"quiet", "gpu"})):
        configuration = get_object(render(*sets), "MutatingWebhookConfiguration", names.WEBHOOK_CONFIGURATION)
        assert installation.exempt_namespaces(configuration) == exempt


@pytest.mark.parametrize("kind", KINDS)
def test_what_users_ask_for_brings_a_pod_to_the_webhook(render: Render, kind: str) -> None:
    condition = conditions(hooks(render(), kind)["pods.cardwise.dev"])["asks-for-a-share"]
    for resource in names.REQUESTED:
        assert f"amounts.contains('\"{resource}\":')" in condition or resource.startswith(f"{names.GROUP}/")
    assert f"amounts.contains('\"{names.GROUP}/')" in condition
    assert f"'{names.CLASS}' in object.metadata.annotations" in condition
    assert """!amounts.findAll('"[^/"]*":')""" in condition, "a bare name"


def test_kinds_of_others_are_given_by_plural_and_group(render: Render) -> None:
    objects = render("webhook.workloadKinds={jobs.batch.volcano.sh,rayjobs.ray.io}")
    assert rules_of(hooks(objects, "ValidatingWebhookConfiguration")["otheradvice.cardwise.dev"]) == writes(
        "batch.volcano.sh/jobs", "ray.io/rayjobs"
    )
    none = hooks(render("webhook.workloadKinds=null"), "ValidatingWebhookConfiguration")
    assert "otheradvice.cardwise.dev" not in none


def test_a_pod_is_either_ours_or_may_get_the_defaults(render: Render) -> None:
    entries = hooks(render(), "MutatingWebhookConfiguration")
    asks = conditions(entries["pods.cardwise.dev"])["asks-for-a-share"].strip()
    assert conditions(entries["defaults.cardwise.dev"])["asks-for-nothing"].strip() == f"!{asks}"


def rewritten_in(expression: str) -> str:
    """The test of the amounts that is the last part of the expression."""
    return re.sub(r"\s+", " ", expression[expression.index("(amounts.contains") :]).strip().removesuffix("))")


# A loop costs the API server the square of its steps. Of these the first are lists that the chart writes or takes one
# element of, the others what has a limit.
BOUNDED = ("]", ", 64)", "found.map(k, k.split('\"')[1])")
LOOP = re.compile(r"(.{1,40})\.(?:filter|exists|exists_one|all)\(", re.DOTALL)


@pytest.mark.parametrize("sets", [(), OTHER])
def test_no_entry_pays_the_square_of_what_people_write(render: Render, sets: tuple[str, ...]) -> None:
    for kind in KINDS:
        for name, hook in hooks(render(*sets), kind).items():
            for condition in conditions(hook).values():
                loops = [match[1] for match in LOOP.finditer(condition) if not match[1].endswith(BOUNDED)]
                # The webhook has limited what passes this test of the text, when it was created.
                behind = "amounts.contains" in condition.partition(loops[0])[0] if loops else True
                assert not loops or (behind and name.startswith(("pods-late", "reapplied"))), (name, loops)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_as_the_rules_want_them(render: Render, kind: str) -> None:
    for hook in hooks(render(), kind).values():
        name = hook["name"].replace(OF_OTHER_UNIT, "")
        assert hook["failurePolicy"] == ("Ignore" if name in IGNORED else "Fail")
        assert hook["timeoutSeconds"] == (1 if name in HURRIED else 5)
        assert hook["sideEffects"] == "None"
        assert hook["matchPolicy"] == "Equivalent", "another version of the API is no way past it"
        again = {"reinvocationPolicy": "IfNeeded"} if kind == KINDS[0] else {}
        assert {key: hook[key] for key in hook.keys() & {"reinvocationPolicy"}} == again, (
            "others may change it after us"
        )
        assert hook["matchConditions"], "a webhook for every object would break rule 6"
        assert "objectSelector" not in hook, "labels are the user's"
        assert "caBundle" not in hook["clientConfig"], "the webhook writes it itself"


@pytest.mark.parametrize("sets", [(), OTHER])
def test_what_others_add_after_us_comes_late_and_nothing_comes_twice_for_nothing(
    render: Render, sets: tuple[str, ...]
) -> None:
    """docs/design/0030-order-of-webhooks.md."""
    objects, kind = render(*sets), KINDS[0]
    early, late = (
        {hook["name"]: deepcopy(hook) for hook in get_object(objects, kind, name)["webhooks"]}
        for name in (names.WEBHOOK_CONFIGURATION, names.LATE_CONFIGURATION)
    )
    # What is always called for its kind is called again anyway; and defaults are for pods as users write them.
    alone = {"resourceclasses", "defaults", f"defaults{OF_OTHER_UNIT}", "reapplied", f"reapplied{OF_OTHER_UNIT}"}
    assert {name.replace("-late", "") for name in late} == early.keys() - {f"{name}.cardwise.dev" for name in alone}
    for name, hook in late.items():
        duplicate = early[name.replace("-late", "")]
        mine, its = conditions(hook), conditions(duplicate)
        assert {key: field for key, field in hook.items() if key not in ("name", "matchConditions")} == {
            key: field for key, field in duplicate.items() if key not in ("name", "matchConditions")
        }
        if name.startswith("pods-"):
            unwritten, asks = mine.pop("not-rewritten-yet"), its.pop("asks-for-a-share")
            assert rewritten_in(asks) in re.sub(r"\s+", " ", unwritten), "what is unwritten asks for a share"
            assert f"'{names.SHARE}' in c.resources.limits" in unwritten
            assert (f"k == '{names.NVIDIA_GPU}'" in unwritten) == bool(sets)
        elif "quotas" not in name:
            twin_condition = its.pop("asks-by-a-name-to-rewrite")
            assert twin_condition.replace(" ", "").endswith(
                "||\n" + mine.pop("asks-by-a-name-to-rewrite").replace(" ", "")
            )
        assert mine == its


@pytest.mark.parametrize(("default", "other"), [("MiB", "GiB"), ("GiB", "MiB")])
def test_where_numbers_are_read_an_object_comes_by_one_entry_which_says_their_unit(
    render: Render, default: str, other: str
) -> None:
    objects = render(f"webhook.gpuMemUnit={default}")
    for kind, count in zip(KINDS, (6, 3), strict=True):
        entries = hooks(objects, kind)
        twins = [name for name in entries if OF_OTHER_UNIT in name]
        assert len(twins) == count
        for name in twins:
            mine, duplicate = entries[name.replace(OF_OTHER_UNIT, "")], entries[name]
            for hook, unit, operator in ((mine, default, "NotIn"), (duplicate, other, "In")):
                assert hook["clientConfig"]["service"]["path"].endswith("/gib") == (unit == "GiB")
                assert hook["namespaceSelector"].pop("matchExpressions") == [
                    {"key": names.GPU_MEM_UNIT, "operator": operator, "values": [other]}
                ]
            mine_path, twin_path = (hook["clientConfig"]["service"].pop("path") for hook in (mine, duplicate))
            assert mine_path.removesuffix("/gib") == twin_path.removesuffix("/gib")
            respelled = name.startswith("reapplied")
            for hook in (mine, duplicate):
                del hook["name"]
                expressions = hook.pop("matchConditions") if respelled else []
                assert ("oldObject.spec.containers + " in str(expressions)) == (
                    respelled and (hook is mine) == (default == "GiB")
                )
            assert mine == duplicate, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_being_deleted_needs_no_webhook(render: Render, kind: str) -> None:
    for hook in hooks(render(), kind).values():
        if any("UPDATE" in rule["operations"] for rule in hook["rules"]):
            assert "!has(object.metadata.deletionTimestamp)" in text(hook["matchConditions"]), hook["name"]


def test_nvidia_gpu_is_left_alone_unless_told(render: Render) -> None:
    rendered = render("webhook.toleratedTaints=null")
    assert names.NVIDIA_GPU not in text([hooks(rendered, kind) for kind in KINDS])
    taking = render(*OTHER)
    for kind in KINDS:
        pods = conditions(hooks(taking, kind)["pods.cardwise.dev"])["asks-for-a-share"]
        assert f"amounts.contains('\"{names.NVIDIA_GPU}\":')" in pods
    entries = hooks(taking, "MutatingWebhookConfiguration")
    assert {names.NVIDIA_GPU, f"requests.{names.NVIDIA_GPU}", f"limits.{names.NVIDIA_GPU}"} in lists(
        conditions(entries["quotas.cardwise.dev"])["names-what-we-rewrite"]
    )
    for name, path in TEMPLATES.items():
        condition = conditions(entries[name])["asks-by-a-name-to-rewrite"]
        assert f"amounts.contains('\"{names.NVIDIA_GPU}\":')" in condition
        # An update of a template that had it before the setting was changed may not roll it out anew.
        assert f"!(oldObject != null && [{path.replace('object', 'oldObject', 1)}" in condition


def test_an_update_of_a_pod_comes_for_want_of_a_toleration_only_where_taints_are_tolerated(render: Render) -> None:
    def condition(*sets: str) -> str:
        hook = hooks(render(*sets), "MutatingWebhookConfiguration")["reapplied.cardwise.dev"]
        return str(conditions(hook)["comes-as-written"])

    assert "['nvidia.com/gpu:NoSchedule'].exists(taint" in condition()
    assert "tolerations" not in condition("webhook.toleratedTaints=null")


def test_a_namespace_comes_for_each_of_its_defaults(render: Render) -> None:
    hook = hooks(render(), "ValidatingWebhookConfiguration")["namespaces.cardwise.dev"]
    (pattern,) = re.findall(r"\.matches\('(.*?)'\)", conditions(hook)["names-defaults"])
    assert all(
        re.search(pattern, key)
        for key in (*namespaces.DEFAULTS_ANNOTATIONS, names.DEFAULTS_LABEL, "Cardwise.dev/default-gpu-mem")
    )
    assert not any(re.search(pattern, key) for key in ("kubernetes.io/metadata.name", "team", "x.org/cardwise"))


def test_a_plain_quota_never_comes(render: Render) -> None:
    hook = hooks(render(), "MutatingWebhookConfiguration")["quotas.cardwise.dev"]
    standard = set.union(*lists(conditions(hook)["names-what-we-rewrite"]))
    # https://kubernetes.io/docs/concepts/policy/resource-quotas/
    assert standard >= {"cpu", "memory", "ephemeral-storage", "pods", "services", "secrets", "configmaps"}
    assert standard >= {"persistentvolumeclaims", "replicationcontrollers", "resourcequotas"}
    assert standard >= {"services.loadbalancers", "services.nodeports"}
    for prefix in ("requests.", "limits.", "hugepages-"):
        assert f"!k.startsWith('{prefix}')" in text(hook["matchConditions"]).replace("''", "'")


def test_bindings_wait_for_no_large_review_and_their_pods_no_longer_than_the_api_server(render: Render) -> None:
    hook = hooks(render(), "ValidatingWebhookConfiguration")["bindings.cardwise.dev"]
    assert hook["clientConfig"]["service"]["path"] == app.BINDINGS_PATH
    assert hook["timeoutSeconds"] > view.BINDING_SECONDS


def test_what_looks_like_a_gpu_is_the_same_for_the_webhook(render: Render) -> None:
    entry = hooks(render(), "ValidatingWebhookConfiguration")["foreign.cardwise.dev"]
    condition = conditions(entry)["names-a-gpu-and-asks-for-nothing-of-ours"]
    assert f".matches(r'(?m){lookalikes._GPU_NAME.pattern}')" in condition
    assert f".findAll(r'(?m)^.*(?:{lookalikes._OWN_KEY.pattern}).*', " in condition, "and what is meant for us"


@pytest.mark.parametrize(
    "key", ["requests.aliyun.com/gpumem", "aliyun.com/gpu-mems", "requests.nvidia.com/gpu", "x.y/gpu"]
)
def test_a_quota_with_a_name_about_gpus_comes_for_advice(render: Render, key: str) -> None:
    condition = conditions(hooks(render(), "ValidatingWebhookConfiguration")["quotaadvice.cardwise.dev"])["names-a-gpu"]
    (pattern,) = set(re.findall(r"\.matches\(r'(.*?)'\)", condition))
    assert re.search(pattern, key)
    assert not re.search(pattern, "requests.example.org/rdma")


def test_the_webhook_may_run_outside_the_cluster(render: Render) -> None:
    entries = hooks(render(*OFF), "MutatingWebhookConfiguration")
    assert {hook["clientConfig"]["url"] for hook in entries.values()} == {
        "https://127.0.0.1:8443/mutate",
        "https://127.0.0.1:8443/mutate/defaults",
        "https://127.0.0.1:8443/mutate/gib",
        "https://127.0.0.1:8443/mutate/defaults/gib",
    }
