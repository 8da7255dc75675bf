"""What the webhook knows of the cluster beside the object that it is asked about.

Comes in: lists that reflectors keep. Goes out: defaults, classes, cards, quotas, bounds, numbers of gangs.

Read first: `view`, which implements what `server.decisions` asks; `offers` is what nodes have, `cards` how large and
how many their cards are. `ondemand` asks for what no watch shows: objects made a moment ago, how many pods a gang
needs, whether PodGroups of Kubernetes are served.
"""
