"""Reflectors: lists of objects that are kept in step with the API server.

Input: a path and the projection of an object. Output: the present projections, and a call for each change.

Read first: `reflector` (threads and watches) over `store` (the pure half); `nodepods` is one of them.
"""
