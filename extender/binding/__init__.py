"""bind: the one write that puts a pod on its node, with the cards that it has there.

Comes in: the bind call. Goes out: a Binding, or nothing. Members of gangs wait here for each other (`permit`);
`throttle` says when too many binds are under way.

Read first: `binder`.
"""
