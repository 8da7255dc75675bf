"""Leadership: elects the extender that serves calls, and fences off the Bindings of former leaders.

Input: the Lease. Output: the leader epoch, which is part of each Binding.

    leadership  whether this extender serves calls, and how a leader epoch begins
    fence       changes pods so that the API server refuses older Bindings (docs/design/0011-fencing.md)
    marking     the label on the leader's pod; the Service selects the pod by this label

Public seam: `Leadership`. Calls and controllers ask `leadership` whether this extender leads, and before each write
whether their epoch still allows it. Example, a single extender, which always leads:

    >>> from extender.leadership.leadership import Leadership
    >>> leadership = Leadership()
    >>> epoch = leadership.epoch()
    >>> with leadership.allow_post(epoch) as seconds:
    ...     print(leadership.denial(), seconds > 0)
    None True
"""
