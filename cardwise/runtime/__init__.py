"""The runtime of every component: settings, logs, loops, certificates, an HTTP server, health.

Input: a component's command line, its WSGI application, health checks. Output: responses over TLS, logs, metrics.

The modules:

    settings     the command-line options that all components have
    logs         logging, one JSON line per message
    interpreter  settings of Python's interpreter for serving
    loops        a thread that runs a function at an interval, or at once when it is woken
    http         an HTTP server; the port of `/metrics` and `/healthz`
    tls          certificates and their renewal
    replacing    replaces a file atomically
"""
