"""Amounts of gpu-mem in quotas and limit ranges, and names of classes in quotas."""

import json

import pytest

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import Unit
from tests.build import resource_class
from tests.webhook.reviews import resource_classes
from webhook.quotas import quotas
from webhook.templates.spellings import NameTranslator

KEY = f"requests.{names.GPU_MEM}"
K80 = "requests.cardwise.dev/nvidia.tesla.k80"
BIG = "requests.cardwise.dev/big"
LAST = "kubectl.kubernetes.io/last-applied-configuration"
KNOWN = resource_classes(resource_class("nvidia.tesla.k80"), resource_class("big"))
LEAVE, TAKE = (NameTranslator(KNOWN.get, take_nvidia=take) for take in (False, True))


def rewrite_quota(quota, vocabulary=LEAVE, old=None):
    return quotas.rewrite_resource_quota(quota, old, vocabulary, update=old is not None)[0]


def rewrite_hard(amounts, vocabulary=LEAVE):
    return rewrite_quota({"spec": {"hard": amounts}}, vocabulary)["spec"]["hard"]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("64Gi", "65536"),
        ("65536", "65536"),
        ("64k", "64k"),
        ("64e3", "64000"),
        ("0", "0"),
        ("512Mi", "512"),
        ("0.5Gi", "512"),
    ],
)
def test_a_quota_counts_mib(text: str, after: str) -> None:
    quota = {"spec": {"hard": {KEY: text, "pods": "9", f"requests.{names.WHOLE_GPU}": "2"}}}
    once = rewrite_quota(quota)
    assert once == {"spec": {"hard": {KEY: after, "pods": "9", f"requests.{names.WHOLE_GPU}": "2"}}}
    assert rewrite_quota(once) == once


@pytest.mark.parametrize("text", ["-1", "1.5", "1023Ki", "x"])
def test_invalid_quota_error_names_the_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^spec\.hard\[requests\.aliyun\.com/gpu-mem\]: "):
        rewrite_quota({"spec": {"hard": {KEY: text}}})


def test_quota_fractions_of_a_mib_are_rounded_up_with_a_warning() -> None:
    rewritten_quota, warnings = quotas.rewrite_resource_quota(
        {"spec": {"hard": {KEY: "1025Ki"}}}, None, LEAVE, update=False
    )
    assert rewritten_quota["spec"]["hard"][KEY] == "2"
    assert warnings == [f"spec.hard[{KEY}]: 1025Ki (1.001Mi) is not a whole number of MiB and counts as 2Mi"]


def test_bare_own_names_get_a_suggestion() -> None:
    """Kubernetes refuses such a name as not a standard resource."""
    rewritten_quota, warnings = quotas.rewrite_resource_quota(
        {"spec": {"hard": {"gpu-mem": "8", "pods": "9"}}}, None, LEAVE, update=False
    )
    assert rewritten_quota["spec"]["hard"] == {"gpu-mem": "8", "pods": "9"}
    assert warnings == [f"spec.hard[gpu-mem]: did you mean {KEY}?"]


def test_limit_range_amounts_are_mib_except_the_ratio() -> None:
    fields = {"max": "8Gi", "min": "512Mi", "default": "1Gi", "defaultRequest": "1Gi", "maxLimitRequestRatio": "1"}
    limit = {"type": "Container"} | {name: {names.GPU_MEM: text} for name, text in fields.items()}
    limit_range, warnings = quotas.rewrite_limit_range(
        {"spec": {"limits": [limit, {"type": "Pod", "max": {"cpu": "1"}}]}}
    )
    after = limit_range["spec"]["limits"]
    assert {name: after[0][name][names.GPU_MEM] for name in fields} == {
        "max": "8192", "min": "512", "default": "1024", "defaultRequest": "1024", "maxLimitRequestRatio": "1"
    }  # fmt: skip
    assert after[1] == {"type": "Pod", "max": {"cpu": "1"}}
    assert [text.split(":")[0] for text in warnings] == [
        f"spec.limits[0].{field}[{names.GPU_MEM}]" for field in ("default", "defaultRequest")
    ]
    assert "label it cardwise.dev/defaults=enabled" in warnings[0]


def test_unchanged_quota_is_the_same_object() -> None:
    assert rewrite_quota({"spec": {}}) == {"spec": {}}
    assert quotas.rewrite_limit_range({"metadata": {}}) == ({"metadata": {}}, [])


@pytest.mark.parametrize(
    ("written", "counted"),
    [
        ("nvidia.tesla.k80", K80),
        ("big", BIG),
        ("not.there", "requests.cardwise.dev/not.there"),
        ("cardwise.dev/nvidia.tesla.k80", K80),
        (names.WHOLE_GPU, f"requests.{names.WHOLE_GPU}"),
        (K80, K80),
        ("pods", "pods"),
        ("requests.cpu", "requests.cpu"),
        ("services.loadbalancers", "services.loadbalancers"),
        ("small", "small"),
        ("count/jobs.batch", "count/jobs.batch"),
        (f"requests.{names.NVIDIA_GPU}", f"requests.{names.NVIDIA_GPU}"),
        (names.NVIDIA_GPU, names.NVIDIA_GPU),
        ("limits.cardwise.dev/nvidia.tesla.k80", K80),
        (f"limits.{names.WHOLE_GPU}", f"requests.{names.WHOLE_GPU}"),
        (names.GPU_MEM, KEY),
        (f"limits.{names.GPU_MEM}", KEY),
        (names.GPU_CORE, f"requests.{names.GPU_CORE}"),
        (f"limits.{names.GPU_CORE}", f"requests.{names.GPU_CORE}"),
        (names.GPU_COUNT, f"requests.{names.WHOLE_GPU}"),
        (f"requests.{names.GPU_COUNT}", f"requests.{names.WHOLE_GPU}"),
        (f"limits.{names.GPU_COUNT}", f"requests.{names.WHOLE_GPU}"),
        (names.SHARE, f"requests.{names.SHARE}"),
        ("limits.cpu", "limits.cpu"),
    ],
)
def test_names_become_the_keys_that_kubernetes_counts(written, counted):
    assert rewrite_hard({written: "5"}) == {counted: "5"}


@pytest.mark.parametrize("written", [names.GPU_MEM, f"limits.{names.GPU_MEM}"])
def test_an_amount_is_rewritten_with_its_name(written):
    quota = rewrite_quota({"metadata": {}, "spec": {"hard": {written: "1Gi", "pods": "4"}}})
    assert quota["spec"]["hard"] == {KEY: "1024", "pods": "4"}
    assert json.loads(quota["metadata"]["annotations"][names.REWRITTEN]) == {"hard": [KEY]}
    with pytest.raises(InvalidRequest, match="differs from"):
        rewrite_hard({written: "1Gi", KEY: "2Gi"})


@pytest.mark.parametrize("written", [names.GPU_COUNT, f"requests.{names.GPU_COUNT}"])
def test_gpu_count_key_gets_a_warning(written):
    _, (warning,) = quotas.rewrite_resource_quota({"spec": {"hard": {written: "5"}}}, None, LEAVE, update=False)
    assert warning == (
        f"spec.hard[{written}]: counts whole GPUs, as requests.cardwise.dev/gpu; it does not count shares, even if "
        "they are split over several GPUs: limit those by requests.aliyun.com/gpu-mem, or by a GPUQuota"
    )


@pytest.mark.parametrize("prefix", ["", "requests.", "limits."])
@pytest.mark.parametrize("marker", [names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE])
def test_internal_markers_are_refused_in_quotas(prefix, marker):
    with pytest.raises(InvalidRequest) as refused:
        rewrite_hard({prefix + marker: "1"})
    assert str(refused.value) == (
        f"spec.hard[{prefix}{marker}]: is an internal marker of Cardwise; "
        "write one of requests.cardwise.dev/<class>, requests.cardwise.dev/gpu, requests.aliyun.com/gpu-mem"
    )


@pytest.mark.parametrize("written", [names.NVIDIA_GPU, f"requests.{names.NVIDIA_GPU}", f"limits.{names.NVIDIA_GPU}"])
def test_nvidia_gpu_key_is_rewritten_with_the_setting(written):
    assert rewrite_hard({written: "0"}, TAKE) == {f"requests.{names.WHOLE_GPU}": "0"}


def test_rewritten_keys_are_recorded():
    quota = rewrite_quota({"metadata": {"name": "q"}, "spec": {"hard": {"nvidia.tesla.k80": "5", "pods": "1"}}})
    assert json.loads(quota["metadata"]["annotations"][names.REWRITTEN]) == {"hard": [K80]}
    assert rewrite_quota(quota, old=quota) is not None
    assert rewrite_quota(quota, old=quota) == quota


def test_missing_class_gets_a_warning():
    quota = {"spec": {"hard": {"not.there": "5"}}}
    _, warnings = quotas.rewrite_resource_quota(quota, None, LEAVE, update=False)
    assert warnings == [
        "spec.hard[not.there]: there is no ResourceClass not.there now; until there is one, it counts nothing"
    ]


def test_two_spellings_with_different_amounts_are_refused():
    with pytest.raises(InvalidRequest) as refused:
        rewrite_hard({"nvidia.tesla.k80": "5", K80: "6"})
    assert str(refused.value) == (
        f"spec.hard[{K80}]: 6 differs from nvidia.tesla.k80, which has the same meaning and the value 5; "
        "write only nvidia.tesla.k80"
    )
    assert rewrite_hard({"nvidia.tesla.k80": "5000", K80: "5k"}) == {K80: "5k"}, "equal amounts are one key"


def apply_quota(hard_now, last, recorded):
    annotations = {LAST: json.dumps({"spec": {"hard": last}})}
    if recorded:
        annotations[names.REWRITTEN] = json.dumps({"hard": recorded})
    return {"metadata": {"annotations": annotations}, "spec": {"hard": hard_now}}


def test_another_class_by_apply_leaves_no_stale_key():
    old = apply_quota({K80: "1"}, {"nvidia.tesla.k80": "1"}, [K80])
    new = rewrite_quota(apply_quota({K80: "1", "big": "3"}, {"big": "3"}, [K80]), old=old)
    assert new["spec"]["hard"] == {BIG: "3"}
    assert json.loads(new["metadata"]["annotations"][names.REWRITTEN]) == {"hard": [BIG]}


def patch_quota(stored, added):
    """An update of the stored quota, as by `kubectl patch --type merge` and `kubectl edit`; the applied manifest
    stays.
    """
    return rewrite_quota(stored | {"spec": {"hard": stored["spec"]["hard"] | added}}, old=stored)


@pytest.mark.parametrize("last", [None, {"nvidia.tesla.k80": "5"}, {K80: "5"}], ids=["created", "bare", "in full"])
def test_another_class_by_patch_takes_no_limit_away(last):
    first = {"metadata": {"name": "q"}, "spec": {"hard": {"nvidia.tesla.k80": "5"}}}
    stored = rewrite_quota(first if last is None else apply_quota({"nvidia.tesla.k80": "5"}, last, []))
    after = patch_quota(stored, {"big": "3"})
    assert after["spec"]["hard"] == {K80: "5", BIG: "3"}
    assert json.loads(after["metadata"]["annotations"][names.REWRITTEN]) == {"hard": [BIG, K80]}


def test_patched_amount_is_kept_and_other_classes_stay():
    stored = rewrite_quota({"metadata": {"name": "q"}, "spec": {"hard": {"nvidia.tesla.k80": "5", "big": "3"}}})
    for spelled in ("nvidia.tesla.k80", "cardwise.dev/nvidia.tesla.k80"):
        assert patch_quota(stored, {spelled: "7"})["spec"]["hard"] == {K80: "7", BIG: "3"}


def test_apply_keeps_patched_keys_until_the_manifest_names_them():
    def apply(stored, last):
        dropped = json.loads(stored["metadata"]["annotations"][LAST])["spec"]["hard"].keys() - last
        kept = {key: amount for key, amount in stored["spec"]["hard"].items() if key not in dropped}
        metadata = {"annotations": stored["metadata"]["annotations"] | {LAST: json.dumps({"spec": {"hard": last}})}}
        return rewrite_quota({"metadata": metadata, "spec": {"hard": kept | last}}, old=stored)

    stored = patch_quota(
        rewrite_quota(apply_quota({"nvidia.tesla.k80": "5"}, {"nvidia.tesla.k80": "5"}, [])), {"big": "3"}
    )
    grown = apply(stored, {"nvidia.tesla.k80": "6"})
    assert grown["spec"]["hard"] == {K80: "6", BIG: "3"}
    changed = apply(grown, {"nvidia.tesla.k80": "6", "big": "4"})
    assert changed["spec"]["hard"] == {K80: "6", BIG: "4"}
    assert apply(changed, {"nvidia.tesla.k80": "6"})["spec"]["hard"] == {K80: "6"}
    assert apply(changed, {"other.class": "1"})["spec"]["hard"] == {"requests.cardwise.dev/other.class": "1"}


def by_server_side_apply(quota, *manifests):
    """managedFields as the API server writes them: the names in each manager's manifest, even if the object lacks
    them.
    """
    fields = [{"f:spec": {"f:hard": {f"f:{key}": {} for key in manifest}}} for manifest in manifests]
    managed = [
        {"manager": str(i), "operation": "Apply", "fieldsV1": fields_of_manager}
        for i, fields_of_manager in enumerate(fields)
    ]
    return quota | {"metadata": quota.get("metadata", {}) | {"managedFields": managed}}


def server_applied(stored, *manifests):
    """Server-side apply of the first manifest, next to those of other managers."""
    brought = by_server_side_apply(stored, *manifests)
    return rewrite_quota(brought | {"spec": {"hard": stored["spec"]["hard"] | manifests[0]}}, old=stored)


@pytest.fixture
def stored():
    return rewrite_quota(by_server_side_apply({"spec": {"hard": {"nvidia.tesla.k80": "5"}}}, {"nvidia.tesla.k80": "5"}))


def test_another_class_by_server_side_apply_leaves_no_stale_key(stored):
    other = server_applied(stored, {"big": "4", "pods": "1"})
    assert other["spec"]["hard"] == {BIG: "4", "pods": "1"}
    assert json.loads(other["metadata"]["annotations"][names.REWRITTEN]) == {"hard": [BIG]}
    assert server_applied(other, {"pods": "1"})["spec"]["hard"] == {"pods": "1"}


def test_the_same_class_by_server_side_apply_stays(stored):
    assert server_applied(stored, {"nvidia.tesla.k80": "6"})["spec"]["hard"] == {K80: "6"}
    assert server_applied(stored, {K80: "6"})["spec"]["hard"] == {K80: "6"}
    assert server_applied(stored, {"pods": "1"}, {"nvidia.tesla.k80": "5"})["spec"]["hard"] == {K80: "5", "pods": "1"}


def test_a_patch_beside_server_side_apply_takes_no_limit_away(stored):
    patch_quota = rewrite_quota(stored | {"spec": {"hard": {K80: "5", "big": "3"}}}, old=stored)
    assert patch_quota["spec"]["hard"] == {K80: "5", BIG: "3"}
    assert server_applied(patch_quota, {"nvidia.tesla.k80": "5"})["spec"]["hard"] == {K80: "5", BIG: "3"}


@pytest.mark.parametrize(
    "managed",
    [
        [],
        [{}],
        [{"operation": "Apply", "fieldsV1": {"k:{": {}}}],
        [{"operation": "Apply", "fieldsV1": {'k:{"a":1}': {}}}],
        [{"operation": "Update", "fieldsV1": {}}],
    ],
)
def test_missing_managed_fields_remove_no_limit(stored, managed):
    new = {"metadata": stored["metadata"] | {"managedFields": managed}, "spec": {"hard": {K80: "5"}}}
    assert rewrite_quota(new, old=stored)["spec"]["hard"] == {K80: "5"}


def test_removal_of_a_name_that_is_not_stored_gets_a_warning(stored):
    def warnings(new):
        return quotas.rewrite_resource_quota(new, stored, LEAVE, update=True)[1]

    (warning,) = warnings(stored)
    assert warning == (
        f"spec.hard: nothing has changed, because the removed key is stored under another name: remove {K80}"
    )
    assert warnings(stored | {"metadata": stored["metadata"] | {"labels": {"a": "b"}}}) == []
    assert warnings(stored | {"spec": {"hard": {K80: "6"}}}) == []
    plain = {"metadata": {}, "spec": {"hard": {"pods": "1"}}}
    assert quotas.rewrite_resource_quota(plain, plain, LEAVE, update=True)[1] == []


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_unreadable_stored_manifest_removes_no_limit(text):
    old = apply_quota({K80: "1"}, {}, [K80])
    old["metadata"]["annotations"][LAST] = text
    new = apply_quota({K80: "1", "big": "3"}, {"big": "3"}, [K80])
    assert rewrite_quota(new, old=old)["spec"]["hard"] == {K80: "1", BIG: "3"}


def in_gib(manifest, old=None):
    if "limits" in manifest["spec"]:
        return quotas.rewrite_limit_range(manifest, old, unit=Unit.GIB)
    return quotas.rewrite_resource_quota(manifest, old, LEAVE, update=old is not None, unit=Unit.GIB)


def limits(**amounts):
    fields = {name: {names.GPU_MEM: text, "cpu": "1"} for name, text in amounts.items()}
    return {"spec": {"limits": [{"type": "Container"} | fields]}}


@pytest.mark.parametrize(("text", "after"), [("64", "65536"), ("64Gi", "65536"), ("512Mi", "512"), ("0", "0")])
def test_gib_quota_is_converted_to_mib_once(text: str, after: str) -> None:
    stored_quota, warnings = in_gib({"spec": {"hard": {KEY: text, "pods": "9"}}})
    assert stored_quota["spec"]["hard"] == {KEY: after, "pods": "9"}
    bare = text == "64"
    assert warnings == ([f"spec.hard[{KEY}]: 64 means GiB here, so it is stored as 65536, which is in MiB"] * bare)
    assert stored_quota.get("metadata", {}) == ({"annotations": {names.WRITTEN_MIB: after}} if text != "0" else {})
    again, warnings = in_gib(stored_quota)
    assert (again, warnings) == (stored_quota, []), "a second call, and a copy in another namespace"
    label = stored_quota | {"metadata": stored_quota.get("metadata", {}) | {"labels": {"a": "b"}}}
    assert in_gib(label, stored_quota)[0] == label, "an update of something else"


def test_stored_numbers_count_mib_after_a_unit_change() -> None:
    stored = {"spec": {"hard": {KEY: "65536"}}}
    annotated = stored | {"metadata": {"annotations": {names.WRITTEN_MIB: "65536"}}}
    assert in_gib(stored, stored) == (annotated, [])
    assert rewrite_quota(stored, old=stored) == stored
    stored_quota, _ = in_gib({"spec": {"hard": {KEY: "128"}}}, stored)
    assert stored_quota["spec"]["hard"][KEY] == "131072"
    less, _ = in_gib({"spec": {"hard": {KEY: "1Gi"}}, "metadata": stored_quota["metadata"]}, stored_quota)
    assert less == {"spec": {"hard": {KEY: "1024"}}, "metadata": {"annotations": {names.WRITTEN_MIB: "1024"}}}
    assert rewrite_quota(stored_quota) == stored_quota, "where bare numbers count MiB, the note changes nothing"


def test_a_limit_range_in_gib_is_stored_in_mib_once() -> None:
    limit_range, warnings = in_gib(limits(max="8", default="2", min="512Mi"))
    (limit,) = limit_range["spec"]["limits"]
    assert {name: limit[name][names.GPU_MEM] for name in ("max", "default", "min")} == {
        "max": "8192", "default": "2048", "min": "512"
    }  # fmt: skip
    assert limit["max"]["cpu"] == "1"
    assert limit_range["metadata"]["annotations"][names.WRITTEN_MIB] == "2048,512,8192"
    assert warnings[:2] == [
        f"spec.limits[0].{name}[{names.GPU_MEM}]: {old} means GiB here, so it is stored as {new}, which is in MiB"
        for name, old, new in (("max", 8, 8192), ("default", 2, 2048))
    ]
    assert in_gib(limit_range)[0] == limit_range
    swapped = limit_range | {"spec": {"limits": [{"type": "Pod"}, limit]}}
    assert in_gib(swapped, limit_range)[0] == swapped


@pytest.mark.parametrize("note", ["x", "", "1,,", "-"])
def test_unreadable_annotation_is_ignored(note: str) -> None:
    quota = {"metadata": {"annotations": {names.WRITTEN_MIB: note}}, "spec": {"hard": {KEY: "64"}}}
    stored_quota, _ = in_gib(quota)
    assert stored_quota["spec"]["hard"][KEY] == "65536"
    assert stored_quota["metadata"]["annotations"] == {names.WRITTEN_MIB: "65536"}


def test_invalid_gib_amount_error_names_the_field() -> None:
    for text in ("-1", "100u", "3M", "x"):
        with pytest.raises(InvalidRequest, match=r"^spec\.hard\[requests\.aliyun\.com/gpu-mem\]: "):
            in_gib({"spec": {"hard": {KEY: text}}})


def test_fields_of_the_other_kind_in_the_stored_object_are_not_read() -> None:
    """Any pod may post a review whose old object is anything; a text there was an unexpected error."""
    stored = {"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "1"}, "limits": "a text"}}
    after = {"spec": {"hard": {"requests.cpu": "2"}}}
    assert rewrite_quota(after, old=stored) == after
    stored = {"metadata": {"name": "l"}, "spec": {"limits": [], "hard": "a text"}}
    assert quotas.rewrite_limit_range({"spec": {"limits": [{"max": {"cpu": "1"}}]}}, stored)[1] == []
