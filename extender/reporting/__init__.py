"""What people see: statuses of our objects, PodGroups, automatic classes, and events.

Comes in: the state, and our objects as the watch shows them (`listers`). Goes out: for each object what ought to be
written, which is compared with what is there and written at one pace (`schedule`). `controllers` run it.

Read first: `statuses`, then `statuswriter`.
"""
