"""Reflectors: lists of objects that are kept in step with the API server.

Comes in: a path and what is kept of an object. Goes out: what is known now, and a call for each change.

Read first: `reflector` (threads and watches) over `store` (the pure half); `nodepods` is one of them.
"""
