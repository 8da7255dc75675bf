"""Gangs: pods that start together or not at all.

Comes in: pods and PodGroups, times handed in. Goes out: how far a gang is, and nodes and cards for all its members.

Read first: `gangs` (which pods belong together), `gangstate` (the phases of one gang), `gangplan` (where it fits).
"""
