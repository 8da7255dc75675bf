"""Background work: brings statuses, classes, PodGroups and events to what the state says.

Comes in: the state, and our objects as the watch shows them (`listers`). Goes out: evictions, and writes at one
pace (`schedule`). Each module is a loop or a step of `loops`; `telling` puts those together that only tell.

Read first: `loops`, then `statuswriter` and `gangkeeper`.
"""
