"""Rules for pods: what the webhook writes into a pod, and why it refuses one.

Input: a pod as its user wrote it. Output: the same pod with amounts, environment, agent, gates and labels, or
`InvalidRequest` with field and remedy.

Read first: `mutate` (shares), `validate` (pods that can never run), `classes` and `devices` (types), then `agent`,
`gangs`.

What a pod means: `units` (bare numbers), `defaults` (of its namespace), `mpsmode`, `reapplied` (a manifest that is
applied again). What is added: `environment`, `frameworks` (the hook of Python frameworks), `agent` (the sidecar),
`agentresources` (its cpu and memory) within `limitranges`, `tolerations` (of taints of nodes with cards).
Errors about changes by a later webhook: `order`.
"""
