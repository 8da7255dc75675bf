"""Defaults of a namespace for its plain pods."""

from typing import Any

import pytest

from cardwise.core.api import names, request
from tests import build
from tests.webhook.reviews import Known, on_defaults, on_mutate, patched
from webhook.cluster.namespaces import Defaults, defaults_of
from webhook.server import review, sizes

TEAM = Known(namespaces={"team": Defaults("2Gi", "spread")})


def decide(pod: dict[str, object], known: Known = TEAM, namespace: str = "team") -> review.Decision:
    return on_defaults(pod, "pods", known, namespace=namespace)


def place_pod(pod: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["nodeName"] = "n1"
    return pod


def request_after(pod: dict[str, object], known: Known = TEAM) -> request.PodRequest | None:
    decision = decide(pod, known)
    assert decision.allowed, decision.message
    return request.parse_mutated(patched(pod, decision))


def test_a_plain_pod_gets_the_default_share_in_its_first_container() -> None:
    pod_request = request_after(build.pod(containers=[build.container("a"), build.container("b")]))
    assert pod_request is not None
    assert [(c.key, c.mem) for c in pod_request.containers] == [("0", 2048)]
    assert pod_request.policy == "spread"


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(build.pod(annotations={names.DEFAULTS_OPT_OUT: "disabled"}), id="opted out"),
        pytest.param(
            build.pod(containers=[{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]),
            id="requests nvidia.com/gpu",
        ),
        pytest.param(place_pod(build.pod()), id="kubectl debug node/n1"),
    ],
)
def test_some_pods_take_no_defaults(pod: dict[str, object]) -> None:
    assert decide(pod).patch == []


def test_a_namespace_without_a_default_share_changes_no_plain_pod() -> None:
    assert decide(build.pod(), Known(namespaces={"team": Defaults("", "spread")})).patch == []


@pytest.mark.parametrize(
    "known", [Defaults(policy="binpack"), Defaults(policy="fullest")], ids=["a good policy", "a bad policy"]
)
@pytest.mark.parametrize("large", [False, True])
def test_pod_without_defaults_is_not_refused_by_gpu_rules(known: Defaults, large: bool) -> None:
    """Rule 6: the pod requests no card and gets none."""
    pod = build.pod()
    if large:
        pod["spec"]["containers"][0]["env"] = [{"name": f"E{i}"} for i in range(sizes.MAX_CONTAINER_ENTRIES + 1)]
    decision = decide(pod, Known(namespaces={"team": known}))
    assert (decision.allowed, decision.patch) == (True, [])


def test_other_namespaces_have_no_defaults() -> None:
    assert decide(build.pod(), namespace="other").patch == []


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        (Defaults("much"), f"namespace team: metadata.annotations[{names.DEFAULT_GPU_MEM}]: 'much' is not a quantity"),
        (Defaults("0"), "write at least 1"),
        (
            Defaults("1Gi", "best"),
            f"namespace team: metadata.annotations[{names.POLICY}]: 'best' is not a placement policy",
        ),
        (
            Defaults("1Gi", "spread-by=a b"),
            f"namespace team: metadata.annotations[{names.POLICY}]: 'a b' is not the key of a label; write the key of",
        ),
    ],
)
def test_invalid_defaults_error_names_the_namespace(defaults: Defaults, says: str) -> None:
    decision = decide(build.pod(), Known(namespaces={"team": defaults}))
    assert not decision.allowed
    assert says in decision.message


def test_only_labelled_namespaces_have_defaults() -> None:
    annotations = {names.DEFAULT_GPU_MEM: "1Gi"}
    assert defaults_of({"metadata": {"annotations": annotations}}) is None
    assert defaults_of({"metadata": {"labels": {names.DEFAULTS_LABEL: "disabled"}, "annotations": annotations}}) is None
    assert defaults_of(
        {"metadata": {"labels": {names.DEFAULTS_LABEL: "enabled"}, "annotations": annotations}}
    ) == Defaults("1Gi")


def test_the_policy_reaches_pods_with_a_request_of_their_own() -> None:
    pod = build.pod(gpu_mem=1)
    decision = on_mutate(pod, "pods", TEAM, namespace="team")
    assert patched(pod, decision)["metadata"]["annotations"][names.POLICY] == "spread"
