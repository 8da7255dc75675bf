"""Reflectors: lists of objects that are kept up to date with the API server.

Input: a path, and a projection (a function that turns an object into the value to keep). Output: the current values,
and a call of a handler for each change.

Read first: `reflector` (the thread and the watches), then `store` (the known objects, without I/O). `nodepods` is a
reflector of the pods of one node.
"""
