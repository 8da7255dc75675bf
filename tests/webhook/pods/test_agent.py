"""The share agent in pods: which pods get it, its position, its settings, and its reserved name."""

from copy import deepcopy
from typing import Any

import pytest

from cardwise.core.api import names, request, shareagent
from tests import build
from tests.build import resource_class
from tests.webhook.reviews import Known, patched, resource_classes
from tests.webhook.sharing import (
    ALWAYS,
    FOLDER,
    IMAGE,
    VOLUME,
    Json,
    admitted,
    agent,
    agents,
    decision_on,
    env,
    judged,
    mounts,
    own,
    refused,
    sidecar,
)
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import AgentSettings, WebhookSettings

NEVER = WebhookSettings(share_agent=AgentSettings(image=IMAGE, choice="never"))


def test_the_agent_is_as_the_contract_says() -> None:
    after, warnings = admitted(build.pod(gpu_mem=8138))
    assert warnings == ()
    assert after["spec"]["initContainers"] == [
        {
            "name": "cardwise-agent",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["cardwise-agent"],
            "restartPolicy": "Always",
            "env": [
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
                {
                    "name": "CARDWISE_ASSIGNMENT",
                    "valueFrom": {
                        "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['cardwise.dev/assignment']"}
                    },
                },
            ],
            "resources": {"limits": {names.SHARE: "1"}},
            "volumeMounts": [{"name": "cardwise-share", "mountPath": FOLDER}],
            "startupProbe": {
                "exec": {"command": ["cardwise-agent", "--probe"]},
                "periodSeconds": 1,
                "timeoutSeconds": 30,
                "failureThreshold": 43200,
            },
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
    ]
    assert after["spec"]["volumes"] == [VOLUME]
    assert mounts(after["spec"]["containers"][0]) == [own("0")]


@pytest.mark.parametrize(
    ("choice", "isolation", "agent_mode", "comes"),
    [
        ("mps", "none", None, False),
        ("mps", "advisory", None, True),
        ("mps", "mps", None, True),
        ("always", "none", None, True),
        ("never", "mps", None, False),
        ("never", "none", "always", True),
        ("always", "mps", "never", False),
        ("never", "advisory", "mps", True),
        ("always", "none", "mps", False),
    ],
)
def test_which_pods_have_it(choice: Any, isolation: str, agent_mode: str | None, comes: bool) -> None:
    settings = WebhookSettings(share_agent=AgentSettings(image=IMAGE, choice=choice))
    annotations = {names.ISOLATION: isolation} | ({} if agent_mode is None else {names.SHARE_AGENT: agent_mode})
    after, _ = admitted(build.pod(gpu_mem=1, annotations=annotations), settings=settings)
    assert bool(agents(after)) is comes
    assert bool(after["spec"].get("volumes")) is comes


@pytest.mark.parametrize(("annotations", "comes"), [({}, False), ({names.ISOLATION: "mps"}, True), (ALWAYS, True)])
def test_agent_without_mps_nodes_only_if_required_or_annotated(annotations: dict[str, str], comes: bool) -> None:
    after, _ = admitted(build.pod(gpu_mem=8138, annotations=annotations), Known())
    assert bool(agents(after)) is comes


def test_pods_without_a_share_get_no_agent() -> None:
    rdma = resource_class("rdma", selector={"matchLabels": {"kind": "rdma"}})
    other = Known(known_classes=resource_classes(rdma))
    of_device = build.pod(annotations=ALWAYS)
    of_device["spec"]["containers"][0]["resources"]["limits"] = {"cardwise.dev/rdma": "1"}
    gang = build.pod(annotations=ALWAYS | {names.GROUP_NAME: "g"})
    for pod in (of_device, gang, build.pod(annotations=ALWAYS)):
        after, _ = admitted(pod, other)
        assert agents(after) == []
        assert "volumes" not in after["spec"]


def test_unknown_agent_choice_is_refused() -> None:
    message = refused(build.pod(gpu_mem=1, annotations={names.SHARE_AGENT: "yes"}))
    assert (
        message
        == "metadata.annotations[cardwise.dev/share-agent]: 'yes' is not a choice; write one of: always, mps, never"
    )


def test_no_agent_without_an_image_and_a_warning_if_requested() -> None:
    after, warnings = admitted(build.pod(gpu_mem=1000), settings=WebhookSettings())
    assert (agents(after), warnings) == ([], ())
    after, (warning,) = admitted(build.pod(gpu_mem=1000, annotations=ALWAYS), settings=WebhookSettings())
    assert agents(after) == []
    assert "--share-agent-image" in warning


def names_of(pod: Json) -> list[str]:
    return [container["name"] for container in pod["spec"]["initContainers"]]


@pytest.mark.parametrize(
    ("init", "after"),
    [
        pytest.param([], ["cardwise-agent"], id="alone"),
        pytest.param(["i"], ["i", "cardwise-agent"], id="behind what needs no GPU"),
        pytest.param(
            ["i", "plain", "gpu"], ["i", "plain", "cardwise-agent", "gpu"], id="before the first with a share"
        ),
        pytest.param(["gpu", "i", "gpu2"], ["cardwise-agent", "gpu", "i", "gpu2"], id="first"),
        pytest.param(["cardwise-agent", "i"], ["cardwise-agent", "i"], id="where it is"),
        pytest.param(["i", "cardwise-agent", "plain"], ["i", "cardwise-agent", "plain"], id="where it is, amid others"),
        pytest.param(["gpu", "cardwise-agent"], ["cardwise-agent", "gpu"], id="never behind one with a share"),
        pytest.param(
            ["cardwise-agent", "i", "gpu"], ["cardwise-agent", "i", "gpu"], id="further before than it has to be"
        ),
    ],
)
def test_position_of_the_agent(init: list[str], after: list[str]) -> None:
    ours = agent(admitted(build.pod(gpu_mem=1))[0])
    containers = {
        "i": build.container("i"),
        "plain": sidecar(build.container("plain")),
        "gpu": sidecar(build.container("gpu", gpu_mem=5)),
        "gpu2": sidecar(build.container("gpu2", gpu_mem=6)),
        "cardwise-agent": ours,
    }
    pod, _ = admitted(build.pod(init=[deepcopy(containers[name]) for name in init], gpu_mem=1))
    assert names_of(pod) == after
    assert agent(pod) == ours
    keys = {container.spec["name"]: container.key for container in request.containers(pod)}
    for container in request.containers(pod):
        name = container.spec["name"]
        expected = [own(container.key)] if name in ("gpu", "gpu2", "main") else []
        if name != "cardwise-agent":
            assert mounts(container.spec) == expected
        if name in ("gpu", "gpu2", "main"):
            assert f"'cardwise.dev/devices.{keys[name]}'" in str(env(container.spec)[names.ENV_VISIBLE_DEVICES])


def test_agent_is_parsed_as_a_container_without_a_request() -> None:
    side = sidecar(build.container("side", gpu_mem=64, gpu_count=2))
    after, _ = admitted(build.pod(init=[build.container("i"), side], gpu_mem=1, annotations=ALWAYS))
    pod_request = request.parse_mutated(after)
    assert pod_request is not None
    assert [(c.key, c.name, c.mem, c.cards) for c in pod_request.containers] == [
        ("init-2", "side", 64, 2),
        ("0", "main", 1, 1),
    ]
    assert agent(after)["resources"]["limits"] == {names.SHARE: "1"}
    assert after["metadata"]["annotations"][names.GPU_COUNTS] == "side=2"


def test_copied_split_share_stays_with_its_container() -> None:
    """The copy of a pod that was created before the agent was enabled, and the reverse."""
    side = sidecar(build.container("side", gpu_mem=64, gpu_count=2))
    without, _ = admitted(build.pod(init=[side], gpu_mem=1), settings=NEVER)
    assert without["metadata"]["annotations"][names.GPU_COUNTS] == "side=2"
    without["metadata"]["annotations"][names.SHARE_AGENT] = "always"
    within, warnings = admitted(without)
    assert warnings == ()
    assert within["metadata"]["annotations"][names.GPU_COUNTS] == "side=2"
    del within["metadata"]["annotations"][names.SHARE_AGENT]
    back, warnings = admitted(within, settings=NEVER)
    assert warnings == ()
    assert names_of(back) == ["side"]
    assert back["metadata"]["annotations"][names.GPU_COUNTS] == "side=2"
    assert "volumes" not in back["spec"]
    assert not any(mounts(container.spec) for container in request.containers(back))


def test_copy_without_a_request_loses_the_agent() -> None:
    copy, _ = admitted(build.pod(init=[build.container("i")], gpu_mem=1))
    del copy["spec"]["containers"][0]["resources"]
    after, _ = admitted(copy)
    assert names_of(after) == ["i"]
    assert mounts(after["spec"]["containers"][0]) == []


@pytest.mark.parametrize(
    "amounts",
    [{names.GPU_MEM: "2"}, {names.GPU_COUNT: "2"}, {"k80": "1"}, {"rdma": "1"}, {"nvidia.com/mig-1g.5gb": "1"}],
    ids=str,
)
def test_requests_of_a_forged_agent_do_not_count(amounts: Json) -> None:
    """They would count in the first call of the webhook, and be gone in the second."""
    selectors = {"k80": {"model": "Tesla K80"}, "rdma": {"kind": "rdma"}}
    classes = (resource_class(name, selector={"matchLabels": labels}) for name, labels in selectors.items())
    namespaces = {"default": Defaults(policy="spread")}  # not for pods that request devices of NVIDIA's plugin
    known = Known(scopes=frozenset({"card"}), known_classes=resource_classes(*classes), namespaces=namespaces)
    forged = {"name": shareagent.CONTAINER_NAME, "command": ["cardwise-agent"], "resources": {"limits": amounts}}
    after, warnings = admitted(build.pod(gpu_mem=8138, init=[sidecar(forged)]), known)
    assert after == admitted(build.pod(gpu_mem=8138), known)[0]
    assert any(text.startswith("spec.initContainers[0].resources: removed ") for text in warnings)
    assert admitted(build.pod(init=[sidecar(forged)]), known)[0]["spec"] == build.pod()["spec"]


def test_forged_agent_is_replaced() -> None:
    forged = sidecar({"name": "cardwise-agent", "image": "evil", "command": ["cardwise-agent"], "args": ["x"]})
    forged["securityContext"] = {"privileged": True}
    forged["volumeMounts"] = [{"name": "cardwise-share", "mountPath": FOLDER}]
    after, _ = admitted(build.pod(init=[forged], gpu_mem=1))
    assert agent(after) == agent(admitted(build.pod(gpu_mem=1))[0])


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"init": [build.container("cardwise-agent")]}, id="ordinary init container"),
        pytest.param({"init": [sidecar(build.container("cardwise-agent"))]}, id="other command"),
        pytest.param({"containers": [build.container("cardwise-agent", gpu_mem=1)]}, id="container"),
    ],
)
def test_agent_name_is_reserved_in_pods_with_the_agent(bad: Json) -> None:
    pod = build.pod(**({"containers": [build.container(gpu_mem=1)]} | bad))
    message = refused(pod)
    assert ".name: cardwise-agent is reserved for Cardwise's share agent; rename the container" in message


def test_agent_name_is_refused_for_containers_with_a_share() -> None:
    """The device plugin recognizes the agent by this name."""
    pod = build.pod(containers=[build.container("cardwise-agent", gpu_mem=1)])
    stored = patched(pod, decision_on(pod, settings=NEVER))
    assert "spec.containers[0].name: cardwise-agent is reserved" in judged(stored, settings=NEVER).message
    plain = build.pod(init=[build.container("cardwise-agent")], gpu_mem=1)
    assert names_of(admitted(plain, settings=NEVER)[0]) == ["cardwise-agent"]
