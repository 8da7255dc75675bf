"""The rules of the webhook: all that can happen to a pod, in order.

A rule is a function in a module of `webhook.pods`. The name of the function begins with one of these words:

    mutate(pod, context)    changes the pod at its creation
    validate(pod, context)  refuses the pod as it will be stored, or warns its author

`pod` is the `PodUnderReview`, `context` what a rule knows besides it. Each module contains the rules for one topic. A
rule that has nothing to do returns. The first refusal counts, and warnings are shown in the order of the rules. A rule
may rely on the rules above it only.

MUTATE as a whole is idempotent: a second run changes nothing. The API server calls the webhook again after other
webhooks.

Templates of workloads go through MUTATE and VALIDATE as their pods will; the outcome is not stored. In stored
templates, ResourceQuotas and LimitRanges, the webhook changes two things: names (by `templates.spellings`) and numbers
without a unit (by `amounts.add_unit`).
"""

from collections.abc import Callable, Iterable
from typing import Final

from webhook import deadline
from webhook.pods import (
    agent,
    amounts,
    annotations,
    capacity,
    claims,
    defaults,
    gangs,
    gpuquotas,
    isolation,
    resources,
    scheduling,
    sharing,
)
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview

Rule = Callable[[PodUnderReview, Context], None]

MUTATE: Final[tuple[Rule, ...]] = (
    # What the pod says.
    agent.mutate_copies,  # first: what a copied share agent requests is not part of the pod's request
    resources.mutate_splits,  # a share that has lost the number of its cards must not be read as a share of one card
    gangs.mutate_name,  # the gang that the pod names; before placement and defaults, which treat members differently
    amounts.mutate,  # 2 becomes 2Gi, k80 becomes cardwise.dev/k80, units of a class become MiB
    scheduling.mutate_copies,  # before `defaults`: a pod with a node takes none, but the copy of a placed pod does
    defaults.mutate,  # the namespace's share, if nothing is requested
    amounts.mutate_device_annotation,  # a warning, after the warning about the placement
    gangs.mutate_podgroup,  # reads the request, which does not change after this, and with it the gang
    # What the pod gets.
    isolation.mutate,  # before the agent and the variables, which depend on it
    sharing.mutate,  # the tenants with which it shares GPUs
    agent.mutate,  # moves init containers, so before all rules that write by a container's key
    annotations.mutate,  # removes what only Cardwise may write, so after all rules that read what the author wrote
    resources.mutate,  # amounts, slots, markers and variables of each container
    # These need the request and the gang only.
    scheduling.mutate,  # tolerations, RuntimeClass and the scheduler of pods that name none
    gangs.mutate,  # label and gate; late, so that a member with a node is refused only if nothing else is wrong
    claims.mutate,  # claim and gate, where shares are allocated as claims
)

VALIDATE: Final[tuple[Rule, ...]] = (
    # Whether the pod can run; the most useful refusal first.
    amounts.validate,  # whether its classes exist; before the request is read, so that the refusal names the cause
    resources.validate,  # reads the request; whether the pod was rewritten
    scheduling.validate_node_name,  # whether the pod names its node
    claims.validate,  # whether claim and gate are present, and one claim is enough
    capacity.validate,  # whether the pod would fit on an empty node
    gangs.validate,  # finds the gang; whether label and gate are present
    capacity.validate_offered_resources,  # warnings about resources that no node offers
    scheduling.validate,  # warnings about scheduler and gates, then nodes; their sizes only if nothing else is wrong
    amounts.validate_small_shares,  # warnings about shares that are too small
    gpuquotas.validate,  # whether the GPUQuotas of the namespace allow the request
    # Whether another webhook has changed what MUTATE wrote.
    resources.validate_environment,  # the variables
    agent.validate,  # the share agent, its volume and mounts
    isolation.validate,  # also whether a node meets it
    sharing.validate,  # whether the namespace requires or allows the demand
    # Last, because it matters least, and because it asks the API server.
    annotations.validate_unread,  # warnings about annotations and labels that no program reads
    gangs.validate_number,  # whether existing pods of the gang name the same number
)

# Pods that request nothing of Cardwise, but have names that look like it: warnings only.
ADVISE: Final[tuple[Rule, ...]] = (capacity.validate_offered_resources, annotations.validate_unread)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Change the pod by all rules. Raises InvalidRequest, KubeError, ReviewTimeout."""
    _apply(MUTATE, pod, context)


def validate(pod: PodUnderReview, context: Context) -> None:
    """Check the pod by all rules. Raises InvalidRequest, KubeError, ReviewTimeout.

    pod: made with `request.parse_mutated`.
    """
    _apply(VALIDATE, pod, context)


def advise(pod: PodUnderReview, context: Context) -> None:
    """Warn about the names in a pod that requests nothing of Cardwise. Raises ReviewTimeout."""
    _apply(ADVISE, pod, context)


def _apply(rules: Iterable[Rule], pod: PodUnderReview, context: Context) -> None:
    for rule in rules:
        deadline.check()
        rule(pod, context)
