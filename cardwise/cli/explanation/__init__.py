"""What `cardwise explain` says: sentences over what `core.preemption.explanation` finds.

Comes in: a pod, a survey, the engine. Goes out: lines for people, objects for programs.

Read first: `sentences`; then `obstacles` (types and quotas in the way), `remedies` (what would make it run).
"""
