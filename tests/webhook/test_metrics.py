"""The metrics of the webhook: refusals by a closed set of reasons, whatever users write into fields."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry

from cardwise.core.api import names
from tests import build
from tests.webhook.reviews import Known, body
from webhook import metrics
from webhook.pods.context import WebhookSettings
from webhook.server import app as shell

LIMITS = "spec.containers[3].resources.limits"


@pytest.fixture
def context() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (f"{LIMITS}[{names.GPU_MEM}]", "memory"),
        (f"{LIMITS}[{names.GPU_CORE}]", "cores"),
        (f"{LIMITS}[{names.GPU_COUNT}]", "cards"),
        (f"{LIMITS}[{names.WHOLE_GPU}]", "cards"),
        (f"{LIMITS}[{names.CLASS_PREFIX}nvidia.tesla.k80]", "resources"),
        (LIMITS, "resources"),
        (f"metadata.annotations[{names.ISOLATION}]", "isolation"),
        (f"metadata.annotations[{names.SM_PERCENT}]", "cores"),
        (f"metadata.annotations[{names.POLICY}]", "defaults"),
        (f"metadata.annotations[{names.DEFAULT_GPU_MEM}]", "defaults"),
        (f"metadata.annotations[{names.GROUP_NUM}]", "gang"),
        (f"metadata.labels[{names.GROUP_NAME}]", "gang"),
        ("spec.nodeName", "placement"),
        ("target", "placement"),
        ("spec.hard[0].memoryMiB", "quota"),
        ("spec.containers[0].env[CUDA_VISIBLE_DEVICES]", "container"),
        ("spec.selector.matchExpressions[0].operator", "selector"),
        ("something.else", "other"),
        ("", "other"),
    ],
)
def test_refusal_reason_is_the_kind_of_field(field: str, reason: str) -> None:
    assert metrics.refusal_reason(field) == reason


@given(st.text())
def test_there_are_no_other_reasons(field: str) -> None:
    known = {reason for _, reason in metrics._REASONS} | {"other"}
    assert {metrics.refusal_reason(field), metrics.refusal_reason(f"{LIMITS}[{field}]")} <= known


def value(**labels: str) -> float:
    return REGISTRY.get_sample_value("cardwise_webhook_refusals_total", labels) or 0.0


def test_a_refusal_is_counted_by_its_reason() -> None:
    client = shell.create_app(Known(), WebhookSettings()).test_client()
    before, others = value(path="/mutate", reason="memory"), value(path="/mutate", reason="other")
    answer = client.post("/mutate", data=body(build.pod(gpu_mem="-1")), content_type="application/json").get_json()
    assert not answer["response"]["allowed"]
    assert value(path="/mutate", reason="memory") == before + 1
    assert value(path="/mutate", reason="other") == others


def test_lines_about_a_review_say_its_pod(monkeypatch: pytest.MonkeyPatch, context: None) -> None:
    del context
    contexts: list[dict[str, Any]] = []

    def keep_context(*_: object) -> None:
        contexts.append(structlog.contextvars.get_contextvars())
        raise RuntimeError

    monkeypatch.setattr(shell, "DECIDE_BY_PATH", {"/mutate": keep_context})
    client = shell.create_app(Known(), WebhookSettings()).test_client()
    pod = build.pod("p", uid="u-1", gpu_mem=1)
    del pod["metadata"]["name"]
    pod["metadata"]["generateName"] = "job-"
    for sent in (pod, build.pod("q", namespace="team")):
        client.post("/mutate", data=body(sent), content_type="application/json")
    assert [context["pod"].rpartition("/")[2] for context in contexts] == ["job-", "q"]
    assert [context["uid"] for context in contexts] == ["u-1", ""]
    assert json.dumps(contexts), "a log line can say it"


def test_staleness_is_exported_by_kind() -> None:
    registry = CollectorRegistry()
    registry.register(metrics.StalenessCollector(lambda: {"namespaces": 3.5}))
    assert registry.get_sample_value("cardwise_webhook_staleness_seconds", {"kind": "namespaces"}) == 3.5
