"""An HTTP/1.1 server for WSGI applications, and the port with metrics and health.

Input: connections. Output: complete calls, each on a thread.

    serving     the serving process, and its parent that replaces it
    httpserver  the connections; `threads`: the threads that answer calls, in a fair order
    httpcalls   parses calls and encodes responses
    tlsconnection     TLS on a socket that never blocks
    health      the port of /metrics, /healthz, /readyz; `configz`: the settings there
"""
