"""An HTTP/1.1 server for WSGI applications, and the port with metrics and health.

Comes in: connections. Goes out: calls that have come whole, each with a thread.

    serving     the process that serves, and its watcher
    httpserver  the connections; `threads`: who answers their calls, and whose call is next
    httpcalls   bytes to calls, answers to bytes
    tlsconnection     TLS on a socket that never blocks
    health      the port of /metrics, /healthz, /readyz; `configz`: the settings there
"""
