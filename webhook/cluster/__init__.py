"""What the webhook knows of the cluster beside the object that it is asked about.

Comes in: lists that reflectors keep. Goes out: defaults, classes, cards, quotas, bounds, numbers of gangs.

Read first: `view`, which implements what `server.decisions` asks; `offers` is what nodes have, `cards` how large and
how many their cards are. Of gangs: `gangnumbers` (how many pods one needs), `podgroups` (whether Kubernetes' own are
served). `freshlist` looks up what the watch has not shown yet.
"""
