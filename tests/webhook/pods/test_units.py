"""The unit of bare gpu-mem numbers in a namespace, from the request to the stored object."""

from dataclasses import replace

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB, Unit
from tests import build
from tests.webhook.reviews import Known, mutate_object, on_advise, on_defaults, on_validate, patched
from tests.webhook.rewriting import context
from tests.webhook.sharing import SETTINGS, admitted, decision_on
from webhook.cluster.cards import CardSizes
from webhook.cluster.namespaces import Defaults
from webhook.pods import amounts
from webhook.pods.context import WebhookSettings
from webhook.pods.pod import PodUnderReview

GIB = WebhookSettings(unit=Unit.GIB, share_agent=SETTINGS.share_agent)
CARDS = Known(known_cards=CardSizes(largest=MiB(16276), max_cards=2, smallest=MiB(16276)))
FIELD = "spec.containers[0].resources.limits[aliyun.com/gpu-mem]"


def limits(pod: Json, index: int = 0) -> Json:
    stored_limits: Json = pod["spec"]["containers"][index]["resources"]["limits"]
    return stored_limits


@pytest.mark.parametrize(
    ("text", "mib"),
    [("2", "2048"), ("8", "8192"), ("8Gi", "8192"), ("8138Mi", "8138"), ("0.5", "512"), ("8k", "8192000")],
)
def test_a_bare_number_counts_gib_and_is_stored_in_mib(text: str, mib: str) -> None:
    pod = build.pod(gpu_mem=text)
    after, _ = admitted(pod, settings=GIB)
    assert limits(after)[names.GPU_MEM] == mib
    assert after == admitted(pod | {"spec": build.pod(gpu_mem=f"{mib}Mi")["spec"]}, settings=GIB)[0]


def test_bare_requests_and_limits_have_the_same_unit() -> None:
    pod = build.pod(gpu_mem="2")
    container = pod["spec"]["containers"][0]
    for request, refused in (("2", ""), ("2Gi", ""), ("2048Mi", ""), ("2048", "2048Gi differs from the limit 2Gi")):
        container["resources"]["requests"] = {names.GPU_MEM: request}
        decision = decision_on(pod, settings=GIB)
        assert (not decision.allowed, refused in decision.message) == (bool(refused), True)


def test_copied_pod_and_template_keep_the_amount() -> None:
    stored, _ = admitted(build.pod(gpu_mem="2"), settings=GIB)
    copy = {"metadata": {"name": "copy"}, "spec": stored["spec"]}
    assert limits(admitted(copy, settings=GIB)[0]) == limits(stored)
    of_mib_days, _ = admitted(build.pod(gpu_mem="8138"))
    assert limits(admitted(of_mib_days, settings=GIB)[0])[names.GPU_MEM] == "8138"


def test_amounts_from_a_limit_range_are_mib() -> None:
    """The LimitRange's amounts are stored in MiB, and Kubernetes adds them to pods before the webhook sees the pods."""
    pod = build.pod(gpu_mem="2048")
    pod["spec"]["containers"] += [{"name": "other", "resources": {"limits": {names.GPU_MEM: "2"}}}]
    pod["spec"]["containers"][0] |= {"name": "main"}
    pod["spec"]["containers"][0]["resources"]["requests"] = {names.GPU_MEM: "2048"}
    text = (
        "LimitRanger plugin set: aliyun.com/gpu-mem, cpu request for container main; "
        "aliyun.com/gpu-mem limit for container main; memory limit for container other"
    )
    pod["metadata"]["annotations"] = {names.LIMIT_RANGER: text}
    after, _ = admitted(pod, settings=GIB)
    assert [limits(after, i)[names.GPU_MEM] for i in (0, 1)] == ["2048", "2048"]
    init = text.replace("container main", "init container main")
    of_an_init_container = PodUnderReview(pod | {"metadata": {"annotations": {names.LIMIT_RANGER: init}}})
    amounts.add_units(of_an_init_container, context(unit=Unit.GIB))
    assert "2048Gi" in str(of_an_init_container.to_json())


def test_the_default_of_a_namespace_counts_the_unit_of_the_namespace() -> None:
    known = Known(namespaces={"team": Defaults(gpu_mem="2")})
    for settings, mib in ((GIB, "2048"), (WebhookSettings(), "2")):
        decision = on_defaults(build.pod(), "pods", known, settings, namespace="team")
        assert decision.allowed
        assert {names.GPU_MEM: mib}.items() <= limits(patched(build.pod(), decision)).items()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100u", "100u means GiB here, and is less than 1 MiB; write a unit, as in 512Mi"),
        ("8G", "8G means GiB here, more than any GPU has; write a unit, as in 8138Mi or 8Gi"),
        ("-2", "-2 must be above zero; write at least 1Mi, or leave it out"),
        ("0", "0 must be above zero; write at least 1Mi, or leave it out"),
    ],
)
def test_invalid_amount_error_names_the_field(text: str, message: str) -> None:
    assert decision_on(build.pod(gpu_mem=text), settings=GIB).message == f"{FIELD}: {message}"


def test_mib_numbers_read_as_gib_are_refused() -> None:
    """gpushare's samples/4.yaml says 16276, and MiB."""
    assert decision_on(build.pod(gpu_mem="16276"), CARDS, GIB).message == (
        f"{FIELD}: 16276 means GiB in this namespace (cardwise.dev/gpu-mem-unit, or webhook.gpuMemUnit of the chart): "
        "16666624 MiB, more than all GPUs of any node have (32552); write 16276Mi where MiB are meant"
    )
    assert decision_on(build.pod(gpu_mem="16276"), Known(), GIB).allowed, "no GPU is known"
    assert decision_on(build.pod(gpu_mem="16276"), CARDS, replace(GIB, oversize="wait")).allowed


def test_refusal_shows_gib_too() -> None:
    pod = mutate_object(build.pod(gpu_mem="20"), "pods", CARDS, GIB)
    decision = on_validate(pod, "pods", CARDS, GIB)
    assert "20480 MiB (20 GiB) is more than the largest GPU has (16276); request at most 16276Mi" in decision.message


@pytest.mark.parametrize(
    ("text", "settings", "warning"),
    [
        (
            "1395864371200m",
            WebhookSettings(),
            "1395864371200m (1.3Gi) is not a whole number of MiB and counts as 1332Mi",
        ),
        ("1300m", GIB, "1331.2Mi (1.3Gi) is not a whole number of MiB and counts as 1332Mi"),
    ],
)
def test_fractions_of_a_mib_are_rounded_up_with_a_warning(text: str, settings: WebhookSettings, warning: str) -> None:
    decision = decision_on(build.pod(gpu_mem=text), CARDS, settings)
    assert decision.warnings == (f"{FIELD}: {warning}",)
    assert limits(patched(build.pod(gpu_mem=text), decision))[names.GPU_MEM] == "1332"


def test_template_warnings_use_the_namespaces_unit() -> None:
    def advice_on(amount: str, settings: WebhookSettings) -> tuple[str, ...]:
        manifest = {"spec": {"template": build.pod(gpu_mem=amount)}}
        return on_advise(manifest, "deployments", CARDS, settings).warnings

    assert advice_on("2", GIB) == ()
    assert "2 means 2 MiB" in advice_on("2", WebhookSettings(min_share=256))[0]
    assert "8138 means GiB in this namespace" in advice_on("8138", GIB)[0]
    assert advice_on("8138", WebhookSettings()) == advice_on("8138Mi", GIB) == ()
