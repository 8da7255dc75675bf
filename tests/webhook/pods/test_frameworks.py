"""The frameworks' hook in pods: which pods get it, its source, and the user's settings that stay."""

from typing import Any

import pytest

from cardwise import share
from cardwise.core.api import names, shareagent
from cardwise.core.values.decoded import Json
from tests import build
from tests.webhook.reviews import Known
from tests.webhook.sharing import IMAGE, admitted, agent, agents, decision_on, env, judged, refused
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import AgentSettings, WebhookSettings

HOOK = {"name": "cardwise-share", "mountPath": "/run/cardwise/python", "subPath": "python", "readOnly": True}
FIELD = "metadata.annotations[cardwise.dev/frameworks]"
NO_AGENT = WebhookSettings(share_agent=AgentSettings(image=IMAGE, choice="never"))


def pod_with_hook(choice: str = "on", **resources: Any) -> Json:
    return build.pod(annotations={names.FRAMEWORKS: choice}, **(resources or {"gpu_mem": 8138}))


def main(pod: Json) -> Json:
    container: Json = pod["spec"]["containers"][0]
    return container


def has_hook(container: Json) -> bool:
    return HOOK in (container.get("volumeMounts") or [])


def test_the_hook_is_mounted_read_only_from_what_the_agent_lays_out() -> None:
    after, warnings = admitted(pod_with_hook())
    assert warnings == ()
    assert has_hook(main(after))
    assert (HOOK["mountPath"], HOOK["subPath"]) == (share.MOUNT, shareagent.HOOK_FOLDER)
    entries = env(main(after))
    assert entries["PYTHONPATH"]["value"] == "/run/cardwise/python"
    assert share.ENV_FRAMEWORKS not in entries, "left out for all"
    assert env(agent(after))[shareagent.HOOK_ENV]["value"] == "true"


@pytest.mark.parametrize("pod", [pod_with_hook("off"), build.pod(gpu_mem=1)], ids=["off", "nothing said"])
def test_hook_is_opt_in(pod: Json) -> None:
    after, _ = admitted(pod)
    assert not has_hook(main(after))
    assert "PYTHONPATH" not in env(main(after))
    assert shareagent.HOOK_ENV not in env(agent(after))


def test_hook_annotation_lists_frameworks() -> None:
    after, _ = admitted(pod_with_hook("torch, jax,torch"))
    assert env(main(after))[share.ENV_FRAMEWORKS]["value"] == "torch,jax"


@pytest.mark.parametrize("choice", ["pytorch", "", "torch,,jax", "ON"])
def test_unknown_frameworks_error_lists_the_known_ones(choice: str) -> None:
    message = refused(pod_with_hook(choice))
    assert message.startswith(f"{FIELD}: ")
    assert "write on, off, or some of: tensorflow, torch, jax, cupy, onnxruntime" in message


def test_pod_annotation_takes_precedence_over_the_namespace() -> None:
    known = Known(namespaces={"team": Defaults(frameworks="jax")})
    after, _ = admitted(build.pod(gpu_mem=1), known, namespace="team")
    assert env(main(after))[share.ENV_FRAMEWORKS]["value"] == "jax"
    assert after["metadata"]["annotations"][names.FRAMEWORKS] == "jax"
    assert not has_hook(main(admitted(pod_with_hook("off"), known, namespace="team")[0]))
    bad = Known(namespaces={"team": Defaults(frameworks="paddle")})
    message = decision_on(build.pod(gpu_mem=1), bad, namespace="team").message
    assert message.startswith(
        "namespace team: metadata.annotations[cardwise.dev/frameworks]: 'paddle' is not a framework"
    )


def test_hook_requires_the_agent() -> None:
    after, _ = admitted(pod_with_hook(), settings=NO_AGENT)
    assert has_hook(main(after))
    assert len(agents(after)) == 1


def test_hook_without_the_agent_gets_a_warning() -> None:
    never = pod_with_hook()
    never["metadata"]["annotations"][names.SHARE_AGENT] = "never"
    for pod, settings, reason in (
        (never, NO_AGENT, "says never"),
        (pod_with_hook(), WebhookSettings(), "--share-agent-image"),
    ):
        after, (warning,) = admitted(pod, settings=settings)
        assert warning.startswith(f"{FIELD}: the hook is not installed, because ")
        assert reason in warning
        assert not has_hook(main(after))
        assert "PYTHONPATH" not in env(main(after))


def test_only_containers_with_a_share_get_the_hook() -> None:
    pod = pod_with_hook(
        containers=[build.container("a", gpu_mem=1), build.container("b"), build.container("c", gpu_count=1)]
    )
    after, _ = admitted(pod)
    assert [has_hook(container) for container in after["spec"]["containers"]] == [True, False, False]
    whole, _ = admitted(pod_with_hook(gpu_count=1), settings=NO_AGENT)
    assert agents(whole) == []


@pytest.mark.parametrize(
    ("own", "after"),
    [
        ("/app", "/app:/run/cardwise/python"),
        ("/app:/lib", "/app:/lib:/run/cardwise/python"),
        ("", "/run/cardwise/python"),
        ("/run/cardwise/python:/app", "/run/cardwise/python:/app"),
    ],
)
def test_the_containers_own_path_comes_first(own: str, after: str) -> None:
    pod = pod_with_hook()
    main(pod)["env"] = [{"name": "PYTHONPATH", "value": own}, {"name": "A", "value": "$(PYTHONPATH)"}]
    container = main(admitted(pod)[0])
    assert env(container)["PYTHONPATH"]["value"] == after
    assert [entry["name"] for entry in container["env"]][-2:] == ["PYTHONPATH", "A"]


def test_pythonpath_from_another_source_gets_a_warning() -> None:
    pod = pod_with_hook()
    source = {"configMapKeyRef": {"name": "x", "key": "y"}}
    main(pod)["env"] = [{"name": "PYTHONPATH", "valueFrom": source}]
    after, (warning,) = admitted(pod)
    assert env(main(after))["PYTHONPATH"]["valueFrom"] == source
    assert warning.startswith("spec.containers[0].env: PYTHONPATH comes from a ConfigMap")
    assert "add /run/cardwise/python to it" in warning


def test_the_containers_own_switch_wins() -> None:
    pod = pod_with_hook("torch")
    main(pod)["env"] = [{"name": share.ENV_FRAMEWORKS, "value": "off"}]
    assert env(main(admitted(pod)[0]))[share.ENV_FRAMEWORKS]["value"] == "off"


def test_copy_without_the_hook_loses_its_mount() -> None:
    copy, _ = admitted(pod_with_hook())
    copy["metadata"]["annotations"][names.FRAMEWORKS] = "off"
    after, _ = admitted(copy)
    assert not has_hook(main(after))
    assert len(agents(after)) == 1


def test_a_hook_that_another_webhook_mounts_elsewhere_is_refused() -> None:
    stored, _ = admitted(pod_with_hook())
    main(stored)["volumeMounts"].append(HOOK | {"mountPath": "/other"})
    assert "volumeMounts[cardwise-share]" in judged(stored).message
