"""Leadership: elects the extender that serves calls, and fences off the Bindings of former leaders.

Input: the Lease. Output: the leader epoch, which is part of each Binding.

    leadership  whether this extender serves calls, and how a leader epoch begins
    fence       changes pods so that the API server refuses older Bindings (docs/design/0011-fencing.md)
    marking     the label on the leader's pod, by which the Service finds it
"""
