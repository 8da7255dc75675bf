"""The modules of the rules for pods, by idea. Read `webhook.rules` first: all rules in order, each with its reason.

Input: the pod under review (`pod`) and what else a rule knows (`context`). Output: the changed pod, warnings, or
`InvalidRequest` with field and remedy.

What the pod requests: `amounts` (units, names of classes, devices), `defaults` (of its namespace), `gangs`.
What the pod gets: `isolation`, `sharing`, `agent` (the sidecar) with `frameworks` (the hook of Python frameworks),
`annotations`, `resources` (amounts and variables of its containers), `scheduling` (scheduler, tolerations,
RuntimeClass, its node), `claims` (claim and gate with scheduler.mode=claims).
Checks only: `capacity` (whether a node could ever serve it), `gpuquotas`.
Not rules: `refusals` (errors and warnings that several rules share), `slots` (what makes the node give a container its
GPUs).

Public seam: `Rule` of `webhook.rules`, a function of the pod and the context. Example, a rule that labels each pod with
its namespace's team:

    >>> from webhook.pods.pod import PodUnderReview
    >>> def mutate_team(pod, context):
    ...     pod.labels = pod.labels | {"team": context.namespace}
    >>> pod = PodUnderReview({"metadata": {"labels": {"app": "web"}}})
    >>> mutate_team(pod, context)
    >>> pod.to_json()["metadata"]["labels"]
    {'app': 'web', 'team': 'research'}
"""
