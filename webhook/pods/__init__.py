"""Pods: what is written into them, and why one is refused.

Comes in: a pod as its user wrote it. Goes out: the same pod with amounts, environment, agent, gates and labels, or
`InvalidRequest` with field and remedy.

Read first: `mutate` (shares), `validate` (what can never run), `classes` and `devices` (types), then `agent`, `gangs`.
"""
