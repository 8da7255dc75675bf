"""Leadership: which of several extenders answers, and that no Binding of a former leader lands any more.

Comes in: the Lease. Goes out: the term in whose name Bindings are posted.

    leadership  when this extender answers, and how a term begins
    fence       changes pods so that no older Binding lands (docs/design/0011-fencing.md)
    marking     the label on the leader's pod, by which the Service finds it
"""
