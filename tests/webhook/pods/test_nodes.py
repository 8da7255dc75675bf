"""The taints of nodes that pods with cards tolerate."""

from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.webhook.reviews import Known, mutate_object
from webhook.pods import scheduling
from webhook.pods.context import WebhookSettings

NVIDIA = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
AKS = {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
SETTINGS = WebhookSettings(tolerated=(NVIDIA, AKS))
MINE = {"key": "mine", "operator": "Exists"}


def tolerations_after(*own: Json, settings: WebhookSettings = SETTINGS, **amounts: Any) -> list[Json] | None:
    pod = build.pod(**amounts or {"gpu_mem": 100})
    if own:
        pod["spec"]["tolerations"] = list(own)
    tolerations: list[Json] | None = mutate_object(pod, "pods", Known(), settings)["spec"].get("tolerations")
    return tolerations


def test_taints_are_spelled_as_kubectl_does() -> None:
    assert scheduling.toleration_of_taint("nvidia.com/gpu:NoSchedule") == NVIDIA
    assert scheduling.toleration_of_taint("sku=gpu:NoSchedule") == AKS
    assert scheduling.toleration_of_taint("a=:NoExecute")["value"] == ""


@pytest.mark.parametrize("text", ["nvidia.com/gpu", "a=b", ":NoSchedule", "a:PreferNoSchedule", "a=b=c:NoSchedule"])
def test_invalid_taint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write KEY:EFFECT"):
        scheduling.toleration_of_taint(text)


def test_gpu_pods_get_tolerations_next_to_their_own() -> None:
    assert tolerations_after() == [NVIDIA, AKS]
    assert tolerations_after(whole_gpu=1) == [NVIDIA, AKS]
    assert tolerations_after(MINE) == [MINE, NVIDIA, AKS]
    assert tolerations_after(settings=WebhookSettings()) is None
    assert tolerations_after(share=1) is None, "it requests no GPU"


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({"operator": "Exists"}, []),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, [AKS]),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, [NVIDIA, AKS]),
        ({"key": "nvidia.com/gpu", "value": "", "effect": "NoSchedule"}, [NVIDIA, AKS]),
        ({"key": "sku", "value": "gpu"}, [NVIDIA]),
        ({"key": "sku", "operator": "Exists"}, [NVIDIA]),
        ({"key": "sku", "operator": "Equal", "value": "cpu"}, [NVIDIA, AKS]),
    ],
    ids=str,
)
def test_tolerations_are_not_duplicated(own: Json, added: list[Json]) -> None:
    assert tolerations_after(own) == [own, *added]


def test_update_without_the_tolerations_gets_them_again() -> None:
    """`kubectl apply` of a manifest with tolerations of its own replaces the whole list."""
    pod = build.pod(gpu_mem=100)
    pod["spec"]["tolerations"] = [MINE]
    stored = mutate_object(pod, "pods", Known(), SETTINGS)

    def updated(*own: Json, old: Json = stored) -> list[Json]:
        new = old | {"spec": old["spec"] | {"tolerations": list(own)}}
        tolerations: list[Json] = mutate_object(new, "pods", Known(), SETTINGS, operation="UPDATE", old=old)["spec"][
            "tolerations"
        ]
        return tolerations

    assert updated(MINE) == [MINE, NVIDIA, AKS]
    assert updated(MINE, AKS) == [MINE, AKS, NVIDIA]
    without = stored | {"spec": stored["spec"] | {"tolerations": [MINE, AKS]}}
    assert updated(MINE, old=without) == [MINE, AKS], "what it never had it does not get"
    plain = build.pod()
    plain["spec"]["tolerations"] = [NVIDIA]
    assert updated(MINE, old=plain) == [MINE], "no pod of ours"
    assert names.SHARE in stored["spec"]["containers"][0]["resources"]["limits"]
