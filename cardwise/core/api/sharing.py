"""With which pods a pod shares its cards: with all, or with pods of its namespace only.

The annotation `cardwise.dev/share-with: namespace` of a pod demands the latter. A namespace may demand it for its pods:
the webhook then writes the annotation into each new pod (docs/design/0041-share-with.md).
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text

FIELD: Final = f"metadata.annotations[{names.SHARE_WITH}]"
NAMESPACE: Final = "namespace"  # the only value of the annotation


class Tenant(NamedTuple):
    """A pod as a tenant of its cards.

    namespace: the pod's namespace; "" if it is unknown, which counts as another namespace.
    exclusive: whether the pod shares cards with pods of its namespace only.
    """

    namespace: str = ""
    exclusive: bool = False

    def can_share_with(self, other: "Tenant") -> bool:
        """Whether pods of the two tenants may be on one card."""
        return self.namespace == other.namespace or not (self.exclusive or other.exclusive)


ANY_TENANT: Final = Tenant()


def tenant_of(annotations: Mapping[str, str], namespace: str) -> Tenant:
    """An admitted pod as a tenant. The webhook refuses other values of the annotation."""
    return Tenant(namespace, annotations.get(names.SHARE_WITH) == NAMESPACE)


def check_share_with(text: str, field: str = FIELD) -> None:
    """Check the value of the annotation. Raises InvalidRequest.

    field: where the text is, for the error.
    """
    if text != NAMESPACE:
        problem = f"{quote_text(text)} does not say with which pods a GPU is shared"
        raise InvalidRequest(field, problem, f"write {NAMESPACE}, or leave it out")
