"""The modules of the rules for pods. Read `webhook.rules` first: all rules in order, each with its reason.

Input: the pod under review (`pod`) and what else a rule knows (`context`). Output: the changed pod, warnings, or
`InvalidRequest` with field and remedy.

What the pod requests: `agentcopies` (a copied share agent), `splits` (split shares), `membership` and `podgroups` (its
gang), `units` (numbers without a unit), `classes` and `devices` (types), `placement` (its node), `defaults` (of its
namespace).
What the pod gets: `mpsmode`, `frameworks` (the hook of Python frameworks), `agent` (the sidecar) with `agentresources`
(the sidecar's cpu and memory), `annotations`, `resources` with `environment`, `nodes` (tolerations, RuntimeClass),
`scheduler`, `gangs` (label and gate).
Checks only: `capacity` (whether the pod could ever fit) with `oversize` (whether it may wait), `foreign` (resources
that no node offers), `gpuquotas`, `unreadkeys` (annotations that no program reads), `members` (of its gang).
Not rules: `order` (errors about changes by a later webhook), `reapplied` (a manifest that is applied again).

Public seam: `Rule`, a module with `mutate(pod, context)`, `validate(pod, context)` or both (`Mutates` and `Validates`
of `webhook.rules`). Example, a rule that labels each pod with its namespace's team:

    >>> from webhook.pods.pod import PodUnderReview
    >>> def mutate(pod, context):
    ...     pod.labels = pod.labels | {"team": context.namespace}
    >>> pod = PodUnderReview({"metadata": {"labels": {"app": "web"}}})
    >>> mutate(pod, context)
    >>> pod.to_json()["metadata"]["labels"]
    {'app': 'web', 'team': 'research'}
"""
