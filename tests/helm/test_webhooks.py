"""Which objects the API server sends to the webhook. That the CEL is right is tried on the real one."""

import re

import pytest

from cardwise.core.api import lookalikes, names
from tests.helm.rendering import OFF, OTHER, Object, Objects, Render, conditions, one, text
from webhook.cluster import view
from webhook.server import app

KINDS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
TEMPLATES = {  # where the template's pod spec is
    "workloads.cardwise.dev": "object.?spec.?template.?spec",
    "cronjobs.cardwise.dev": "object.?spec.?jobTemplate.?spec.?template.?spec",
    "podtemplates.cardwise.dev": "object.?template.?spec",
}
OF_OTHER_UNIT = "-of-other-unit"  # of entries for namespaces whose label differs from webhook.gpuMemUnit
GANGS = {  # where the template is
    "gangs.cardwise.dev": "object.?spec.?template.orValue",
    "crongangs.cardwise.dev": "object.?spec.?jobTemplate.?spec.?template.orValue",
}
ADVICE = {  # where the template is
    "advice.cardwise.dev": "object.?spec.?template",
    "cronadvice.cardwise.dev": "object.?spec.?jobTemplate.?spec.?template",
    "otheradvice.cardwise.dev": "",
    "foreign.cardwise.dev": "",
}


def hooks(objects: Objects, kind: str) -> dict[str, Object]:
    return {hook["name"]: hook for hook in one(objects, kind, names.WEBHOOK_CONFIGURATION)["webhooks"]}


def seen(hook: Object) -> set[str]:
    """`group/resource` and operations that the entry is for."""
    return {
        f"{operation} {group or 'core'}/{resource}"
        for rule in hook["rules"]
        for operation in rule["operations"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def writes(*resources: str) -> set[str]:
    return {f"{operation} {resource}" for operation in ("CREATE", "UPDATE") for resource in resources}


def lists(expression: str) -> list[set[str]]:
    """The CEL lists of texts in an expression."""
    return [set(re.findall(r"'([^']*)'", found)) for found in re.findall(r"\[('[^]]*')]", expression)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_users_ask_for_brings_a_pod_to_the_webhook(render: Render, kind: str) -> None:
    condition = conditions(hooks(render(), kind)["pods.cardwise.dev"])["asks-for-a-share"]
    for resource in names.REQUESTED:
        assert f"'{resource}'" in condition or resource.startswith(f"{names.GROUP}/")
    assert f"k.startsWith('{names.GROUP}/')" in condition
    assert f"'{names.CLASS}' in object.metadata.annotations" in condition
    assert "!k.contains('/')" in condition, "a bare name"


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_that_names_a_gang_or_pretends_to_comes_to_the_webhook(render: Render, kind: str) -> None:
    condition = conditions(hooks(render(), kind)["pods.cardwise.dev"])["asks-for-a-share"]
    groups = {names.GROUP_NAME, names.GROUP_NUM}
    assert lists(condition)[:3] == [{"default-scheduler"}, groups, groups | {names.COSCHEDULING}]
    assert f"'{names.GANG}' in object.metadata.labels" in condition
    assert f"g.name == '{names.GANG}'" in condition
    other = hooks(render(*OTHER), kind)["pods.cardwise.dev"]
    assert "schedulerName in ['one', 'two', 'cardwise-scheduler']" in conditions(other)["asks-for-a-share"]


@pytest.mark.parametrize(("name", "path"), GANGS.items())
def test_a_workload_that_makes_a_gang_is_judged_when_it_changes(render: Render, name: str, path: str) -> None:
    hook = hooks(render(), "ValidatingWebhookConfiguration")[name]
    assert hook["clientConfig"]["service"]["path"] == "/validate"
    found = conditions(hook)
    assert "'kube-system'" in found["not-exempt"]
    assert found["changes"] == "oldObject == null || object.spec != oldObject.spec"
    assert path in found["makes-a-gang"]
    assert lists(found["makes-a-gang"])[1] == {names.GROUP_NAME, names.GROUP_NUM}
    apps = ("apps/deployments", "apps/replicasets", "apps/statefulsets", "batch/jobs", "core/replicationcontrollers")
    assert seen(hook) == writes(*(apps if name == "gangs.cardwise.dev" else ("batch/cronjobs",)))


@pytest.mark.parametrize(("name", "path"), ADVICE.items())
def test_what_asks_for_cards_is_advised_when_a_person_changes_it(render: Render, name: str, path: str) -> None:
    hook = hooks(render(), "ValidatingWebhookConfiguration")[name]
    assert hook["clientConfig"]["service"]["path"] == "/advise"
    found = conditions(hook)
    assert "'kube-system'" in found["not-exempt"]
    assert "o.?controller.orValue(false)" in text(hook["matchConditions"])
    if name == "foreign.cardwise.dev":
        assert seen(hook) == {"CREATE core/pods"}
        asks = conditions(hooks(render(), "MutatingWebhookConfiguration")["pods.cardwise.dev"])["asks-for-a-share"]
        assert found["asks-for-nothing-of-ours"].strip() == f"!{asks.strip()}"
        assert "k.matches(" in found["names-a-gpu"]
    else:
        assert found["changes"].startswith("oldObject == null || ")
        assert not path or f"{path}.?spec.orValue" in found["asks-for-cards"]


def test_kinds_of_others_are_given_by_plural_and_group(render: Render) -> None:
    objects = render("webhook.workloadKinds={jobs.batch.volcano.sh,rayjobs.ray.io}")
    assert seen(hooks(objects, "ValidatingWebhookConfiguration")["otheradvice.cardwise.dev"]) == writes(
        "batch.volcano.sh/jobs", "ray.io/rayjobs"
    )
    none = hooks(render("webhook.workloadKinds=null"), "ValidatingWebhookConfiguration")
    assert "otheradvice.cardwise.dev" not in none


def test_a_pod_is_either_ours_or_may_get_the_defaults(render: Render) -> None:
    entries = hooks(render(), "MutatingWebhookConfiguration")
    asks = conditions(entries["pods.cardwise.dev"])["asks-for-a-share"].strip()
    assert conditions(entries["defaults.cardwise.dev"])["asks-for-nothing"].strip() == f"!{asks}"


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_as_the_rules_want_them(render: Render, kind: str) -> None:
    ignored = {"bindings.cardwise.dev", "namespaces.cardwise.dev", *GANGS, *ADVICE}
    hurried = {"bindings.cardwise.dev", *ADVICE}
    for hook in hooks(render(), kind).values():
        name = hook["name"].replace(OF_OTHER_UNIT, "")
        assert hook["failurePolicy"] == ("Ignore" if name in ignored else "Fail")
        assert hook["timeoutSeconds"] == (1 if name in hurried else 5)
        assert hook["sideEffects"] == "None"
        assert hook["matchConditions"], "a webhook for every object would break rule 6"
        assert "objectSelector" not in hook, "labels are the user's"
        assert "caBundle" not in hook["clientConfig"], "the webhook writes it itself"


@pytest.mark.parametrize(("default", "other"), [("MiB", "GiB"), ("GiB", "MiB")])
def test_where_numbers_are_read_an_object_comes_by_one_entry_which_says_their_unit(
    render: Render, default: str, other: str
) -> None:
    objects = render(f"webhook.gpuMemUnit={default}")
    for kind, count in zip(KINDS, (4, 3), strict=True):
        entries = hooks(objects, kind)
        twins = [name for name in entries if OF_OTHER_UNIT in name]
        assert len(twins) == count
        for name in twins:
            mine, twin = entries[name.replace(OF_OTHER_UNIT, "")], entries[name]
            for hook, unit, operator in ((mine, default, "NotIn"), (twin, other, "In")):
                assert hook["clientConfig"]["service"]["path"].endswith("/gib") == (unit == "GiB")
                assert hook["namespaceSelector"].pop("matchExpressions") == [
                    {"key": names.GPU_MEM_UNIT, "operator": operator, "values": [other]}
                ]
            mine_path, twin_path = (hook["clientConfig"]["service"].pop("path") for hook in (mine, twin))
            assert mine_path.removesuffix("/gib") == twin_path.removesuffix("/gib")
            respelled = name.startswith("reapplied")
            for hook in (mine, twin):
                del hook["name"]
                expressions = hook.pop("matchConditions") if respelled else []
                assert ("oldObject.spec.containers + " in str(expressions)) == (
                    respelled and (hook is mine) == (default == "GiB")
                )
            assert mine == twin, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_being_deleted_needs_no_webhook(render: Render, kind: str) -> None:
    for hook in hooks(render(), kind).values():
        if any("UPDATE" in rule["operations"] for rule in hook["rules"]):
            assert "!has(object.metadata.deletionTimestamp)" in text(hook["matchConditions"]), hook["name"]


def test_every_kind_with_a_template_is_seen(render: Render) -> None:
    entries = hooks(render(), "MutatingWebhookConfiguration")
    apps = ("apps/deployments", "apps/replicasets", "apps/statefulsets", "apps/daemonsets")
    assert seen(entries["workloads.cardwise.dev"]) == writes(*apps, "batch/jobs", "core/replicationcontrollers")
    assert seen(entries["cronjobs.cardwise.dev"]) == writes("batch/cronjobs")
    assert seen(entries["podtemplates.cardwise.dev"]) == writes("core/podtemplates")


@pytest.mark.parametrize(("name", "path"), TEMPLATES.items())
def test_a_template_comes_for_a_bare_name_or_our_mark(render: Render, name: str, path: str) -> None:
    hook = hooks(render(), "MutatingWebhookConfiguration")[name]
    assert hook["clientConfig"]["service"]["path"] == "/mutate"
    found = conditions(hook)
    assert "'kube-system'" in found["not-exempt"]
    condition = found["asks-by-a-name-to-rewrite"]
    assert path in condition
    assert f"'{names.REWRITTEN}' in object.metadata.annotations" in condition
    assert "!k.contains('/')" in condition
    # Kubernetes takes these as they are, and the pods come by themselves.
    assert names.GPU_MEM not in condition
    assert names.CLASS_PREFIX not in condition.replace(names.REWRITTEN, "")


def test_nvidia_gpu_is_left_alone_unless_told(render: Render) -> None:
    rendered = render("webhook.toleratedTaints=null")
    assert names.NVIDIA_GPU not in text([hooks(rendered, kind) for kind in KINDS])
    taken = render(*OTHER)
    for kind in KINDS:
        pods = conditions(hooks(taken, kind)["pods.cardwise.dev"])["asks-for-a-share"]
        assert f"k == '{names.NVIDIA_GPU}'" in pods
    entries = hooks(taken, "MutatingWebhookConfiguration")
    assert {names.NVIDIA_GPU, f"requests.{names.NVIDIA_GPU}", f"limits.{names.NVIDIA_GPU}"} in lists(
        conditions(entries["quotas.cardwise.dev"])["names-what-we-rewrite"]
    )
    for name, path in TEMPLATES.items():
        condition = conditions(entries[name])["asks-by-a-name-to-rewrite"]
        assert f"k == '{names.NVIDIA_GPU}'" in condition
        # An update of a template that had it before the setting was changed may not roll it out anew.
        assert f"!(oldObject != null && [{path.replace('object', 'oldObject', 1)}" in condition


def test_a_quota_comes_for_what_pods_are_rewritten_to(render: Render) -> None:
    hook = hooks(render(), "MutatingWebhookConfiguration")["quotas.cardwise.dev"]
    assert seen(hook) == writes("core/resourcequotas", "core/limitranges")
    condition = conditions(hook)["names-what-we-rewrite"]
    assert f"k.endsWith('{names.GPU_MEM}')" in condition
    assert f"k.startsWith('{names.CLASS_PREFIX}')" in condition
    assert f"'{names.REWRITTEN}' in object.metadata.annotations" in condition


@pytest.mark.parametrize(
    "key",
    [
        f"k.endsWith('{names.GPU_COUNT}')",
        f"'limits.{names.GPU_CORE}'",
        f"k.startsWith('limits.{names.CLASS_PREFIX}')",
        f"'requests.{names.PLACE_MARKER}'",
    ],
)
def test_a_quota_comes_for_keys_that_kubernetes_would_not_count(render: Render, key: str) -> None:
    hook = hooks(render(), "MutatingWebhookConfiguration")["quotas.cardwise.dev"]
    assert key in conditions(hook)["names-what-we-rewrite"]


def test_an_update_of_a_pod_comes_only_for_a_spelling_that_kubernetes_would_refuse(render: Render) -> None:
    hook = hooks(render(), "MutatingWebhookConfiguration")["reapplied.cardwise.dev"]
    assert seen(hook) == {"UPDATE core/pods"}
    condition, _, lacks = conditions(hook)["comes-as-written"].partition(" ||\nobject.spec.?tolerations !=")
    assert "['nvidia.com/gpu:NoSchedule'].exists(taint" in lacks
    assert condition.strip().startswith("(object.spec.containers != oldObject.spec.containers || ")
    assert f"k == '{names.GPU_COUNT}'" in condition
    assert "!k.contains('/')" in condition, "a bare name"
    for stored in (names.CLASS_PREFIX, names.SHARE, names.WHOLE_GPU, names.GPU_CORE, names.NVIDIA_GPU):
        assert stored not in condition
    taken = hooks(render(*OTHER), "MutatingWebhookConfiguration")["reapplied.cardwise.dev"]
    assert f"k == '{names.NVIDIA_GPU}'" in conditions(taken)["comes-as-written"]
    none = hooks(render("webhook.toleratedTaints=null"), "MutatingWebhookConfiguration")["reapplied.cardwise.dev"]
    assert "tolerations" not in conditions(none)["comes-as-written"]


def test_a_namespace_comes_for_each_of_its_defaults(render: Render) -> None:
    hook = hooks(render(), "ValidatingWebhookConfiguration")["namespaces.cardwise.dev"]
    condition = conditions(hook)["names-defaults"]
    assert lists(condition) == [
        {names.DEFAULT_GPU_MEM, names.POLICY, names.MPS, names.LEAST_MPS, names.SM_PERCENT, names.FRAMEWORKS}
    ]


def test_a_plain_quota_never_comes(render: Render) -> None:
    hook = hooks(render(), "MutatingWebhookConfiguration")["quotas.cardwise.dev"]
    standard = set.union(*lists(conditions(hook)["names-what-we-rewrite"]))
    # https://kubernetes.io/docs/concepts/policy/resource-quotas/
    assert standard >= {"cpu", "memory", "ephemeral-storage", "pods", "services", "secrets", "configmaps"}
    assert standard >= {"persistentvolumeclaims", "replicationcontrollers", "resourcequotas"}
    assert standard >= {"services.loadbalancers", "services.nodeports"}
    for prefix in ("requests.", "limits.", "hugepages-"):
        assert f"!k.startsWith('{prefix}')" in text(hook["matchConditions"]).replace("''", "'")


def test_classes_and_gpu_quotas_are_checked(render: Render) -> None:
    objects = render()
    mutating, validating = (hooks(objects, kind) for kind in KINDS)
    classes, quotas = f"{names.GROUP}/resourceclasses", f"{names.GROUP}/gpuquotas"
    assert seen(mutating["resourceclasses.cardwise.dev"]) == writes(classes)
    assert seen(validating["resourceclasses.cardwise.dev"]) == writes(classes)
    assert seen(validating["gpuquotas.cardwise.dev"]) == writes(quotas)
    for entries, path in ((mutating, "/mutate"), (validating, "/validate")):
        assert entries["resourceclasses.cardwise.dev"]["clientConfig"]["service"]["path"] == path


def test_the_policies_look_closer_at_whatever_names_what_is_ours(render: Render) -> None:
    policy = one(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev")["spec"]
    condition = conditions(policy)["has-ours-or-waits"]
    for word in (f"{names.GROUP}/", names.GPUSHARE_PREFIX, names.GPUSHARE_ALLOCATION, "cdi.k8s.io"):
        assert f"text.contains('{word}')" in condition
    environment = text(one(render(), "ValidatingAdmissionPolicy", "environment.cardwise.dev")["spec"])
    for word in ("CUDA_MPS_", "NVIDIA_VISIBLE_DEVICES"):
        assert f"text.contains('{word}')" in environment.replace("''", "'")


def test_bindings_wait_for_no_large_review_and_their_pods_no_longer_than_the_api_server(render: Render) -> None:
    hook = hooks(render(), "ValidatingWebhookConfiguration")["bindings.cardwise.dev"]
    assert hook["clientConfig"]["service"]["path"] == app.BINDINGS
    assert hook["timeoutSeconds"] > view.BINDING_SECONDS


def test_what_looks_like_a_gpu_is_the_same_for_the_webhook(render: Render) -> None:
    condition = conditions(hooks(render(), "ValidatingWebhookConfiguration")["foreign.cardwise.dev"])["names-a-gpu"]
    assert f"k.matches(r'{lookalikes._LIKE_A_GPU.pattern}')" in condition


def test_the_webhook_may_run_outside_the_cluster(render: Render) -> None:
    entries = hooks(render(*OFF), "MutatingWebhookConfiguration")
    assert {hook["clientConfig"]["url"] for hook in entries.values()} == {
        "https://127.0.0.1:8443/mutate",
        "https://127.0.0.1:8443/mutate/defaults",
        "https://127.0.0.1:8443/mutate/gib",
        "https://127.0.0.1:8443/mutate/defaults/gib",
    }
