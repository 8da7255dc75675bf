"""GPUQuotas at admission: early refusals of pods, and warnings for the quota's author."""

from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests.build import gpu_quota, resource_class
from tests.webhook.classpods import K80, P100, pod
from tests.webhook.reviews import Known, on_validate, resource_classes
from tests.webhook.rewriting import mutate
from tests.working import work
from webhook.cluster.cards import CardSizes
from webhook.cluster.gpuquotas import parse
from webhook.pods.context import WebhookSettings
from webhook.pods.gpuquotas import check_request
from webhook.server import review

CLASSES = resource_classes(resource_class(K80), resource_class(P100, model="Tesla P100"))


CARDS = {K80: CardSizes(MiB(11441), 4, MiB(11441)), P100: CardSizes(MiB(16276), 4, MiB(12198))}
ALL_CARDS = CardSizes(MiB(16276), 4, MiB(11441))


def review_pod(pod: Json, *objects: Json, namespace: str = "default", **settings: Any) -> review.Decision:
    standings = [parse(manifest) for manifest in objects]
    known = Known(known_classes=CLASSES, known_cards=ALL_CARDS, cards_of=CARDS, standings={"default": standings})
    after = mutate(pod).pod
    return on_validate(after, "pods", known, WebhookSettings(**settings), namespace=namespace)


def refusal_message(pod: Json, *objects: Json, namespace: str = "default") -> str:
    return review_pod(pod, *objects, namespace=namespace).message


def class_request(resource_class: str = K80, count: int = 1, **fields: Any) -> Json:
    mem = {names.GPU_MEM: fields["mem"]} if "mem" in fields else {}
    return pod({names.CLASS_PREFIX + resource_class: count} | mem)


@pytest.mark.parametrize(
    ("pod", "hard", "says"),
    [
        pytest.param(
            class_request(mem=5000),
            {"class": K80, "memoryMiB": "4Gi"},
            f"GPUQuota team: spec.hard[0] (class {K80}): the pod alone requests more than the quota allows: "
            "memoryMiB requested 5000, used 0, hard 4096; request less, or ask an administrator to raise the quota",
            id="memory",
        ),
        pytest.param(
            class_request(count=2, mem=5000),
            {"class": K80, "shares": 1},
            "shares requested 2, used 0, hard 1",
            id="two GPUs are two",
        ),
        pytest.param(
            class_request(count=2), {"class": K80, "gpus": 1}, "gpus requested 2, used 0, hard 1", id="whole GPUs"
        ),
        pytest.param(
            class_request(), {"class": K80, "memoryMiB": 0}, "memoryMiB requested 1, used 0, hard 0", id="none at all"
        ),
        pytest.param(
            class_request(),
            {"class": K80, "memoryMiB": 11440},
            "memoryMiB requested 11441, used 0, hard 11440",
            id="a whole GPU",
        ),
        pytest.param(
            class_request(P100, 2),
            {"memoryMiB": 24395},
            "memoryMiB requested 24396, ",
            id="two whole GPUs, the smallest of a class",
        ),
        pytest.param(
            pod({names.GPU_COUNT: 1}), {"memoryMiB": 11440}, "requested 11441, ", id="a whole GPU of any class"
        ),
        pytest.param(pod({names.GPU_MEM: 9}), {"memoryMiB": 8}, "(every GPU): ", id="every GPU, and no class named"),
        pytest.param(
            pod({names.GPU_MEM: 5}, {names.GPU_MEM: 4}),
            {"memoryMiB": 8},
            "memoryMiB requested 9",
            id="its containers together",
        ),
        pytest.param(class_request(P100, mem=9), {"memoryMiB": 8}, "(every GPU): ", id="every GPU, and a class"),
    ],
)
@pytest.mark.parametrize("on_exceed", ["Wait", "Refuse"])
def test_pods_beyond_the_quota_alone_are_refused(pod: Json, hard: Json, says: str, on_exceed: str) -> None:
    assert says in refusal_message(pod, gpu_quota(hard, onExceed=on_exceed))
    assert refusal_message(pod, gpu_quota(hard), namespace="other") == ""


@pytest.mark.parametrize(
    ("pod", "hard"),
    [
        pytest.param(pod({names.GPU_MEM: 9}), {"class": K80, "memoryMiB": 8}, id="it may get another GPU"),
        pytest.param(class_request(P100, mem=9), {"class": K80, "memoryMiB": 8}, id="another class"),
        pytest.param(class_request(mem=9), {"model": "Tesla K80", "memoryMiB": 8}, id="a model"),
        pytest.param(class_request(mem=8), {"class": K80, "memoryMiB": 8}, id="just enough"),
        pytest.param(class_request(mem=8), {"class": K80, "gpus": 0}, id="a share is not a whole GPU"),
        pytest.param(class_request(), {"class": K80, "memoryMiB": 11441}, id="a whole GPU that just fits"),
        pytest.param(class_request(P100), {"memoryMiB": 12198}, id="the smallest GPU of the class fits"),
        pytest.param(pod({"cpu": 1}), {"shares": 0}, id="requests no GPU"),
    ],
)
def test_pods_that_may_fit_are_left_to_the_scheduler(pod: Json, hard: Json) -> None:
    assert refusal_message(pod, gpu_quota(hard)) == ""


def test_pods_beyond_the_free_quota_wait_or_are_refused() -> None:
    used = [{"class": P100, "shares": 9}, {"class": K80, "shares": 4, "memoryMiB": 900, "gpus": 0}]
    hard = ({"class": P100, "shares": 10}, {"class": K80, "shares": 4, "memoryMiB": 1000})
    assert refusal_message(class_request(mem=200), gpu_quota(*hard, used=used)) == ""
    assert refusal_message(class_request(mem=200), gpu_quota(*hard, used=used, onExceed="Refuse")) == (
        f"GPUQuota team: spec.hard[1] (class {K80}): the quota has no capacity left for the pod: shares requested 1, "
        "used 4, hard 4, "
        "memoryMiB requested 200, used 900, hard 1000; create it again when other pods of the namespace have ended, or "
        "ask an administrator to raise the quota"
    )
    assert refusal_message(class_request(P100, mem=200), gpu_quota(*hard, used=used, onExceed="Refuse")) == ""


@pytest.mark.parametrize("hard", [{"class": K80, "memoryMiB": 1000}, {"class": K80, "memoryMiB": 100}])
def test_unknown_callers_learn_no_usage(hard: Json) -> None:
    used = [{"class": K80, "shares": 4, "memoryMiB": 917}]
    decision = review_pod(class_request(mem=200), gpu_quota(hard, used=used, onExceed="Refuse"), callers_known=False)
    assert not decision.allowed
    assert "memoryMiB requested 200;" in decision.message
    assert decision.message.endswith("show what is used and allowed: kubectl get gpuquotas -n default")
    for secret in ("team", K80, "917", "1000", "100,", "hard"):
        assert secret not in decision.message


def test_unrequested_amounts_beyond_the_quota_do_not_matter() -> None:
    lowered = gpu_quota({"class": K80, "gpus": 1}, used=[{"class": K80, "gpus": 2}], onExceed="Refuse")
    assert refusal_message(class_request(mem=1), lowered) == ""
    assert "gpus requested 1, used 2, hard 1" in refusal_message(class_request(), lowered)


def test_whole_cards_are_not_charged_memory_while_no_card_is_known() -> None:
    quotas = {"default": [parse(gpu_quota({"memoryMiB": 100}))]}
    after = mutate(pod({names.GPU_COUNT: 1})).pod
    assert on_validate(after, "pods", Known(standings=quotas)).message == ""


def test_smaller_cards_may_join_a_growing_cluster() -> None:
    decision = review_pod(class_request(), gpu_quota({"class": K80, "memoryMiB": 4096}), oversize="wait")
    assert decision.allowed
    (warning,) = decision.warnings
    assert warning.startswith(
        f"GPUQuota team: spec.hard[0] (class {K80}): the pod alone requests more than the quota allows"
    )
    assert warning.endswith("the pod waits until a node with a smaller GPU joins or the quota is raised")
    assert not review_pod(class_request(count=2), gpu_quota({"class": K80, "gpus": 1}), oversize="wait").allowed


@pytest.mark.parametrize("status", [None, 7, {"used": 7}, {"used": [7]}, {"used": [{"shares": "x", "class": 7}]}])
def test_any_status_can_be_read(status: object) -> None:
    manifest = gpu_quota({"shares": 1}, onExceed="Refuse") | {"status": status}
    assert refusal_message(class_request(mem=1), manifest) == ""


def validate_quota(manifest: Json) -> review.Decision:
    known = Known(known_classes=CLASSES)
    return on_validate(manifest, "gpuquotas", known)


@pytest.mark.parametrize(
    ("hard", "says"),
    [
        ({"class": "a", "model": "b", "shares": 1}, "spec.hard[0].model: the entry also names a class"),
        ({"class": "a"}, "spec.hard[0]: limits nothing"),
        ({"shares": -1}, "spec.hard[0].shares: -1 is out of range"),
        (7, "spec.hard[0]: 7 is not an entry"),
        ({"class": "Half", "shares": 1}, "spec.hard[0].class: 'Half' is not a name of a class; write"),
        ({"class": "cpu", "shares": 1}, "spec.hard[0].class: 'cpu' is reserved for another resource name"),
    ],
)
def test_unparsable_quota_is_refused(hard: Json, says: str) -> None:
    assert validate_quota(gpu_quota(hard)).message.startswith(says)


def test_quota_author_is_warned_about_missing_classes_and_low_limits() -> None:
    used = [{"class": K80, "shares": 5, "memoryMiB": 10}]
    decision = validate_quota(
        gpu_quota({"class": "not.there", "shares": 1}, {"class": K80, "shares": 3, "memoryMiB": 10}, used=used)
    )
    assert decision.allowed
    missing, below = decision.warnings
    assert missing.startswith("spec.hard[0].class: there is no ResourceClass not.there now; ")
    assert below.startswith("spec.hard[1].shares: 3 is below the 5 that are used now; ")
    assert validate_quota(gpu_quota({"class": K80, "shares": 5}, used=used)).warnings == ()


def test_misspelled_class_gets_a_suggestion() -> None:
    misspelled = f"{K80}0"
    (warning,) = validate_quota(gpu_quota({"class": misspelled, "shares": 1})).warnings
    assert warning.endswith(f"until there is one, the entry limits nothing; did you mean {K80}?")
    entries = ({"class": f"{misspelled}.{i}", "shares": 1} for i in range(20))
    warnings = validate_quota(gpu_quota(*entries)).warnings
    assert sum("did you mean" in warning for warning in warnings) == 2, "each is compared with all classes"


def test_rounded_memory_gets_a_warning() -> None:
    (warning,) = validate_quota(gpu_quota({"class": K80, "memoryMiB": "1.3Gi"})).warnings
    assert warning == "spec.hard[0].memoryMiB: 1.3Gi is not a whole number of MiB and counts as 1332Mi"


def test_only_quotas_of_the_namespace_are_read() -> None:
    hard = [{"class": f"class-{i}", "shares": 5} for i in range(63)] + [{"class": K80, "shares": 5}]
    with work() as reading:
        standings = [parse(gpu_quota(*hard)) for _ in range(4)]
    from cardwise.core.api import request

    pod_request = request.parse_mutated(mutate(class_request(mem=8)).pod)
    assert pod_request is not None
    with work() as checking:
        check_request(pod_request, standings)
    assert checking.steps < reading.steps / 2
