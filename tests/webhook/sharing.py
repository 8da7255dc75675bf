"""Pods that go through the webhook as through the API server: /mutate, then /validate."""

from copy import deepcopy

from cardwise.core.api import names, shareagent
from cardwise.core.values.decoded import Json
from tests.webhook.reviews import Known, on_mutate, on_validate, patched
from webhook.pods.context import AgentSettings, WebhookSettings
from webhook.server.review import Decision

IMAGE = "registry.example/cardwise:1"
SETTINGS = WebhookSettings(share_agent=AgentSettings(image=IMAGE))
MPS = Known(scopes=frozenset({"card"}))  # a cluster in which some node has MPS
FOLDER = "/run/cardwise/share"
VOLUME = {"name": "cardwise-share", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}


def decision_on(
    pod: Json, known: Known | None = None, settings: WebhookSettings = SETTINGS, namespace: str = "default"
) -> Decision:
    return on_mutate(pod, "pods", known or MPS, settings, namespace=namespace)


def judged(pod: Json, known: Known | None = None, settings: WebhookSettings = SETTINGS) -> Decision:
    return on_validate(pod, "pods", known or MPS, settings)


def admitted(
    pod: Json, known: Known | None = None, settings: WebhookSettings = SETTINGS, namespace: str = "default"
) -> tuple[Json, tuple[str, ...]]:
    """The pod as it is stored and all warnings. Checks that the pod is admitted, and that a second call changes
    nothing.
    """
    before = deepcopy(pod)
    decision = decision_on(pod, known, settings, namespace)
    assert decision.allowed, decision.message
    after = patched(pod, decision)
    assert pod == before
    again = decision_on(after, known, settings, namespace)
    assert again.patch == [], "not a fixed point"
    validated = judged(after, known, settings)
    assert validated.allowed, validated.message
    return after, decision.warnings + validated.warnings


def refused(pod: Json, known: Known | None = None, settings: WebhookSettings = SETTINGS) -> str:
    """The refusal of the pod by /mutate."""
    decision = decision_on(pod, known, settings)
    assert not decision.allowed
    return decision.message


def agents(pod: Json) -> list[tuple[int, Json]]:
    """The agents in the pod, with their positions."""
    init = pod["spec"].get("initContainers") or []
    return [(i, container) for i, container in enumerate(init) if container["name"] == shareagent.CONTAINER_NAME]


def agent(pod: Json) -> Json:
    ((_, container),) = agents(pod)
    return container


def sidecar(container: Json) -> Json:
    return container | {"restartPolicy": "Always"}


def with_resources(container: Json, **kinds: Json) -> Json:
    """A container with a share, and with these additional limits and requests."""
    resources = deepcopy(container["resources"])
    for kind, amounts in kinds.items():
        resources[kind] = resources.get(kind, {}) | amounts
    return container | {"resources": resources}


def env(container: Json) -> dict[str, Json]:
    variables = {entry["name"]: entry for entry in container.get("env") or []}
    assert len(variables) == len(container.get("env") or [])
    return variables


def mounts(container: Json) -> list[Json]:
    return [mount for mount in container.get("volumeMounts") or [] if mount["name"] == "cardwise-share"]


def own(key: str) -> Json:
    return {"name": "cardwise-share", "mountPath": FOLDER, "subPath": key, "readOnly": True}


ALWAYS = {names.SHARE_AGENT: "always"}
