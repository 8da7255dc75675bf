"""Gangs: which pods belong together, where they are planned, and when all of them may be bound.

Comes in: members, offers of filter, binds that wait. Goes out: plans that hold cards, and who is to go or to give back.
Read first: `gangwords` (the terms), `gangs` (what is decided), `gangplaces` (plans), `reserve` (cards kept for who waited long).
"""
