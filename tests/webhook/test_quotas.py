"""Amounts of gpu-mem in quotas and limit ranges."""

import pytest

from cardwise.core import names
from cardwise.core.request import InvalidRequest
from webhook import quotas

KEY = f"requests.{names.GPU_MEM}"


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
    once = quotas.resource_quota(quota)
    assert once == {"spec": {"hard": {KEY: after, "pods": "9", f"requests.{names.WHOLE_GPU}": "2"}}}
    assert quotas.resource_quota(once) == once


@pytest.mark.parametrize("text", ["-1", "1.5", "1025Ki", "x"])
def test_a_bad_quota_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^spec\.hard\[requests\.aliyun\.com/gpu-mem\]: "):
        quotas.resource_quota({"spec": {"hard": {KEY: text}}})


def test_a_limit_range_counts_mib_but_its_ratio_is_none() -> None:
    fields = {"max": "8Gi", "min": "512Mi", "default": "1Gi", "defaultRequest": "1Gi", "maxLimitRequestRatio": "1"}
    item = {"type": "Container"} | {name: {names.GPU_MEM: text} for name, text in fields.items()}
    after = quotas.limit_range({"spec": {"limits": [item, {"type": "Pod", "max": {"cpu": "1"}}]}})["spec"]["limits"]
    assert {name: after[0][name][names.GPU_MEM] for name in fields} == {
        "max": "8192", "min": "512", "default": "1024", "defaultRequest": "1024", "maxLimitRequestRatio": "1"
    }  # fmt: skip
    assert after[1] == {"type": "Pod", "max": {"cpu": "1"}}


def test_nothing_to_rewrite_is_nothing_done() -> None:
    assert quotas.resource_quota({"spec": {}}) == {"spec": {}}
    assert quotas.limit_range({"metadata": {}}) == {"metadata": {}}
