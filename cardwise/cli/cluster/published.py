"""The extender's ConfigMap: the policy of its setting, and which pods come.

Whoever may view the extender's namespace may read it. Without that right the default policy is assumed, and a note says
so.
"""

import os
from dataclasses import dataclass
from typing import Final

from cardwise.core.api import names, policies
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_VARIABLE: Final = "CARDWISE_NAMESPACE"  # where Cardwise is installed, if not in its usual namespace
_NONE: Final = (
    "the leading extender makes it, and where Cardwise is installed in another namespace the environment variable "
    f"{_VARIABLE} names it"
)


@dataclass(frozen=True, slots=True)
class Published:
    """`workload`: as the engine has written it, "" where no policy has learned yet. `note`: why it is not known."""

    policy: str = policies.DEFAULT
    workload: str = ""
    note: str = ""


def take(client: KubeClient) -> Published:
    """Reads it. What is not there is as an extender without settings has it, or is in another namespace."""
    namespace = os.environ.get(_VARIABLE) or names.NAMESPACE
    configmap = f"ConfigMap {names.WORKLOAD} in {namespace}"
    try:
        saved = client.get(paths.configmaps(namespace, names.WORKLOAD))
    except errors.NotFound:
        return Published(note=f"there is no {configmap}; {_NONE}")
    except errors.Forbidden as error:
        return Published(note=f"you may not read the {configmap} ({error.message})")
    data = saved.get("data") or {}
    workload = data.get(names.WORKLOAD_ASKS, "")
    policy = data.get(names.WORKLOAD_POLICY)
    if policy is None:
        return Published(workload=workload, note=f"the {configmap} names no policy")
    if policy not in policies.POLICIES:
        return Published(workload=workload, note=f"the {configmap} names a policy that is not known here ({policy})")
    return Published(policy, workload)


def in_force(pod: Json, told: Published) -> str:
    """The policy that decides for the pod: its own, which it may have from its namespace, else the extender's."""
    own = annotations_of(pod).get(names.POLICY)
    return own if own in policies.POLICIES else told.policy
