"""Rewrites bare names in pod templates of workloads, which Kubernetes would refuse there as in pods.

Nothing else is rewritten: the pods come by the webhook one by one, and a template that differs from its manifest as
little as possible is what GitOps tools like best. What needs no rewriting is left as it is to the last byte, since
templates of Jobs may not change and a changed one of a Deployment is rolled out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from cardwise.core.api import names, request
from cardwise.core.values.decoded import Json
from webhook.templates import containers, records
from webhook.templates.spellings import Vocabulary

_PLACES: Mapping[str, tuple[str, ...]] = {
    "deployments": ("spec", "template"),
    "replicasets": ("spec", "template"),
    "statefulsets": ("spec", "template"),
    "daemonsets": ("spec", "template"),
    "jobs": ("spec", "template"),
    "replicationcontrollers": ("spec", "template"),
    "cronjobs": ("spec", "jobTemplate", "spec", "template"),
    "podtemplates": ("template",),
}
KINDS = frozenset(_PLACES)
_MOST: Final = 32  # templates of one object that are looked at
_PER_NODE: Final = "resourcesPerNode"  # of a TrainJob: all that it says of the pods of its runtime
_IN_POD: Final = "spec.containers[0].resources."


def rewrite(workload: Json, old: Json | None, resource: str, vocabulary: Vocabulary, *, update: bool) -> Json:
    """The workload as it should be, the caller's own object where nothing changes. `old`: the stored one at an update.

    Of classes that there are not nothing is said here: the advice says it, and which there are. Raises InvalidRequest,
    KubeError.
    """
    path = _PLACES[resource]
    template = _dig(workload, path)
    if not template or (resource == "replicasets" and is_controlled(workload)):
        # Who made the ReplicaSet compares its template with its own, and would make another one for ever.
        return workload
    if _names_nvidia(_dig(old or {}, path)):
        # Kubernetes takes it, and its pods are rewritten: no reason to change what is stored.
        vocabulary = vocabulary.without_nvidia()
    record = records.read(workload)
    manifests = records.applied(workload, old, lambda applied: _named(_dig(applied, path)))
    if resource == "jobs":
        # Its template may never change: to drop a key from it would make the update fail.
        manifests = replace(manifests, new=False, server=records.NO_MANIFEST)
    spec = dict(template.get("spec") or {})
    ours: dict[str, tuple[str, ...]] = {}
    changed = False
    for container in request.containers(template):
        name = str(container.spec.get("name") or "")
        resources = dict(container.spec.get("resources") or {})
        field = f"{'.'.join(path)}.{container.path}.resources."
        place = records.rewrite(
            {field + kind: amounts for kind, amounts in containers.lists(resources)},
            vocabulary.in_container,
            place=name,
            recorded=record.get(name, []),
            manifests=manifests,
            update=update,
        )
        ours[name] = place.ours
        if place.changed:
            changed = True
            resources |= {key.removeprefix(field): amounts for key, amounts in place.amounts.items()}
            containers.put_resources(spec, container, resources)
    return records.written(_placed(workload, path, template | {"spec": spec}), ours) if changed else workload


def template_of(workload: Json, resource: str) -> tuple[str, Json]:
    """Where the pod template is, for messages, and the template; empty where there is none."""
    path = _PLACES[resource]
    return ".".join(path), _dig(workload, path)


def all_of(obj: Json, resource: str) -> Iterator[tuple[str, Json]]:
    """As `template_of`, also of kinds that Kubernetes does not have: wherever a pod template is in them."""
    if resource in _PLACES:
        yield template_of(obj, resource)
    else:
        yield from islice(_search({"spec": obj.get("spec")}, ""), _MOST)


def field(path: str, in_template: str) -> str:
    """Where in the workload that is which is there in the template that `all_of` gave for the path."""
    if path.endswith(f".{_PER_NODE}"):
        return f"{path}.{in_template.removeprefix(_IN_POD)}"
    return f"{path}.{in_template}"


def _search(obj: object, path: str) -> Iterator[tuple[str, Json]]:
    """Depth first. A map whose `spec` has containers is a template; nothing inside of one is."""
    if isinstance(obj, list):
        for i, inner in enumerate(obj):
            yield from _search(inner, f"{path}[{i}]")
    elif isinstance(obj, dict):
        spec = obj.get("spec")
        if path and isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield path, obj
            return
        for name, inner in obj.items():
            where = f"{path}.{name}" if path else name
            if name == _PER_NODE:
                yield where, {"spec": {"containers": [{"name": "node", "resources": inner}]}}
            else:
                yield from _search(inner, where)


def is_controlled(workload: Json) -> bool:
    """Whether a controller has made it."""
    owners = (workload.get("metadata") or {}).get("ownerReferences") or ()
    return any(owner.get("controller") for owner in owners)


def _names_nvidia(template: Json) -> bool:
    return any(
        names.NVIDIA_GPU in amounts
        for container in request.containers(template)
        for _, amounts in containers.lists(dict(container.spec.get("resources") or {}))
    )


def _named(template: Json) -> dict[str, frozenset[str]]:
    """The resources that each container of a manifest's template names. The manifest is a text that anybody wrote."""
    found: dict[str, frozenset[str]] = {}
    for kind in ("containers", "initContainers"):
        listed = _dig(template, ("spec",)).get(kind)
        for container in listed if isinstance(listed, list) else ():
            resources = _dig({"container": container}, ("container", "resources"))
            name = str(container.get("name") or "") if isinstance(container, dict) else ""
            found[name] = frozenset({*_dig(resources, ("limits",)), *_dig(resources, ("requests",))})
    return found


def _dig(obj: Json, path: tuple[str, ...]) -> Json:
    """What lies at the path; empty where there is no map."""
    for name in path:
        inner = obj.get(name)
        if not isinstance(inner, dict):
            return {}
        obj = inner
    return obj


def _placed(obj: Json, path: tuple[str, ...], value: Json) -> Json:
    first, *rest = path
    return obj | {first: _placed(obj[first], tuple(rest), value) if rest else value}
