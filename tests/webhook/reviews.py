"""AdmissionReviews and what the webhook knows, for tests."""

import json
from dataclasses import dataclass, field
from typing import Any

from webhook.defaults import Defaults
from webhook.validate import Cards

Json = dict[str, Any]


@dataclass
class Known:
    """A `decisions.View` of plain values."""

    namespaces: dict[str, Defaults] = field(default_factory=dict)
    known_cards: Cards = field(default_factory=Cards)
    pods: dict[str, Json] = field(default_factory=dict)

    def defaults(self, namespace: str) -> Defaults | None:
        return self.namespaces.get(namespace)

    fresh_defaults = defaults

    def cards(self) -> Cards:
        return self.known_cards

    def pod(self, namespace: str, name: str) -> Json | None:
        return self.pods.get(f"{namespace}/{name}")


def review(
    obj: Any,
    resource: str = "pods",
    *,
    sub: str = "",
    operation: str = "CREATE",
    namespace: str = "default",
    name: str = "",
    username: str = "somebody",
) -> Json:
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "X"},
        "resource": {"group": "", "version": "v1", "resource": resource},
        "operation": operation,
        "namespace": namespace,
        "name": name,
        "userInfo": {"username": username, "groups": ["system:authenticated"]},
        "object": obj,
        "oldObject": None,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    if sub:
        request["subResource"] = sub
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def body(*args: Any, **kwargs: Any) -> bytes:
    return json.dumps(review(*args, **kwargs)).encode()
