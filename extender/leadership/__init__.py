"""Leadership: which of several extenders serves calls, and that no Binding of a former leader binds a pod any more.

Comes in: the Lease. Goes out: the leader epoch, which each Binding carries.

    leadership  when this extender serves calls, and how a leader epoch begins
    fence       changes pods so that the API server refuses older Bindings (docs/design/0011-fencing.md)
    marking     the label on the leader's pod, by which the Service finds it
"""
