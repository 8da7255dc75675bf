"""The rules of the webhook: all that can happen to a pod, in order.

A rule is a module of `webhook.pods` with one or both of these functions, and nothing else that this page calls:

    mutate(pod, context)    changes the pod at its creation
    validate(pod, context)  refuses the stored form of the pod, or warns its author

`pod` is the `PodUnderReview`, `context` what a rule knows besides it. A rule that has nothing to do returns. The first
refusal counts. Warnings are shown in the order in which the rules give them.

`mutate` of all rules together is a fixed point: a pod that they have changed stays as it is, because the API server
calls the webhook again after other webhooks.
"""

from typing import Final, Protocol

from webhook.pods import (
    agent,
    annotations,
    classes,
    defaults,
    devices,
    frameworks,
    gangs,
    membership,
    mpsmode,
    nodes,
    placement,
    podgroups,
    resources,
    scheduler,  # of pods that name none
    splits,
    units,
)
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview


class _Mutates(Protocol):
    def mutate(self, pod: PodUnderReview, context: Context) -> None: ...


MUTATE: Final[tuple[_Mutates, ...]] = (
    # What the pod says, and what it asks for.
    splits,  # first: nothing may be read of a pod that has lost the number of cards of a share
    membership,  # the gang that it names, before defaults: a member gets no default share
    units,  # 2 becomes 2Gi, before amounts are compared
    classes,  # k80 becomes cardwise.dev/k80, units of a class become MiB: now the request can be read
    placement,  # before defaults: a pod with a node gets none, a copy of a placed pod does
    defaults,  # the namespace's share, if nothing is requested; after this the request does not change any more
    devices,  # the author's annotation of device classes was replaced
    podgroups,  # reads the request; before everything that depends on it or on the gang
    # What it gets.
    mpsmode,  # before the agent and the environment, which depend on the mode
    frameworks,  # before the agent, which provides the hook's files
    agent,  # changes the keys of init containers, so before everything that is written by key
    annotations,  # the numbers of cards by container; placement annotations of copies are removed
    resources,  # amounts, slots, markers and environment of each container
    nodes,  # tolerations and RuntimeClass
    scheduler,  # of pods that name none
    gangs,  # label and gate, last: a gang's pod with a node is refused only if nothing else is wrong
)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Change the pod by all rules. Raises InvalidRequest, KubeError."""
    for rule in MUTATE:
        rule.mutate(pod, context)
