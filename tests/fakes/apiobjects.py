"""What the API server knows of objects without storing any: kinds, selectors, patches and field managers."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonpatch
import msgspec

from cardwise.core.api import names
from cardwise.core.values.decoded import Json

Key = tuple[str, str, str]  # collection, namespace, name

encoded, decoded = msgspec.json.encode, msgspec.json.decode


def copied(document: Any) -> Any:
    return decoded(encoded(document))


def without_metadata_and_status(manifest: Json) -> Json:
    return {name: part for name, part in manifest.items() if name not in ("metadata", "status")}


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, message: str, reason: str = "", **details: object) -> None:
        super().__init__(message)
        self.code = code
        self.body = status(code, message, reason, **details)


def status(code: int, message: str, reason: str = "", **details: object) -> Json:
    """A Status object."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success" if code < 300 else "Failure",
        "message": message,
        "reason": reason or REASONS.get(code, ""),
        "code": code,
        "details": details,
    }


REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """`status`: it has the subresource, which alone writes the status. `custom`: of a CustomResourceDefinition."""

    name: str
    namespaced: bool = True
    status: bool = False
    custom: bool = False
    fields: tuple[str, ...] = ()  # that field selectors may name beside name and namespace


_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_CARDWISE = f"/apis/{names.API_VERSION}"

KINDS: dict[str, Kind] = {
    "/api/v1/namespaces": Kind("Namespace", namespaced=False, status=True),
    "/api/v1/nodes": Kind("Node", namespaced=False, status=True),
    "/api/v1/pods": Kind("Pod", status=True, fields=("spec.nodeName", "spec.schedulerName", "status.phase")),
    "/api/v1/services": Kind("Service", status=True),
    "/api/v1/secrets": Kind("Secret"),
    "/api/v1/configmaps": Kind("ConfigMap"),
    "/api/v1/events": Kind(
        "Event", fields=("involvedObject.kind", "involvedObject.name", "involvedObject.uid", "reason", "type")
    ),
    "/api/v1/serviceaccounts": Kind("ServiceAccount"),
    "/api/v1/limitranges": Kind("LimitRange"),
    "/api/v1/resourcequotas": Kind("ResourceQuota", status=True),
    "/apis/apps/v1/daemonsets": Kind("DaemonSet", status=True),
    "/apis/apps/v1/deployments": Kind("Deployment", status=True),
    "/apis/apps/v1/replicasets": Kind("ReplicaSet", status=True),
    "/apis/apps/v1/statefulsets": Kind("StatefulSet", status=True),
    "/apis/batch/v1/jobs": Kind("Job", status=True),
    "/apis/batch/v1/cronjobs": Kind("CronJob", status=True),
    "/apis/coordination.k8s.io/v1/leases": Kind("Lease"),
    "/apis/networking.k8s.io/v1/networkpolicies": Kind("NetworkPolicy"),
    "/apis/node.k8s.io/v1/runtimeclasses": Kind("RuntimeClass", namespaced=False),
    "/apis/resource.k8s.io/v1/resourceclaims": Kind("ResourceClaim", status=True),
    "/apis/policy/v1/poddisruptionbudgets": Kind("PodDisruptionBudget", status=True),
    f"{_ADMISSION}/mutatingwebhookconfigurations": Kind("MutatingWebhookConfiguration", namespaced=False),
    f"{_ADMISSION}/validatingwebhookconfigurations": Kind("ValidatingWebhookConfiguration", namespaced=False),
    f"{_ADMISSION}/validatingadmissionpolicybindings": Kind("ValidatingAdmissionPolicyBinding", namespaced=False),
    f"{_ADMISSION}/validatingadmissionpolicies": Kind("ValidatingAdmissionPolicy", namespaced=False, status=True),
    f"{_CARDWISE}/extendedresources": Kind("ExtendedResource", namespaced=False, status=True, custom=True),
    f"{_CARDWISE}/resourceclasses": Kind("ResourceClass", namespaced=False, status=True, custom=True),
    f"{_CARDWISE}/gpuquotas": Kind("GPUQuota", status=True, custom=True),
    f"{_CARDWISE}/podgroups": Kind("PodGroup", status=True, custom=True),
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names: a collection, an object of it, or a subresource of that."""

    collection: str
    namespace: str = ""
    name: str = ""
    sub: str = ""

    @property
    def key(self) -> Key:
        return self.collection, self.namespace, self.name

    @classmethod
    def parse(cls, path: str) -> "Target":
        parts = path.strip("/").split("/")
        base = 2 if parts[0] == "api" else 3
        head, rest = parts[:base], parts[base:]
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name, *sub = [*rest, "", ""]
        return cls("/".join(["", *head, plural]), namespace, name, "/".join(sub).strip("/"))


# Selectors.

Selector = Callable[[Json], bool]


def selector(kind: Kind, query: dict[str, str]) -> Selector:
    """By labelSelector and fieldSelector."""
    labels = [_label_condition(text) for text in _split(query.get("labelSelector", ""))]
    fields = [_field_condition(kind, text) for text in _split(query.get("fieldSelector", ""))]
    return lambda manifest: all(holds(manifest) for holds in (*labels, *fields))


def _split(text: str) -> Iterator[str]:
    """At commas outside of parentheses."""
    return (part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip())


def _label_condition(text: str) -> Selector:
    if listed := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", text):
        key, operator, allowed = listed[1], listed[2], {word.strip() for word in listed[3].split(",")}
    elif compared := re.fullmatch(r"([^!=]+)(!?=)=?(.*)", text):
        key, operator, allowed = compared[1], "in" if compared[2] == "=" else "notin", {compared[3]}
    else:
        wanted = not text.startswith("!")
        return lambda manifest: (text.lstrip("!") in _labels(manifest)) == wanted
    return lambda manifest: (_labels(manifest).get(key) in allowed) == (operator == "in")


def _labels(manifest: Json) -> dict[str, str]:
    return manifest["metadata"].get("labels") or {}


def _field_condition(kind: Kind, text: str) -> Selector:
    field, unequal, expected = re.fullmatch(r"([^!=]+)(!?)==?(.*)", text).groups()
    if field not in ("metadata.name", "metadata.namespace", *kind.fields):
        raise Refused(400, f"field label not supported: {field}")

    def holds(manifest: Json) -> bool:
        field_value: Any = manifest
        for key in field.split("."):
            field_value = (field_value or {}).get(key)
        return ((field_value or "") == expected) != bool(unequal)

    return holds


# Patches.


def merged(target: Any, change: Any) -> Any:
    """A JSON merge patch, RFC 7386."""
    if not isinstance(change, dict):
        return change
    merged_object = dict(target) if isinstance(target, dict) else {}
    for key, part in change.items():
        if part is None:
            merged_object.pop(key, None)
        else:
            merged_object[key] = merged(merged_object.get(key), part)
    return merged_object


_MERGE_KEYS = {"schedulingGates": "name", "conditions": "type"}
_ATOMIC_LISTS = ("nodeSelectorTerms",)


def merged_strategically(target: Any, change: Any, field: str = "") -> Any:
    """A strategic merge patch, of the lists of `_MERGE_KEYS` and `_ATOMIC_LISTS` only."""
    if isinstance(change, list) and field not in _ATOMIC_LISTS:
        key = _MERGE_KEYS[field]
        by_key = {element[key]: element for element in target or ()}
        for element in change:
            if element.get("$patch") == "delete":
                by_key.pop(element[key], None)
            else:
                by_key[element[key]] = merged_strategically(by_key.get(element[key]), element)
        return list(by_key.values())
    if not isinstance(change, dict):
        return change
    by_key = dict(target) if isinstance(target, dict) else {}
    for key, part in change.items():
        if part is None:
            by_key.pop(key, None)
        else:
            by_key[key] = merged_strategically(by_key.get(key), part, key)
    return by_key


def patched(kind: Kind, content_type: str, manifest: Json, change: Any) -> Json:
    if content_type == "application/merge-patch+json":
        return merged(manifest, change)
    if content_type == "application/strategic-merge-patch+json" and not kind.custom:
        return merged_strategically(manifest, change)
    if content_type == "application/json-patch+json":
        try:
            return jsonpatch.apply_patch(manifest, change)
        except jsonpatch.JsonPatchException as error:
            raise Refused(422, f"the server rejected our request due to an error in our request: {error}") from error
    raise Refused(415, f"the body of the request was in an unknown format: {content_type}")


# Field managers.

_Path = tuple[str, ...]
_NOT_MANAGED = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "name", "namespace")


def managed(before: Json, after: Json, entry: Json) -> list[Json]:
    """metadata.managedFields of `after`, which the manager of `entry` has made of `before`. Lists are one value."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    written = {path for path, leaf in new.items() if path not in old or old[path] != leaf}
    entries = []
    mine: set[_Path] = set()
    for known in before.get("metadata", {}).get("managedFields") or ():
        paths = {path for path in _paths(known.get("fieldsV1") or {}) if path in new} - written
        if all(known.get(key) == entry.get(key) for key in ("manager", "operation", "subresource")):
            mine = paths
        elif paths:
            entries.append(known | {"fieldsV1": _tree(paths)})
    if mine or written:
        entries.append(entry | {"fieldsV1": _tree(mine | written)})
    return entries


def _leaves(document: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if isinstance(document, dict) and document:
        for key, child in document.items():
            if not (path == () and key in ("kind", "apiVersion")) and not (
                path == ("metadata",) and key in _NOT_MANAGED
            ):
                yield from _leaves(child, (*path, key))
    elif path:
        yield path, document


def _paths(tree: Json, path: _Path = ()) -> Iterator[_Path]:
    for key, below in tree.items():
        here = (*path, key.removeprefix("f:"))
        yield from _paths(below, here) if below else (here,)


def _tree(paths: set[_Path]) -> Json:
    tree: Json = {}
    for path in sorted(paths):
        here = tree
        for key in path:
            here = here.setdefault(f"f:{key}", {})
    return tree
