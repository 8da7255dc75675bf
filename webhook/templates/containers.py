"""Puts changed containers back into a pod or pod template, at the places where `request.containers` found them."""

from cardwise.core.api.request import Container
from cardwise.core.values.decoded import Json


def amount_lists(resources: Json) -> list[tuple[str, Json]]:
    """The non-empty lists of amounts, by field."""
    return [(kind, resources[kind]) for kind in ("limits", "requests") if resources.get(kind)]


def put_resources(spec: Json, container: Container, resources: Json) -> None:
    """Put the container with these resources back into the spec, as `put_container` does."""
    if resources != (container.spec.get("resources") or {}):
        put_container(spec, container, {**container.spec, "resources": resources})


def put_container(spec: Json, container: Container, changed: Json) -> None:
    """The spec with the changed container. Lists of `spec` are replaced, not changed."""
    kind = "initContainers" if container.key.startswith("init-") else "containers"
    index = int(container.key.removeprefix("init-"))
    spec[kind] = [*spec[kind][:index], changed, *spec[kind][index + 1 :]]
