"""Pods: what is written into them, and why one is refused.

Comes in: a pod as its user wrote it. Goes out: the same pod with amounts, environment, agent, gates and labels, or
`InvalidRequest` with field and remedy.

Read first: `mutate` (shares), `validate` (what can never run), `classes` and `devices` (types), then `agent`, `gangs`.

What a pod says: `units` (bare numbers), `defaults` (of its namespace), `mpsmode`, `reapplied` (a manifest that is
applied again). What is added: `environment`, `frameworks` (the hook of Python frameworks), `agent` (the sidecar),
`agentresources` (its cpu and memory) within `limitranges`, `tolerations` (of taints of nodes with cards).
What is refused since another webhook has changed it later: `order`.
"""
