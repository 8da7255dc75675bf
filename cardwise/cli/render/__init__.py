"""How it looks: tables for people, objects for programs.

Comes in: a survey or a ledger. Goes out: text and JSON.

Read first: `tables` (every table), `printing` (every JSON); the others are of one subject each.
"""
