"""An HTTP/1.1 server for WSGI applications, and the port with metrics and health.

Comes in: connections. Goes out: calls that have come whole, each with a thread.

Read first: `serving` (the process), `httpserver` (the connections), `httpcalls` (bytes to calls), `health`.
"""
