"""What each request does to the objects of the API server of the tests, and how kube-apiserver answers it."""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from tests.fakes.apiobjects import (
    Json,
    Kind,
    Refused,
    Target,
    copied,
    managed,
    merged,
    patched,
    selector,
    status,
    without_metadata_and_status,
)
from tests.fakes.apistore import TIME, Store

# Of the metadata what only the server writes.
_OWN = (
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds", "managedFields",
)  # fmt: skip
_GRACE = 30
_MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"
_BUDGETS = "/apis/policy/v1/poddisruptionbudgets"


@dataclass(frozen=True, slots=True)
class Call:
    """A request for objects of one kind."""

    kind: Kind
    target: Target
    verb: str
    body: Any
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def dry(self) -> bool:
        return bool(self.query.get("dryRun") or (self.verb == "delete" and (self.body or {}).get("dryRun")))


class Verbs:
    """Each takes a call, and returns the object of the answer or raises `Refused`. Hold the store's `changed`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def carry_out(self, call: Call) -> Json:
        sub = call.target.sub
        if not sub and call.verb == "delete" and not call.target.name:
            return self._delete_collection(call)
        if not sub:
            return {
                "get": self._get,
                "list": self._list,
                "create": self._create,
                "update": self._update,
                "patch": self._patch,
                "delete": self._delete,
            }[call.verb](call)
        if sub == "status" and call.kind.status:
            return {"get": self._get, "update": self._update, "patch": self._patch}[call.verb](call)
        if call.kind.name == "Pod" and call.verb == "create" and sub in ("binding", "eviction"):
            return self._bind(call) if sub == "binding" else self._evict(call)
        raise Refused(404, "the server could not find the requested resource")

    def _get(self, call: Call) -> Json:
        return self._store.get_object(call.target)

    def _list(self, call: Call) -> Json:
        selected = selector(call.kind, call.query)
        token, _, offset = call.query.get("continue", "").partition("/")
        if not token:
            token = self._store.snapshot([manifest for manifest in self._store.all(call.target) if selected(manifest)])
        revision, listed = self._store.snapshotted(token)
        start = int(offset or 0)
        end = start + (int(call.query.get("limit", 0)) or len(listed))
        metadata = {"resourceVersion": str(revision)}
        if end < len(listed):
            metadata["continue"] = f"{token}/{end}"
        return {"kind": f"{call.kind.name}List", "apiVersion": "v1", "metadata": metadata, "items": listed[start:end]}

    # Whole objects.

    def _create(self, call: Call) -> Json:
        manifest, kind, target = copied(call.body), call.kind, call.target
        if kind.custom and manifest.get("kind") != kind.name:
            raise Refused(400, f"the kind of the object is not {kind.name}")
        metadata = manifest.setdefault("metadata", {})
        if "generateName" in metadata:
            metadata.setdefault("name", f"{metadata['generateName']}{next(self._store.numbers):05}")
        if metadata.get("namespace", target.namespace) != target.namespace:
            raise Refused(400, "the namespace of the object is not that of the request")
        if target.namespace:
            metadata["namespace"] = target.namespace
        target = replace(target, name=metadata["name"])
        if target.key in self._store.objects:
            raise Refused(409, f'{target.collection} "{target.name}" already exists', "AlreadyExists")
        if kind.status and kind.name != "Node":
            manifest.pop("status", None)
        if kind.name == "Pod":
            manifest["status"] = {"phase": "Pending"}
        return self._written(replace(call, target=target), {}, manifest | {"metadata": metadata | self._store.born()})

    def _update(self, call: Call) -> Json:
        manifest = copied(call.body)
        metadata, of_lease = manifest["metadata"], call.kind.name == "Lease"
        if of_lease and call.target.key not in self._store.objects:
            if metadata.get("uid"):
                raise Refused(409, f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: ")
            return self._create(call)
        now = self._store.get_object(call.target)
        if not metadata.get("resourceVersion"):
            if call.kind.custom or of_lease:
                raise Refused(422, "metadata.resourceVersion: must be specified for an update")
            metadata.pop("resourceVersion", None)
        _check(now, {"uid": metadata.get("uid")})
        return self._replaced(call, now, manifest)

    def _patch(self, call: Call) -> Json:
        now = self._store.get_object(call.target)
        return self._replaced(call, now, patched(call.kind, call.headers["Content-Type"], now, call.body))

    def _replaced(self, call: Call, now: Json, manifest: Json) -> Json:
        """Of the new object that part which this way of writing may change."""
        of_status = call.target.sub == "status"
        metadata, kept = manifest["metadata"], now["metadata"]
        if metadata.get("resourceVersion", kept["resourceVersion"]) != kept["resourceVersion"]:
            raise Refused(409, _MODIFIED)
        if call.kind.custom and of_status:
            metadata = kept
        if metadata.get("uid", kept["uid"]) != kept["uid"]:
            raise Refused(422, f"metadata.uid: Invalid value: {metadata['uid']!r}: field is immutable")
        metadata = {name: part for name, part in metadata.items() if name not in _OWN}
        metadata |= {name: kept[name] for name in _OWN if name in kept}
        spec = without_metadata_and_status(now if of_status else manifest)
        status_source = now if call.kind.status and not of_status else manifest
        manifest = (
            spec | {"metadata": metadata} | ({"status": status_source["status"]} if "status" in status_source else {})
        )
        return now if manifest == now else self._written(call, now, manifest)

    def _written(self, call: Call, before: Json, manifest: Json) -> Json:
        """`manifest`, as a field manager writes it."""
        manager = call.query.get("fieldManager") or call.headers.get("User-Agent", "").partition("/")[0]
        entry = {"manager": manager, "operation": "Update", "apiVersion": manifest.get("apiVersion", "v1")}
        entry |= {"time": self._store.now(), "fieldsType": "FieldsV1"}
        entry |= {"subresource": call.target.sub} if call.target.sub else {}
        manifest = manifest | {"metadata": manifest["metadata"] | {"managedFields": managed(before, manifest, entry)}}
        return manifest if call.dry else self._store.write(call.target.key, manifest)

    def _delete(self, call: Call) -> Json:
        now, options, of_pod = self._store.get_object(call.target), call.body or {}, call.kind.name == "Pod"
        _check(now, options.get("preconditions") or {})
        if call.dry:
            return now
        ending = self._ending(now, options.get("gracePeriodSeconds")) if of_pod else None
        if ending is not None:
            return ending if ending is now else self._store.write(call.target.key, ending)
        self._store.remove(call.target.key)
        return now if of_pod else status(200, "", uid=now["metadata"]["uid"])

    def _delete_collection(self, call: Call) -> Json:
        """Deletes what a list would show, a page of it where there is a limit, and answers that list."""
        if call.kind.namespaced and not call.target.namespace:
            raise Refused(405, "the server does not allow this method on the requested resource")
        page = self._list(call)
        for manifest in page["items"]:
            with suppress(Refused):
                self._delete(replace(call, target=replace(call.target, name=manifest["metadata"]["name"])))
        return page

    # Pods.

    def _ending(self, pod: Json, grace: int | None) -> Json | None:
        """The pod that has time to end; None where it is gone at once."""
        if grace is None:
            grace = pod["spec"].get("terminationGracePeriodSeconds", _GRACE)
        finished = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if not grace or not pod["spec"].get("nodeName") or finished:
            return None
        if pod["metadata"].get("deletionGracePeriodSeconds", math.inf) <= grace:
            return pod
        until = (self._store.clock.wall() + timedelta(seconds=grace)).strftime(TIME)
        return merged(pod, {"metadata": {"deletionTimestamp": until, "deletionGracePeriodSeconds": grace}})

    def _bind(self, call: Call) -> Json:
        pod, metadata = self._store.get_object(call.target), call.body["metadata"]
        _check(pod, {name: metadata.get(name) for name in ("uid", "resourceVersion")})
        refusal = ""
        if pod["metadata"].get("deletionTimestamp"):
            refusal = "is being deleted, cannot be assigned to a host"
        elif pod["spec"].get("schedulingGates"):
            refusal = "has non-empty .spec.schedulingGates"
        elif pod["spec"].get("nodeName"):
            refusal = f"is already assigned to node {pod['spec']['nodeName']!r}"
        if refusal:
            name = call.target.name
            raise Refused(409, f'Operation cannot be fulfilled on pods/binding "{name}": pod {name} {refusal}')
        change = {"metadata": {"annotations": metadata.get("annotations") or {}}}
        self._store.write(call.target.key, merged(pod, change | {"spec": {"nodeName": call.body["target"]["name"]}}))
        return status(201, "")

    def _evict(self, call: Call) -> Json:
        pod = self._store.get_object(call.target)
        deletion = replace(call, verb="delete", body=call.body.get("deleteOptions") or {})
        _check(pod, deletion.body.get("preconditions") or {})
        running = (pod.get("status") or {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
        budgets = self._budgets(pod) if running else []
        if len(budgets) > 1:
            text = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
            raise Refused(500, text)
        for budget in budgets:
            if budget.get("status", {}).get("disruptionsAllowed", 0) <= 0:
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise Refused(429, text, causes=[{"reason": "DisruptionBudget", "message": budget["metadata"]["name"]}])
        for budget in budgets if not deletion.dry else ():
            remaining = budget["status"]["disruptionsAllowed"] - 1
            self._store.write_object(_BUDGETS, merged(budget, {"status": {"disruptionsAllowed": remaining}}))
        self._delete(deletion)
        return status(201, "")

    def _budgets(self, pod: Json) -> list[Json]:
        labels = (pod["metadata"].get("labels") or {}).items()
        return [
            budget
            for budget in self._store.all(Target(_BUDGETS, pod["metadata"]["namespace"]))
            if (budget["spec"].get("selector") or {}).get("matchLabels", {}).items() <= labels
        ]


def _check(manifest: Json, preconditions: dict[str, str | None]) -> None:
    for name, wanted in preconditions.items():
        if wanted and manifest["metadata"][name] != wanted:
            raise Refused(409, f"Precondition failed: {name} is {manifest['metadata'][name]}, not {wanted}")
