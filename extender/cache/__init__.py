"""The books: what nodes report, what pods hold or may come to hold, and the ledger of cards that follows from both.

Comes in: records, and what filter and bind decide. Goes out: where a pod fits (`placing`) and what is free.
Read first: `decisions` (the stages of a decision), `claims` (what each pod may have), `holdings` (how the ledger follows).
Nothing here locks: `statelock` is the one lock, which `extender.state` holds.
"""
