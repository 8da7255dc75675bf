"""Leadership: which of several extenders answers, and that no Binding of a former leader lands any more.

Comes in: the Lease. Goes out: the term in whose name binds are posted.

Read first: `leadership`, then `fence` (docs/design/0011-fencing.md).
"""
