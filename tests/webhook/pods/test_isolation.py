"""The MPS mode of a pod: its default, impossible modes, and the limits in the environment."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from cardwise.core.api import mps, names
from cardwise.core.api.mps import Mode, SmPercent
from cardwise.core.values.decoded import Json
from tests import build
from tests.webhook.reviews import Known, on_validate, patched
from tests.webhook.sharing import SETTINGS, admitted, decision_on, env, judged, refused, sidecar
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import WebhookSettings
from webhook.pods.isolation import FIELD
from webhook.server.review import Decision

PLAIN = WebhookSettings()  # without agents
LIMIT, PERCENT = mps.LIMIT_ENV, mps.PERCENT_ENV
PER_CARD, PER_NODE = Known(scopes=frozenset({"card"})), Known(scopes=frozenset({"card", "node"}))


def pod_with_mode(mode: str | None = None, **resources: Any) -> Json:
    return build.pod(annotations={} if mode is None else {names.MPS: mode}, **(resources or {"gpu_mem": 8138}))


def mode(pod: Json) -> str | None:
    stored_mode: str | None = pod["metadata"]["annotations"].get(names.MPS)
    return stored_mode


def test_mode_names_match_the_core() -> None:
    assert {names.MPS, names.SM_PERCENT, names.SHARE_AGENT, names.FRAMEWORKS} <= names.USER_ANNOTATIONS
    assert (mps.MODE, mps.SM_PERCENT) == (names.MPS, names.SM_PERCENT)


@pytest.mark.parametrize("own_mode", list(Mode))
def test_annotated_mode_stays(own_mode: str) -> None:
    after, _ = admitted(pod_with_mode(own_mode), settings=WebhookSettings(mps=Mode.REQUIRED))
    assert mode(after) == own_mode


@pytest.mark.parametrize("default_mode", list(Mode))
def test_default_mode_is_annotated_on_pods_with_cards_only(default_mode: Mode) -> None:
    settings = WebhookSettings(mps=default_mode)
    assert mode(admitted(pod_with_mode(), settings=settings)[0]) == default_mode
    assert mode(admitted(pod_with_mode(gpu_count=1), settings=settings)[0]) == default_mode
    plain = build.pod(containers=[build.container("a", share=1)])
    assert mode(admitted(plain, settings=settings)[0]) is None


def test_mode_precedence_is_pod_namespace_setting() -> None:
    known = Known(namespaces={"team": Defaults(mps="required")}, scopes=frozenset({"card"}))
    assert mode(admitted(pod_with_mode(), known, namespace="team")[0]) == "required"
    assert mode(admitted(pod_with_mode("off"), known, namespace="team")[0]) == "off"
    out = pod_with_mode()
    out["metadata"]["annotations"][names.DEFAULTS_OPT_OUT] = "disabled"
    assert mode(admitted(out, known, namespace="team")[0]) == "preferred"


def test_unknown_mode_error_lists_the_modes() -> None:
    assert refused(pod_with_mode("on")) == f"{FIELD}: 'on' is not a mode of MPS; write one of: off, preferred, required"
    known = Known(namespaces={"team": Defaults(mps="yes")})
    message = decision_on(pod_with_mode(), known, namespace="team").message
    assert message.startswith(f"namespace team: metadata.annotations[{names.MPS}]: 'yes' is not a mode of MPS")
    # Pods without a request may have any value.
    assert decision_on(build.pod(containers=[build.container("a", share=1)], annotations={names.MPS: "on"})).allowed


def validate_in_namespace(namespace: str, pod: Json, known: Known, settings: WebhookSettings = SETTINGS) -> Decision:
    """The warnings of /validate for the pod that /mutate returned."""
    after = patched(pod, decision_on(pod, known, settings, namespace))
    return on_validate(after, "pods", known, settings, namespace=namespace)


@pytest.mark.parametrize(
    ("setting", "namespace", "bound"),
    [
        ("required", "", "required"),
        ("off", "required", "required"),
        ("preferred", "required", "required"),
        ("required", "off", "required"),  # users who may create a namespace cannot exempt themselves
        ("preferred", "", "preferred"),
    ],
)
def test_pod_may_only_strengthen_the_minimum_mode(setting: str, namespace: str, bound: str) -> None:
    settings = replace(SETTINGS, min_mps=Mode(setting))
    known = Known(namespaces={"team": Defaults(min_mps=namespace)}, scopes=frozenset({"card"}))
    for own_mode in Mode:
        decision = validate_in_namespace("team", pod_with_mode(own_mode), known, settings)
        assert decision.allowed == (own_mode.isolation >= Mode(bound).isolation), own_mode
    problem = f"{FIELD}: off is less than the {bound} that the administrators require of pods that share GPUs here"
    message = validate_in_namespace("team", pod_with_mode("off"), known, settings).message
    assert message == f"{problem}; write {bound}, or remove the annotation"
    assert mode(admitted(pod_with_mode(), known, settings, "team")[0]) == bound, "so does who says nothing"


def test_minimum_mode_cannot_be_bypassed() -> None:
    known = Known(namespaces={"team": Defaults(min_mps="required")}, scopes=frozenset({"card"}))
    out = pod_with_mode("off")
    out["metadata"]["annotations"][names.DEFAULTS_OPT_OUT] = "disabled"
    waiting = replace(SETTINGS, oversize="wait")
    split = pod_with_mode("off", gpu_mem=64, gpu_count=2)
    for pod, settings in ((out, SETTINGS), (out, waiting), (split, SETTINGS), (split, waiting)):
        assert "is less than the required" in validate_in_namespace("team", pod, known, settings).message


def test_minimum_mode_does_not_apply_to_whole_cards() -> None:
    settings = replace(SETTINGS, min_mps=Mode.REQUIRED)
    after, _ = admitted(pod_with_mode("off", gpu_count=2), PER_CARD, settings)
    assert mode(after) == "off"
    mixed = build.pod(
        annotations={names.MPS: "off"},
        containers=[build.container("a", gpu_count=1), build.container("b", gpu_mem=64)],
    )
    assert "is less than the required" in validate_in_namespace("team", mixed, PER_CARD, settings).message


def test_invalid_minimum_mode_error_names_the_namespace_annotation() -> None:
    known = Known(namespaces={"team": Defaults(min_mps="much")})
    assert "'much' is not a mode of MPS" in decision_on(pod_with_mode(), known, namespace="team").message


def percent(pod: Json) -> str | None:
    stored_percent: str | None = pod["metadata"]["annotations"].get(names.SM_PERCENT)
    return stored_percent


def test_percentage_source_is_annotated_if_not_the_default() -> None:
    by_memory = WebhookSettings(sm_percent=SmPercent.MEMORY)
    assert percent(admitted(pod_with_mode())[0]) is None
    assert percent(admitted(pod_with_mode(), settings=by_memory)[0]) == "memory"
    assert percent(admitted(pod_with_mode("off"), settings=by_memory)[0]) is None, "it has no percentage"
    known = Known(namespaces={"team": Defaults(sm_percent="memory"), "other": Defaults(sm_percent="core")})
    assert percent(admitted(pod_with_mode(), known, namespace="team")[0]) == "memory"
    assert percent(admitted(pod_with_mode(), known, namespace="other", settings=by_memory)[0]) is None
    own = pod_with_mode()
    own["metadata"]["annotations"][names.SM_PERCENT] = "core"
    after, _ = admitted(own, known, namespace="team")
    assert percent(after) == "core"
    assert PERCENT not in env(after), "before placement nobody knows the GPU"


def test_unknown_percentage_source_is_refused() -> None:
    bad = pod_with_mode()
    bad["metadata"]["annotations"][names.SM_PERCENT] = "50"
    says = "'50' is not a source for the percentage; write one of: core, memory"
    assert refused(bad) == f"metadata.annotations[{names.SM_PERCENT}]: {says}"
    known = Known(namespaces={"team": Defaults(sm_percent="50")})
    assert decision_on(pod_with_mode(), known, namespace="team").message.startswith(
        "namespace team: metadata.annotations["
    )


@pytest.mark.parametrize("amounts", [{"gpu_mem": 64, "gpu_count": 2}, {"gpu_count": 2}], ids=["split", "whole"])
def test_default_mode_is_off_for_several_cards_without_a_node_daemon(amounts: Json) -> None:
    assert mode(admitted(pod_with_mode(**amounts))[0]) == "off"
    assert mode(admitted(pod_with_mode(**amounts), PER_CARD)[0]) == "off"
    assert mode(admitted(pod_with_mode(**amounts), PER_NODE)[0]) == "preferred"


def test_several_cards_with_required_mps_need_a_node_daemon() -> None:
    after = pod_with_mode("required", gpu_mem=2000, gpu_count=2)
    first = decision_on(after, PER_CARD, PLAIN)
    assert first.allowed
    stored = patched(after, first)
    message = judged(stored, PER_CARD).message
    assert message.startswith(f"{FIELD}: container main has several GPUs, and on every node each")
    assert "--scope=node" in message
    grows = judged(stored, PER_CARD, WebhookSettings(oversize="wait"))
    assert grows.allowed
    assert "the pod waits" in grows.warnings[0]
    assert judged(stored, PER_NODE).warnings == ()


def test_several_cards_with_preferred_mps_get_a_warning() -> None:
    _, warnings = admitted(pod_with_mode("preferred", gpu_count=2), PER_CARD, PLAIN)
    assert len(warnings) == 1
    assert "can run only on nodes without an MPS manager: write off" in warnings[0]
    assert admitted(pod_with_mode("preferred", gpu_count=2), PER_NODE, PLAIN)[1] == ()


def test_required_mps_without_a_manager_waits_with_a_warning() -> None:
    _, warnings = admitted(pod_with_mode("required"), Known(), PLAIN)
    assert warnings == (f"{FIELD}: no node has an MPS manager now; the pod waits until a node has one",)
    assert admitted(pod_with_mode("required"), PER_CARD, PLAIN)[1] == ()
    assert admitted(pod_with_mode("preferred"), Known(), PLAIN)[1] == ()


@pytest.mark.parametrize(("mem", "warned"), [(512, True), (543, True), (544, False)])
def test_too_small_mps_share_gets_a_warning(mem: int, warned: bool) -> None:
    """On an H200 no program starts with a limit of 512 MiB: tests/realcard."""
    _, warnings = admitted(pod_with_mode("preferred", gpu_mem=mem), PER_CARD, PLAIN)
    assert [f"container main has {mem} MiB" in text for text in warnings] == [True] * warned
    assert admitted(pod_with_mode("off", gpu_mem=mem), PER_CARD, PLAIN)[1] == ()
    assert admitted(pod_with_mode("preferred", gpu_mem=mem), Known(), PLAIN)[1] == ()
    assert len(admitted(pod_with_mode("required", gpu_mem=mem), Known(), PLAIN)[1]) == 1 + warned


def test_of_several_cards_each_has_a_context() -> None:
    several = pod_with_mode("preferred", gpu_mem=1000, gpu_count=2)
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
    ("own_mode", "amounts", "percent"),
    [
        pytest.param("off", {"gpu_mem": 64, "gpu_core": 30}, None, id="off"),
        pytest.param("required", {"gpu_count": 1}, None, id="whole"),
        pytest.param("required", {"gpu_mem": 64, "gpu_count": 2, "gpu_core": 60}, "30", id="split"),
    ],
)
def test_no_memory_limit_variable_for_several_cards(own_mode: str, amounts: Json, percent: str | None) -> None:
    variables = env(admitted(pod_with_mode(own_mode, **amounts), PER_NODE, PLAIN)[0]["spec"]["containers"][0])
    assert LIMIT not in variables
    assert variables.get(PERCENT, {}).get("value") == percent


@pytest.mark.parametrize("text", ["0=100G", "0=0", "1.5G", "", "0=8138M,1=1M"])
def test_user_variables_never_lift_an_mps_limit(text: str) -> None:
    pod = pod_with_mode("preferred")
    entries = [{"name": LIMIT, "value": text}, {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]
    pod["spec"]["containers"][0]["env"] = [*entries, {"name": LIMIT, "value": "0=9G"}]
    after, warnings = admitted(pod, settings=PLAIN)
    variables = env(after["spec"]["containers"][0])
    assert variables[LIMIT] == {"name": LIMIT, "value": "0=8138M"}
    assert mps.PIPE_ENV not in variables
    assert any(LIMIT in text and "replaced" in text for text in warnings)


def test_copy_without_mps_loses_the_limits() -> None:
    after, _ = admitted(pod_with_mode("preferred", gpu_mem=1000, gpu_core=20), settings=PLAIN)
    assert admitted(after, settings=PLAIN)[1] == ()
    after["metadata"]["annotations"][names.MPS] = "off"
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
    ],
)
@pytest.mark.parametrize("change", ["instead", "beside"])
def test_later_changes_by_another_webhook_are_refused(changed: Json, change: str) -> None:
    stored, _ = admitted(pod_with_mode("preferred"), settings=PLAIN)
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


def test_mode_is_set_before_the_agent_is_injected() -> None:
    after, _ = admitted(pod_with_mode(), settings=SETTINGS)
    assert mode(after) == "preferred"
    assert after["spec"]["initContainers"][0]["name"] == "cardwise-agent"
