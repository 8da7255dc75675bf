"""Which of several extenders answers, and what makes void the Bindings of the one before it.

Comes in: the Lease. Goes out: the term in whose name binds are posted.

Read first: `leadership`, then `fence` (docs/design/0011-fencing.md).
"""
