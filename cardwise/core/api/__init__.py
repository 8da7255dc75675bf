"""What users and the parts write to each other: one codec for each format, and nobody else reads it.

Comes in: decoded JSON of pods and of our objects. Goes out: requests, assignments, cards, classes, quotas, as values.

Read first: `request` (what a pod asks), `assignment` (what it got), `names` (every name that leaves the process).
"""
