"""Rules for pods: the changes that the webhook makes to pods, and its reasons to refuse a pod.

Input: a pod as its user wrote it. Output: the same pod with amounts, environment, agent, gates and labels, or
`InvalidRequest` with field and remedy.

Read first: `mutate` (shares), `validate` (pods that can never run), `classes` and `devices` (types), then `agent`,
`gangs`.

The meaning of a pod's request: `units` (bare numbers), `defaults` (of its namespace), `mpsmode`, `reapplied` (a
manifest that is applied again). Additions to a pod: `environment`, `frameworks` (the hook of Python frameworks),
`agent` (the sidecar), `agentresources` (the sidecar's cpu and memory), `tolerations` (of taints of nodes with cards).
Errors about changes by a later webhook: `order`.
"""
