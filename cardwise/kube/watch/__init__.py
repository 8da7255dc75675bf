"""Reflectors: lists of objects that are kept in step with the API server.

Input: a path and what is kept of an object. Output: what is known now, and a call for each change.

Read first: `reflector` (threads and watches) over `store` (the pure half); `nodepods` is one of them.
"""
