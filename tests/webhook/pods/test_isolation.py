"""The isolation that a pod demands: its default, impossible demands, and the limits in the environment."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from cardwise.core.api import mps, names
from cardwise.core.api.isolation import Isolation, strongest_demand
from cardwise.core.api.mps import SmPercent
from cardwise.core.values.decoded import Json
from tests import build
from tests.webhook.reviews import Known, on_validate, patched
from tests.webhook.sharing import SETTINGS, admitted, decision_on, env, judged, refused, sidecar
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import OversizePolicy, WebhookSettings
from webhook.pods.isolation import FIELD
from webhook.server.review import Decision

PLAIN = WebhookSettings()  # without agents
LIMIT, PERCENT = mps.LIMIT_ENV, mps.PERCENT_ENV
PER_CARD, PER_NODE = Known(scopes=frozenset({"card"})), Known(scopes=frozenset({"card", "node"}))


def pod_demanding(isolation: str | None = None, **resources: Any) -> Json:
    return build.pod(
        annotations={} if isolation is None else {names.ISOLATION: isolation}, **(resources or {"gpu_mem": 8138})
    )


def isolation(pod: Json) -> str | None:
    stored_isolation: str | None = pod["metadata"]["annotations"].get(names.ISOLATION)
    return stored_isolation


def test_users_may_write_the_annotations() -> None:
    assert {names.ISOLATION, names.SM_PERCENT, names.SHARE_AGENT, names.FRAMEWORKS} <= names.USER_ANNOTATIONS
    assert mps.SM_PERCENT == names.SM_PERCENT


@pytest.mark.parametrize("demand", list(Isolation))
def test_own_demand_stays_where_there_is_no_minimum(demand: str) -> None:
    assert isolation(admitted(pod_demanding(demand))[0]) == demand
    assert isolation(admitted(pod_demanding(demand, gpu_count=1))[0]) == demand


@pytest.mark.parametrize("minimum", list(Isolation))
def test_the_default_is_the_best_that_the_card_offers_and_at_least_the_minimum(minimum: Isolation) -> None:
    settings = WebhookSettings(isolation=minimum)
    assert isolation(admitted(pod_demanding(), settings=settings)[0]) == strongest_demand(minimum, Isolation.ADVISORY)
    whole = pod_demanding(gpu_count=1)
    assert isolation(admitted(whole, settings=settings)[0]) == "advisory", "nobody shares its GPU"
    plain = build.pod(containers=[build.container("a", share=1)])
    assert isolation(admitted(plain, settings=settings)[0]) is None


def test_unknown_demand_error_lists_the_tiers() -> None:
    assert refused(pod_demanding("on")) == (
        f"{FIELD}: 'on' is not a tier of isolation; write one of: none, advisory, mps, kernel"
    )
    # Pods without a request may have any value.
    plain = build.pod(containers=[build.container("a", share=1)], annotations={names.ISOLATION: "on"})
    assert decision_on(plain).allowed


@pytest.mark.parametrize("defaults", ["enabled", "disabled"])
def test_unknown_minimum_error_names_the_namespace(defaults: str) -> None:
    known = Known(namespaces={"team": Defaults(isolation="much")})
    pod = pod_demanding()
    pod["metadata"]["annotations"][names.DEFAULTS_OPT_OUT] = defaults
    message = decision_on(pod, known, namespace="team").message
    assert message.startswith(f"namespace team: {FIELD}: 'much' is not a tier of isolation")


def validate_in_namespace(namespace: str, pod: Json, known: Known, settings: WebhookSettings = SETTINGS) -> Decision:
    """The warnings of /validate for the pod that /mutate returned."""
    after = patched(pod, decision_on(pod, known, settings, namespace))
    return on_validate(after, "pods", known, settings, namespace=namespace)


@pytest.mark.parametrize(
    ("cluster", "namespace", "minimum"),
    [
        ("none", "", "none"),
        ("none", "none", "none"),
        ("none", "advisory", "advisory"),
        ("none", "mps", "mps"),
        ("advisory", "mps", "mps"),
        ("advisory", "", "advisory"),
        ("mps", "", "mps"),
        ("mps", "kernel", "kernel"),
        ("kernel", "", "kernel"),
        ("mps", "none", "mps"),  # users who may create a namespace cannot exempt themselves
    ],
)
def test_the_greatest_of_pod_namespace_and_cluster_counts(cluster: str, namespace: str, minimum: str) -> None:
    settings = replace(SETTINGS, isolation=Isolation(cluster))
    known = Known(namespaces={"team": Defaults(isolation=namespace)}, scopes=frozenset({"card"}))
    for demand in (None, Isolation.ADVISORY, Isolation.MPS, Isolation.KERNEL):
        expected = strongest_demand(demand or Isolation.ADVISORY, Isolation(minimum))
        pod = pod_demanding(demand)
        assert isolation(admitted(pod, known, settings, "team")[0]) == expected
    out = validate_in_namespace("team", pod_demanding("none"), known, settings)
    assert out.allowed == (minimum == "none")
    if not out.allowed:
        problem = f"{FIELD}: none is less than the {minimum} that the administrators require of pods that share GPUs"
        assert out.message == f"{problem} here; write {minimum}, or remove the annotation"


def test_a_demand_that_was_weakened_after_mutate_is_refused() -> None:
    settings = replace(PLAIN, isolation=Isolation.MPS)
    stored, _ = admitted(pod_demanding(), PER_CARD, settings)
    assert judged(stored, PER_CARD, settings).allowed
    stored["metadata"]["annotations"][names.ISOLATION] = "advisory"
    assert "advisory is less than the mps" in judged(stored, PER_CARD, settings).message


def test_minimum_cannot_be_bypassed() -> None:
    known = Known(namespaces={"team": Defaults(isolation="advisory")}, scopes=frozenset({"card"}))
    out = pod_demanding("none")
    out["metadata"]["annotations"][names.DEFAULTS_OPT_OUT] = "disabled"
    waiting = replace(SETTINGS, oversize="wait")
    split = pod_demanding("none", gpu_mem=64, gpu_count=2)
    for pod, settings in ((out, SETTINGS), (out, waiting), (split, SETTINGS), (split, waiting)):
        assert "none is less than the advisory" in validate_in_namespace("team", pod, known, settings).message


def test_minimum_does_not_apply_to_whole_cards() -> None:
    settings = replace(SETTINGS, isolation=Isolation.MPS)
    after, _ = admitted(pod_demanding("none", gpu_count=2), PER_CARD, settings)
    assert isolation(after) == "none"
    mixed = build.pod(
        annotations={names.ISOLATION: "none"},
        containers=[build.container("a", gpu_count=1), build.container("b", gpu_mem=64)],
    )
    assert "none is less than the mps" in validate_in_namespace("team", mixed, PER_CARD, settings).message


def percent(pod: Json) -> str | None:
    stored_percent: str | None = pod["metadata"]["annotations"].get(names.SM_PERCENT)
    return stored_percent


def test_percentage_source_is_annotated_if_not_the_default() -> None:
    by_memory = WebhookSettings(sm_percent=SmPercent.MEMORY)
    assert percent(admitted(pod_demanding())[0]) is None
    assert percent(admitted(pod_demanding(), settings=by_memory)[0]) == "memory"
    assert percent(admitted(pod_demanding("none"), settings=by_memory)[0]) is None, "it has no percentage"
    known = Known(namespaces={"team": Defaults(sm_percent="memory"), "other": Defaults(sm_percent="core")})
    assert percent(admitted(pod_demanding(), known, namespace="team")[0]) == "memory"
    assert percent(admitted(pod_demanding(), known, namespace="other", settings=by_memory)[0]) is None
    own = pod_demanding()
    own["metadata"]["annotations"][names.SM_PERCENT] = "core"
    after, _ = admitted(own, known, namespace="team")
    assert percent(after) == "core"
    assert PERCENT not in env(after), "before placement nobody knows the GPU"


def test_unknown_percentage_source_is_refused() -> None:
    bad = pod_demanding()
    bad["metadata"]["annotations"][names.SM_PERCENT] = "50"
    says = "'50' is not a source for the percentage; write one of: core, memory"
    assert refused(bad) == f"metadata.annotations[{names.SM_PERCENT}]: {says}"
    known = Known(namespaces={"team": Defaults(sm_percent="50")})
    assert decision_on(pod_demanding(), known, namespace="team").message.startswith(
        "namespace team: metadata.annotations["
    )


@pytest.mark.parametrize("demand", [None, "advisory"])
def test_several_cards_are_without_mps_where_no_daemon_serves_several(demand: str | None) -> None:
    pod = pod_demanding(demand, gpu_mem=64, gpu_count=2)
    for known in (Known(), PER_CARD):
        after, warnings = admitted(pod, known)
        assert (isolation(after), warnings) == ("none", ())
    assert isolation(admitted(pod, PER_NODE)[0]) == "advisory"


def test_a_single_node_whose_daemon_serves_all_cards_does_not_close_the_other_nodes() -> None:
    pod = pod_demanding(gpu_mem=2000, gpu_count=2)
    known = replace(PER_NODE, mostly_per_card=True)
    after, warnings = admitted(pod, known)
    assert (isolation(after), warnings) == ("none", ())
    problem = "container main has several GPUs, and on most nodes each MPS daemon serves a single GPU"
    warned = f"{FIELD}: {problem}; the pod can run only on the other nodes"
    for demand, minimum in (("mps", Isolation.NONE), (None, Isolation.ADVISORY)):
        pod = pod_demanding(demand, gpu_mem=2000, gpu_count=2)
        after, warnings = admitted(pod, known, replace(PLAIN, isolation=minimum))
        assert (isolation(after), warnings) == (demand or "advisory", (warned,))


@pytest.mark.parametrize("known", [Known(), PER_CARD, PER_NODE], ids=["no MPS", "a daemon per card", "one daemon"])
@pytest.mark.parametrize("demand", ["none", "advisory", "mps", "kernel"])
@pytest.mark.parametrize("count", [1, 2])
def test_whole_cards_are_admitted_with_each_demand_and_each_minimum(known: Known, demand: str, count: int) -> None:
    for minimum in Isolation:
        after, warnings = admitted(pod_demanding(demand, gpu_count=count), known, replace(SETTINGS, isolation=minimum))
        assert (isolation(after), warnings) == (demand, ())


def test_demanded_limits_by_the_driver_wait_with_a_warning_where_no_driver_has_them() -> None:
    _, warnings = admitted(pod_demanding("kernel"), PER_CARD, PLAIN)
    reason = "the driver of no node limits memory (driver 615 or later does); the pod waits until one does"
    assert warnings == (f"{FIELD}: {reason}",)
    assert admitted(pod_demanding("kernel"), replace(PER_CARD, kernel_limit=True), PLAIN)[1] == ()
    assert admitted(pod_demanding("mps"), Known(kernel_limit=True), PLAIN)[1] == (), "that meets mps as well"
    split = admitted(pod_demanding("mps", gpu_mem=2000, gpu_count=2), Known(kernel_limit=True), PLAIN)[1]
    assert "no node has an MPS manager now" in split[0], "it limits shares of one GPU only"


@pytest.mark.parametrize("oversize", ["refuse", "wait"])
@pytest.mark.parametrize("known", [Known(kernel_limit=True), PER_NODE])
def test_a_share_of_several_cards_has_no_limit_by_the_driver(known: Known, oversize: OversizePolicy) -> None:
    settings = replace(PLAIN, oversize=oversize)
    split = pod_demanding("kernel", gpu_mem=2000, gpu_count=2)
    message = judged(patched(split, decision_on(split, known, settings)), known, settings).message
    problem = "container main has a share of several GPUs, and the driver limits shares of a single GPU only"
    assert message == f"{FIELD}: {problem}; request one GPU in each container, or write mps"
    required = replace(settings, isolation=Isolation.KERNEL)
    message = judged(patched(split, decision_on(split, known, required)), known, required).message
    assert message == f"{FIELD}: {problem}; request one GPU in each container"


def test_several_cards_that_demand_mps_need_a_node_daemon() -> None:
    after = pod_demanding("mps", gpu_mem=2000, gpu_count=2)
    first = decision_on(after, PER_CARD, PLAIN)
    assert first.allowed
    stored = patched(after, first)
    message = judged(stored, PER_CARD).message
    assert message.startswith(f"{FIELD}: container main has several GPUs, and on every node each")
    assert message.endswith(
        "; write none, request one GPU in each container, or have cardwise-mps run with --scope=node"
    )
    grows = judged(stored, PER_CARD, WebhookSettings(oversize="wait"))
    assert grows.allowed
    assert "the pod waits" in grows.warnings[0]
    assert judged(stored, PER_NODE).warnings == ()


def test_several_cards_under_a_minimum_are_never_without_mps() -> None:
    split = pod_demanding(gpu_mem=2000, gpu_count=2)
    required = replace(PLAIN, isolation=Isolation.MPS)
    stored = patched(split, decision_on(split, PER_CARD, required))
    assert isolation(stored) == "mps"
    message = judged(stored, PER_CARD, required).message
    assert "; request one GPU in each container, or" in message, "it may not write none"
    after, warnings = admitted(split, PER_CARD, replace(PLAIN, isolation=Isolation.ADVISORY))
    assert isolation(after) == "advisory"
    assert "can run only on nodes without an MPS manager: request one GPU" in warnings[0]


def test_demanded_mps_without_a_manager_waits_with_a_warning() -> None:
    _, warnings = admitted(pod_demanding("mps"), Known(), PLAIN)
    assert warnings == (f"{FIELD}: no node has an MPS manager now; the pod waits until a node has one",)
    assert admitted(pod_demanding("mps"), PER_CARD, PLAIN)[1] == ()
    assert admitted(pod_demanding("advisory"), Known(), PLAIN)[1] == ()


@pytest.mark.parametrize(("mem", "warned"), [(512, True), (543, True), (544, False)])
def test_too_small_mps_share_gets_a_warning(mem: int, warned: bool) -> None:
    """On an H200 no program starts with a limit of 512 MiB: tests/realcard."""
    _, warnings = admitted(pod_demanding("advisory", gpu_mem=mem), PER_CARD, PLAIN)
    assert [f"container main has {mem} MiB" in text for text in warnings] == [True] * warned
    assert admitted(pod_demanding("none", gpu_mem=mem), PER_CARD, PLAIN)[1] == ()
    assert admitted(pod_demanding("advisory", gpu_mem=mem), Known(), PLAIN)[1] == ()
    assert len(admitted(pod_demanding("mps", gpu_mem=mem), Known(), PLAIN)[1]) == 1 + warned


def test_of_several_cards_each_has_a_context() -> None:
    several = pod_demanding("advisory", gpu_mem=1000, gpu_count=2)
    assert ["has 500 MiB of a GPU" in text for text in admitted(several, PER_NODE, PLAIN)[1]] == [True]


def test_mps_limits_are_in_the_format_of_mps() -> None:
    side = sidecar(build.container("side", gpu_mem=512))
    pod = build.pod(init=[side], containers=[build.container("main", gpu_mem="8Gi", gpu_core=30), {"name": "other"}])
    after, _ = admitted(pod, settings=PLAIN)
    first, second = (env(container) for container in after["spec"]["containers"])
    assert first[LIMIT] == {"name": LIMIT, "value": "0=8192M"}
    assert first[PERCENT] == {"name": PERCENT, "value": "30"}
    assert not any(name.startswith("CUDA_MPS") for name in second)
    of_side = env(after["spec"]["initContainers"][0])
    assert of_side[LIMIT]["value"] == "0=512M"
    assert PERCENT not in of_side
    for variables in (first, of_side):
        mps.check_limits(variables[LIMIT]["value"])
        assert mps.PIPE_ENV not in variables, "only the node knows the pipe"


@pytest.mark.parametrize(
    ("demand", "amounts", "percent"),
    [
        pytest.param("none", {"gpu_mem": 64, "gpu_core": 30}, None, id="none"),
        pytest.param("mps", {"gpu_count": 1}, None, id="whole"),
        pytest.param("mps", {"gpu_mem": 64, "gpu_count": 2, "gpu_core": 60}, "30", id="split"),
    ],
)
def test_no_memory_limit_variable_for_several_cards(demand: str, amounts: Json, percent: str | None) -> None:
    variables = env(admitted(pod_demanding(demand, **amounts), PER_NODE, PLAIN)[0]["spec"]["containers"][0])
    assert LIMIT not in variables
    assert variables.get(PERCENT, {}).get("value") == percent


@pytest.mark.parametrize("text", ["0=100G", "0=0", "1.5G", "", "0=8138M,1=1M"])
def test_user_variables_never_lift_an_mps_limit(text: str) -> None:
    pod = pod_demanding("advisory")
    entries = [{"name": LIMIT, "value": text}, {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]
    pod["spec"]["containers"][0]["env"] = [*entries, {"name": LIMIT, "value": "0=9G"}]
    after, warnings = admitted(pod, settings=PLAIN)
    variables = env(after["spec"]["containers"][0])
    assert variables[LIMIT] == {"name": LIMIT, "value": "0=8138M"}
    assert mps.PIPE_ENV not in variables
    assert any(LIMIT in text and "replaced" in text for text in warnings)


@pytest.mark.parametrize("amounts", [{"gpu_mem": 8138}, {"gpu_count": 1}], ids=["share", "whole"])
def test_only_the_node_names_the_tier_of_a_container(amounts: dict[str, int]) -> None:
    pod = pod_demanding("advisory", **amounts)
    pod["spec"]["containers"][0]["env"] = [{"name": names.ENV_ISOLATION, "value": "kernel"}]
    after, warnings = admitted(pod, settings=PLAIN)
    assert names.ENV_ISOLATION not in env(after["spec"]["containers"][0])
    assert any(names.ENV_ISOLATION in text for text in warnings)


def test_copy_without_mps_loses_the_limits() -> None:
    after, _ = admitted(pod_demanding("advisory", gpu_mem=1000, gpu_core=20), settings=PLAIN)
    assert admitted(after, settings=PLAIN)[1] == ()
    after["metadata"]["annotations"][names.ISOLATION] = "none"
    off, warnings = admitted(after, settings=PLAIN)
    assert not any(name.startswith("CUDA_MPS") for name in env(off["spec"]["containers"][0]))
    assert warnings


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"name": LIMIT, "value": "0=16000M"}, id="limit"),
        pytest.param({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, id="cards"),
        pytest.param({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp/x"}, id="pipe"),
        pytest.param({"name": names.ENV_LIMIT_MIB, "value": "99999"}, id="what it is told"),
        pytest.param({"name": names.ENV_ISOLATION, "value": "kernel"}, id="tier"),
    ],
)
@pytest.mark.parametrize("change", ["instead", "beside"])
def test_later_changes_by_another_webhook_are_refused(changed: Json, change: str) -> None:
    stored, _ = admitted(pod_demanding("advisory"), settings=PLAIN)
    bent = deepcopy(stored)
    container = bent["spec"]["containers"][0]
    kept = [entry for entry in container["env"] if entry["name"] != changed["name"] or change == "beside"]
    container["env"] = [*kept, changed]
    message = judged(bent, settings=PLAIN).message
    assert message.startswith("spec.containers[0].env: ")
    assert changed["name"] in message
    container["env"] = [entry for entry in container["env"] if entry["name"] != names.ENV_VISIBLE_DEVICES]
    assert names.ENV_VISIBLE_DEVICES in judged(bent, settings=PLAIN).message
    container["env"] = [*stored["spec"]["containers"][0]["env"], {"name": "theirs", "value": "x"}]
    assert judged(bent, settings=PLAIN).allowed


def test_isolation_is_set_before_the_agent_is_injected() -> None:
    after, _ = admitted(pod_demanding(), settings=SETTINGS)
    assert isolation(after) == "advisory"
    assert after["spec"]["initContainers"][0]["name"] == "cardwise-agent"
