"""An HTTP/1.1 server for WSGI applications, and the port with metrics and health.

Input: connections. Output: complete calls, each on a thread.

    serving        the serving process, and its parent process, which replaces it if it hangs
    httpserver     the connections; `threads`: the threads that answer calls, in a fair order
    httpcalls      parses calls and encodes responses
    tlsconnection  TLS on a non-blocking socket
    health         the port of /metrics, /healthz, /readyz; `configz`: the page /configz on this port
"""
