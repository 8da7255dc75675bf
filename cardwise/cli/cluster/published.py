"""Reads the extender's ConfigMap: its policy, its limits per card, and the workload that it has learned.

The user needs the right to view the extender's namespace. Without this right, the default policy is assumed, and a note
reports this.
"""

from dataclasses import dataclass
from typing import Final

from cardwise.core.api import names, policies
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_MISSING_REMEDY: Final = (
    "the leading extender creates it; if Cardwise is installed in another namespace, give --cardwise-namespace or "
    "$CARDWISE_NAMESPACE"
)


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """The policy and the workload of the extender.

    workload: the learned workload, as the engine saved it; "" if no policy has learned yet.
    note: why the policy is unknown; "" if it is known.
    known_limits: the extender's limits per card; None if an entry of the ConfigMap is invalid or missing.
    """

    policy: str = policies.DEFAULT_POLICY
    workload: str = ""
    note: str = ""
    known_limits: CardLimits | None = None

    @property
    def limits(self) -> CardLimits:
        """The extender's limits per card; the defaults if they are unknown."""
        return self.known_limits or CardLimits()


def read_published(client: KubeClient, namespace: str = names.NAMESPACE) -> PublishedPolicy:
    """Read the ConfigMap; defaults replace missing entries. `namespace`: the namespace of Cardwise."""
    configmap = f"ConfigMap {names.WORKLOAD} in {namespace}"
    try:
        saved = client.get(paths.configmaps(namespace, names.WORKLOAD))
    except errors.NotFound:
        return PublishedPolicy(note=f"there is no {configmap}; {_MISSING_REMEDY}")
    except errors.Forbidden as error:
        return PublishedPolicy(note=f"you may not read the {configmap} ({error.message})")
    data = saved.get("data") or {}
    workload = data.get(names.WORKLOAD_REQUESTS, "")
    policy = data.get(names.WORKLOAD_POLICY, "")
    note = ""
    if not policy:
        note = f"the {configmap} names no policy"
    elif policy not in policies.CARD_POLICIES:
        note = f"the {configmap} names an unknown policy ({wording.quote_text(policy)})"
    return PublishedPolicy(policies.DEFAULT_POLICY if note else policy, workload, note, CardLimits.read(data))


def policy_of_pod(pod: Json, published: PublishedPolicy) -> str:
    """The policy that chooses the pod's cards: the policy in its annotation, which may be the namespace's default;
    without an annotation, the extender's policy.
    """
    pod_policy = annotations_of(pod).get(names.POLICY, "")
    return policies.card_policy(pod_policy if policies.is_valid(pod_policy) else None, published.policy)
