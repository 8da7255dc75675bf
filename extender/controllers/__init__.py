"""Background work: what happens with time, and what is written or evicted without being asked.

Comes in: the state. Goes out: evictions, nominations, gates taken away, and what `reporting` says to people. Each
module is a loop or a step of `loops`; `reporters` puts those together that only tell.

Read first: `loops`, then `gangcontroller`.
"""
