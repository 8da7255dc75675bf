"""The rules of the webhook: all that can happen to a pod, in order.

A rule is a module of `webhook.pods` with one or both of these functions:

    mutate(pod, context)    changes the pod at its creation
    validate(pod, context)  refuses the pod as it will be stored, or warns its author

`pod` is the `PodUnderReview`, `context` what a rule knows besides it. A rule that has nothing to do returns. The first
refusal counts, and warnings are shown in the order of the rules. A rule may rely on the rules above it only.

MUTATE as a whole is idempotent: a pod that it has changed stays as it is, because the API server calls the webhook
again after other webhooks.

Templates of workloads go through MUTATE and VALIDATE as their pods will; the outcome is not stored. What the webhook
changes in the stored template, in ResourceQuotas and LimitRanges are names (as `classes`, by `templates.spellings`) and
numbers without a unit (as `units`, by `units.add_unit`).
"""

from typing import Final, Protocol

from webhook.pods import (
    agent,
    agentcopies,
    annotations,
    capacity,
    classes,
    defaults,
    devices,
    environment,
    foreign,
    frameworks,
    gangs,
    gpuquotas,
    members,
    membership,
    mpsmode,
    nodes,
    placement,
    podgroups,
    resources,
    scheduler,
    splits,
    units,
    unreadkeys,
)
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview


class Mutates(Protocol):
    """A rule that changes pods."""

    def mutate(self, pod: PodUnderReview, context: Context) -> None: ...


class Validates(Protocol):
    """A rule that refuses pods, or warns their authors."""

    def validate(self, pod: PodUnderReview, context: Context) -> None: ...


MUTATE: Final[tuple[Mutates, ...]] = (
    # What the pod says.
    agentcopies,  # first: what a copied share agent requests is not part of the pod's request
    splits,  # a share that has lost the number of its cards must not be read as a share of one card
    membership,  # the gang that the pod names; before `placement` and `defaults`, which treat members differently
    units,  # 2 becomes 2Gi; before all rules that read amounts
    classes,  # k80 becomes cardwise.dev/k80, units of a class become MiB; before the request is read
    placement,  # before `defaults`: a pod with a node takes none, but the copy of a placed pod does
    defaults,  # the namespace's share, if nothing is requested
    devices,  # a warning about the annotation that `classes` replaced; after the warning about the placement
    podgroups,  # reads the request, which does not change after this, and with it the gang
    # What the pod gets.
    mpsmode,  # before the agent and the variables, which depend on the mode
    frameworks,  # before the agent, which brings the hook's files
    agent,  # moves init containers, so before all rules that write by a container's key
    annotations,  # removes what only Cardwise may write, so after all rules that read what the author wrote
    resources,  # amounts, slots, markers and variables of each container
    # These need the request and the gang only.
    nodes,  # tolerations and RuntimeClass
    scheduler,  # the scheduler of pods that name none
    gangs,  # label and gate; last, so that a member with a node is refused only if nothing else is wrong
)

VALIDATE: Final[tuple[Validates, ...]] = (
    # Whether the pod can run; the most useful refusal first.
    classes,  # whether its classes exist; before the request is read, so that the refusal names the cause
    devices,  # whether the annotation by which the request is read is correct
    resources,  # reads the request; whether the pod was rewritten
    placement,  # whether the pod names its node
    capacity,  # whether the pod would fit on an empty node
    gangs,  # finds the gang; whether label and gate are present
    foreign,  # warnings about resources that no node offers
    scheduler,  # warnings about a scheduler that does not call Cardwise, and about gates
    nodes,  # warnings about the selected nodes; about their sizes only if there is no other warning
    units,  # warnings about shares that are too small
    gpuquotas,  # whether the GPUQuotas of the namespace allow the request
    # Whether another webhook has changed what MUTATE wrote.
    environment,  # the variables
    agent,  # the share agent, its volume and mounts
    mpsmode,  # also whether a node provides the mode
    # Last, because it matters least, and because it asks the API server.
    unreadkeys,  # warnings about annotations and labels that no program reads
    members,  # whether existing pods of the gang name the same number
)

# Pods that request nothing of Cardwise, but have names that look like it: warnings only.
ADVISE: Final[tuple[Validates, ...]] = (foreign, unreadkeys)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Change the pod by all rules. Raises InvalidRequest, KubeError."""
    for rule in MUTATE:
        rule.mutate(pod, context)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Check the pod by all rules. Raises InvalidRequest, KubeError.

    pod: made with `request.parse_mutated`.
    """
    for rule in VALIDATE:
        rule.validate(pod, context)


def advise(pod: PodUnderReview, context: Context) -> None:
    """Warn about the names in a pod that requests nothing of Cardwise."""
    for rule in ADVISE:
        rule.validate(pod, context)
