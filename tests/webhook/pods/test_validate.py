"""Refusals and warnings of the validating webhook."""

from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from tests import build
from tests.build import resource_class
from tests.webhook.reviews import Known, on_defaults, on_mutate, on_validate, resource_classes
from tests.webhook.rewriting import check_pod, mutate
from webhook.cluster.cards import CardSizes
from webhook.pods.context import OversizePolicy, WebhookSettings
from webhook.server.review import Decision

CARDS = CardSizes(MiB(build.P100), 2)
KNOWN = Known(known_cards=CARDS)
FIELD = f"spec.containers[0].resources.limits[{names.GPU_MEM}]"


def warnings(pod: dict[str, Any], known: Known = KNOWN, oversize: OversizePolicy = "refuse") -> tuple[str, ...]:
    return check_pod(pod, known, oversize=oversize)


def mutate_object(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return mutate(build.pod(*args, **kwargs)).pod


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        pytest.param(
            mutate_object(gpu_mem=20000),
            f"{FIELD}: 20000 MiB is more than the largest GPU has (16276); "
            "request at most 16276Mi, or split it over GPUs with aliyun.com/gpu-count",
            id="one container",
        ),
        pytest.param(
            mutate_object(containers=[build.container("a", gpu_mem=9000), build.container("b", gpu_mem=9000)]),
            f"{FIELD}: 18000 MiB together with the pod's other containers is more than the largest GPU has (16276)",
            id="together",
        ),
        pytest.param(
            mutate_object(containers=[build.container(f"c{i}", gpu_mem=1) for i in range(49)]),
            f"spec.containers[48].resources.limits[{names.GPU_MEM}]: 49 containers of the pod share one GPU, more than "
            "any GPU serves at once (48); move some of the containers into separate pods",
            id="more shares than clients",
        ),
        pytest.param(
            mutate_object(gpu_mem="8M"),
            f"{FIELD}: 8000000 MiB is more than the largest GPU has (16276); request at most 16276Mi; a number "
            "without Mi or Gi, such as 8M, means MiB, not bytes",
            id="bytes",
        ),
        pytest.param(
            mutate_object(gpu_mem=40000, gpu_count=2),
            f"{FIELD}: 20000 MiB on each of 2 GPUs is more than any node has (16276); request at most 32552Mi",
            id="split",
        ),
        pytest.param(
            mutate_object(gpu_mem=3, gpu_count=3),
            "[aliyun.com/gpu-count]: 3 GPUs are more than any node has (2)",
            id="wide",
        ),
        pytest.param(
            mutate_object(gpu_count=3), "[aliyun.com/gpu-count]: 3 GPUs are more than any node has (2)", id="whole"
        ),
        pytest.param(
            mutate_object(containers=[build.container("a", gpu_count=2), build.container("b", gpu_count=1)]),
            "3 GPUs are more than any node has (2)",
            id="whole together",
        ),
        pytest.param(
            mutate_object(containers=[build.container("a", gpu_count=2), build.container("b", gpu_mem=1024)]),
            "spec.containers[0].resources.limits[aliyun.com/gpu-count]: the pod's containers need at least 3 GPUs "
            "together, more than any node has (2); request fewer or smaller shares, or move some containers into "
            "other pods",
            id="beside whole ones",
        ),
        pytest.param(
            mutate_object(
                containers=[build.container("a", gpu_count=1), build.container("b", gpu_mem=8192, gpu_count=2)]
            ),
            "spec.containers[1].resources.limits[aliyun.com/gpu-count]: the pod's containers need at least 3 GPUs",
            id="split beside whole ones",
        ),
        pytest.param(
            mutate_object(
                containers=[
                    build.container("a", gpu_mem=16000),
                    build.container("b", gpu_mem=16000, gpu_count=2),
                    build.container("c", gpu_mem=16000, gpu_count=2),
                ]
            ),
            "spec.containers[1].resources.limits[aliyun.com/gpu-count]: the pod's containers need at least 3 GPUs",
            id="memory in total",
        ),
        pytest.param(
            mutate_object(
                containers=[build.container("a", gpu_mem=9000), build.container("b", gpu_mem=18000, gpu_count=2)]
            ),
            "the pod's containers need at least 3 GPUs",
            id="two larger than half a GPU each",
        ),
    ],
)
def test_requests_beyond_any_node_are_refused_or_wait(pod: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_pod(pod, KNOWN)
    assert says in str(refused.value)
    assert "waits" in warnings(pod, KNOWN, "wait")[0]
    assert warnings(pod, Known()) == (), "no GPU is known: it may wait for one"


def test_split_share_is_compared_with_cards_of_one_node() -> None:
    """A node of one large card, and one of two smaller ones."""
    known = Known(known_cards=CardSizes(MiB(23034), 2, MiB(11441), (MiB(23034), MiB(11441))))
    with pytest.raises(
        InvalidRequest, match=r"15000 MiB on each of 2 GPUs is more .* \(11441\); request at most 22882Mi$"
    ):
        check_pod(mutate_object(gpu_mem=30000, gpu_count=2), known)
    with pytest.raises(InvalidRequest, match=r"request at most 23034Mi$"):
        check_pod(mutate_object(gpu_mem=24000), known)


@pytest.mark.parametrize(
    "pod",
    [
        build.pod(),
        mutate_object(gpu_mem=build.P100),
        mutate_object(gpu_count=2),
        mutate_object(gpu_mem=32552, gpu_count=2),
        mutate_object(containers=[build.container("a", gpu_count=1), build.container("b", gpu_mem=build.P100)]),
        mutate_object(
            containers=[build.container("a", gpu_mem=8138), build.container("b", gpu_mem=16276, gpu_count=2)]
        ),
    ],
)
def test_what_fits_an_empty_node_is_allowed(pod: dict[str, Any]) -> None:
    assert warnings(pod) == ()


def test_a_pod_that_was_not_rewritten_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_pod(build.pod(gpu_mem=1), KNOWN)
    assert "a mutating webhook that runs after Cardwise's has added it" in refused.value.problem
    assert "sorts before cardwise" in refused.value.remedy


def test_more_cores_than_a_card_has_are_refused_at_once() -> None:
    decision = on_mutate(build.pod(gpu_mem=100, gpu_core=150), "pods", Known(known_cards=CARDS))
    assert not decision.allowed
    assert decision.message.startswith(f"spec.containers[0].resources.limits[{names.GPU_CORE}]: ")
    assert "write at most 100" in decision.message


def test_stored_spellings_count_as_rewritten() -> None:
    assert warnings(build.pod(gpu_mem="8k", share=1)) == ()


def test_a_node_name_is_refused() -> None:
    pod = mutate_object(gpu_mem=1)
    pod["spec"]["nodeName"] = "n1"
    with pytest.raises(InvalidRequest, match=r"^spec\.nodeName: .*nodeAffinity"):
        check_pod(pod, KNOWN)


def test_unknown_resources_of_our_domain_are_refused() -> None:
    pod = mutate_object(gpu_mem=1)
    pod["spec"]["containers"][0]["resources"]["limits"]["cardwise.dev/gpus"] = "1"
    with pytest.raises(
        InvalidRequest, match=r"limits\[cardwise\.dev/gpus\]: there is no ResourceClass gpus; there are no"
    ):
        check_pod(pod, KNOWN)


@pytest.mark.parametrize(("resource", "sub", "name"), [("pods", "binding", "ours"), ("bindings", "", "")])
def test_only_the_extender_may_bind_gpu_pods(resource: str, sub: str, name: str) -> None:
    known = Known(pods={"default/ours": mutate_object(gpu_mem=1), "default/theirs": build.pod()})

    def allowed(pod: str) -> bool:
        return on_validate(build.binding(pod), resource, known, sub=sub, name=pod if name else "").allowed

    assert not allowed("ours")
    assert allowed("theirs")
    assert allowed("gone")


def test_mirrors_and_exempt_namespaces_are_left_alone() -> None:
    bad = build.pod(gpu_mem="x")
    mirror = build.pod(gpu_mem="x", annotations={names.MIRROR: "hash"})
    settings = WebhookSettings(exempt_namespaces=frozenset({"kube-system"}))
    for decide in (on_mutate, on_defaults, on_validate):
        assert decide(bad, "pods", Known(), settings, namespace="kube-system") == Decision()
        assert decide(mirror, "pods", Known(), settings, username="system:node:n1") == Decision()


def test_only_a_kubelet_makes_mirrors() -> None:
    mirror = build.pod(gpu_mem="x", annotations={names.MIRROR: "hash"})
    assert not on_mutate(mirror, "pods", Known()).allowed


def small(pod: dict[str, Any], least: int = 256) -> tuple[str, ...]:
    half = resource_classes(resource_class("half", share={"memoryMiB": 128}))
    known = Known(known_cards=CARDS, known_classes=half, cards_of={"half": CARDS})
    return on_validate(pod, "pods", known, WebhookSettings(min_share=least)).warnings


def test_too_small_share_gets_a_warning() -> None:
    problem = "less than most programs need to start on a GPU (256 MiB)"
    assert small(mutate_object(gpu_mem=8)) == (f"{FIELD}: 8 means 8 MiB, {problem}; did you mean 8Gi?",)
    assert small(mutate_object(gpu_mem=100)) == (f"{FIELD}: 100 means 100 MiB, {problem}; write at least 256Mi",)
    assert small(mutate_object(gpu_mem=16, gpu_count=2)) == (
        f"{FIELD}: 16 means 16 MiB, {problem}; did you mean 16Gi?",
    )
    assert small(mutate_object(gpu_mem=300, gpu_count=2)) == (
        f"{FIELD}: 300 means 300 MiB, {problem}; write at least 512Mi",
    )


def test_large_or_intended_share_gets_no_warning() -> None:
    of_class = {names.CLASS_PREFIX + "half": 1, names.GPU_MEM: 128, names.SHARE: 1}
    for pod in (
        mutate_object(gpu_mem=256),
        mutate_object(gpu_count=1),
        mutate_object(containers=[{"resources": {"limits": of_class}}]),
    ):
        assert small(pod) == ()
    assert small(mutate_object(gpu_mem=8), least=0) == ()


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_container_without_a_share_keeps_void_devices(kind: str) -> None:
    other = build.container("other")
    asking = build.pod("p", containers=[build.container("main", gpu_mem=8)])
    asking["spec"].setdefault(kind, []).append(other)
    done = mutate(asking).pod
    assert not on_validate(done, "pods", KNOWN).message
    for env in ([], [{"name": names.ENV_VISIBLE_DEVICES, "value": "all"}]):
        done["spec"][kind][-1]["env"] = env
        decision = on_validate(done, "pods", KNOWN)
        index = len(done["spec"][kind]) - 1
        assert not decision.allowed
        assert decision.message.startswith(
            f"spec.{kind}[{index}].env: not as set by Cardwise: {names.ENV_VISIBLE_DEVICES}"
        )


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        (build.pod(annotations={names.CLASS: "k80"}), f"metadata.annotations[{names.CLASS}]"),
        (build.pod(share=1), f"spec.containers[0].resources.limits[{names.SHARE}]"),
        (
            build.pod(containers=[build.container() | {"resources": {"limits": {names.FILTER_CALL_RESOURCE: "5"}}}]),
            f"spec.containers[0].resources.limits[{names.FILTER_CALL_RESOURCE}]",
        ),
    ],
)
def test_later_additions_to_a_pod_without_a_request_are_refused(pod: Json, field: str) -> None:
    """Otherwise the field would be stored without any effect or warning."""
    message = on_validate(pod, "pods", Known()).message
    assert message.startswith(f"{field}: was not rewritten by the Cardwise webhook: a mutating webhook that runs after")
