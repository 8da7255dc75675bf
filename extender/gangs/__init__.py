"""Gangs: which pods belong together, where they are planned, and when all of them may be bound.

Comes in: members, what filter was offered, binds that wait. Goes out: plans that hold cards, and who is to go on or
to give back.

Read first: `gangwords` (the terms), `gangs` (what is decided), `line` (in which order), `gangplaces` (plans).
"""
