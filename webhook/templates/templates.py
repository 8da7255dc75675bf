"""Rewrites bare names in the pod templates of workloads, because Kubernetes refuses bare names there as in pods.

Nothing else is rewritten: the webhook rewrites the pods themselves later, and GitOps tools need templates that hardly
differ from their manifests. A template without bare names stays unchanged to the last byte. Otherwise updates of Jobs
would fail, because their templates are immutable, and each update of a Deployment would cause a rollout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from cardwise.core.api import names, request
from cardwise.core.values.decoded import Json
from webhook.templates import containers, records
from webhook.templates.spellings import NameTranslator

_POD_TEMPLATE_PATHS_BY_KIND: Mapping[str, tuple[str, ...]] = {
    "deployments": ("spec", "template"),
    "replicasets": ("spec", "template"),
    "statefulsets": ("spec", "template"),
    "daemonsets": ("spec", "template"),
    "jobs": ("spec", "template"),
    "replicationcontrollers": ("spec", "template"),
    "cronjobs": ("spec", "jobTemplate", "spec", "template"),
    "podtemplates": ("template",),
}
KINDS = frozenset(_POD_TEMPLATE_PATHS_BY_KIND)
_MAX_TEMPLATES: Final = 32  # templates of one object that are checked
_RESOURCES_PER_NODE_FIELD: Final = "resourcesPerNode"  # a TrainJob's only field about the pods of its runtime
_POD_RESOURCES_FIELD: Final = "spec.containers[0].resources."

_Path = tuple["_Path", str | int] | tuple[()]  # the path of the parent, and a key or an index in it


def rewrite_workload(
    workload: Json, old: Json | None, resource: str, translator: NameTranslator, *, update: bool
) -> Json:
    """The rewritten workload; the caller's object if nothing changes. `old`: the stored workload at an update.

    Unknown classes are reported by the advice instead. Raises InvalidRequest, KubeError.
    """
    path = _POD_TEMPLATE_PATHS_BY_KIND[resource]
    template = _get_map(workload, path)
    if not template or (resource == "replicasets" and is_controlled(workload)):
        # The Deployment controller compares the ReplicaSet's template with its own, and would create ReplicaSets
        # without end.
        return workload
    if _names_nvidia(_get_map(old or {}, path)):
        # Kubernetes accepts the name in templates, and the pods are rewritten, so the stored template need not change.
        translator = translator.without_nvidia()
    record = records.read_record(workload)
    manifests = records.read_manifests(workload, old, lambda manifest: _names_by_container(_get_map(manifest, path)))
    if resource == "jobs":
        # The template of a Job is immutable: removing a key from it would make the update fail.
        manifests = replace(manifests, new=False, server=records.NO_MANIFEST)
    spec = dict(template.get("spec") or {})
    own_keys: dict[str, tuple[str, ...]] = {}
    changed = False
    for container in request.containers(template):
        name = str(container.spec.get("name") or "")
        resources = dict(container.spec.get("resources") or {})
        field = f"{'.'.join(path)}.{container.path}.resources."
        place = records.rewrite_place(
            {field + kind: amounts for kind, amounts in containers.amount_lists(resources)},
            translator.translate_container_name,
            place=name,
            recorded=record.get(name, frozenset()),
            manifests=manifests,
            update=update,
        )
        own_keys[name] = place.own_keys
        if place.changed:
            changed = True
            resources |= {key.removeprefix(field): amounts for key, amounts in place.amounts.items()}
            containers.put_resources(spec, container, resources)
    return (
        records.with_record(_with_template(workload, path, template | {"spec": spec}), own_keys)
        if changed
        else workload
    )


def template_of(workload: Json, resource: str) -> tuple[str, Json]:
    """The path of the pod template, for messages, and the template; empty without one."""
    path = _POD_TEMPLATE_PATHS_BY_KIND[resource]
    return ".".join(path), _get_map(workload, path)


def find_templates(manifest: Json, resource: str) -> Iterator[tuple[str, Json]]:
    """Yield the path and content of every pod template in the object, also of custom resources.

    A custom resource may have the same plural as a kind of Kubernetes, such as Volcano's jobs, but its template may be
    elsewhere.
    """
    if resource in _POD_TEMPLATE_PATHS_BY_KIND and template_of(manifest, resource)[1]:
        yield template_of(manifest, resource)
    else:
        yield from islice(_search_templates({"spec": manifest.get("spec")}, ()), _MAX_TEMPLATES)


def field_in_workload(path: str, in_template: str) -> str:
    """The path in the workload of a field in the template that `find_templates` returned with `path`."""
    if path.endswith(f".{_RESOURCES_PER_NODE_FIELD}"):
        return f"{path}.{in_template.removeprefix(_POD_RESOURCES_FIELD)}"
    return f"{path}.{in_template}"


def _search_templates(node: object, path: _Path) -> Iterator[tuple[str, Json]]:
    """Search depth-first. A map whose `spec` has containers is a template; templates inside a template do not count.

    The text of a path is built for templates only: in a deep object, the total length of all paths grows with the
    square of its depth.
    """
    if isinstance(node, list):
        for i, inner in enumerate(node):
            yield from _search_templates(inner, (path, i))
    elif isinstance(node, dict):
        spec = node.get("spec")
        if path and isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield _format_path(path), node
            return
        for name, inner in node.items():
            if name == _RESOURCES_PER_NODE_FIELD:
                yield _format_path((path, name)), {"spec": {"containers": [{"name": "node", "resources": inner}]}}
            else:
                yield from _search_templates(inner, (path, name))


def _format_path(path: _Path) -> str:
    parts = []
    while path:
        path, part = path
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    return "".join(reversed(parts)).removeprefix(".")


def is_controlled(workload: Json) -> bool:
    """Whether a controller has created the workload."""
    owners = (workload.get("metadata") or {}).get("ownerReferences") or ()
    return any(owner.get("controller") for owner in owners)


def _names_nvidia(template: Json) -> bool:
    return any(
        names.NVIDIA_GPU in amounts
        for container in request.containers(template)
        for _, amounts in containers.amount_lists(dict(container.spec.get("resources") or {}))
    )


def _names_by_container(template: Json) -> dict[str, frozenset[str]]:
    """The resources that each container of a manifest's template names. The manifest is text from any user."""
    names_by_container: dict[str, frozenset[str]] = {}
    for kind in ("containers", "initContainers"):
        entries = _get_map(template, ("spec",)).get(kind)
        for container in entries if isinstance(entries, list) else ():
            resources = _get_map({"container": container}, ("container", "resources"))
            name = str(container.get("name") or "") if isinstance(container, dict) else ""
            names_by_container[name] = frozenset(
                {*_get_map(resources, ("limits",)), *_get_map(resources, ("requests",))}
            )
    return names_by_container


def _get_map(tree: Json, path: tuple[str, ...]) -> Json:
    """The map at the path; empty if there is none."""
    for name in path:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            return {}
        tree = inner
    return tree


def _with_template(tree: Json, path: tuple[str, ...], template: Json) -> Json:
    first, *rest = path
    return tree | {first: _with_template(tree[first], tuple(rest), template) if rest else template}
