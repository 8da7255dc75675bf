"""What every part is started with: settings, logs, loops, certificates, an HTTP server, health.

Comes in: a part's command line, its WSGI application, checks of its health. Goes out: answers over TLS, logs, metrics.

The modules:

    settings     the options that every part has
    logs         the log, one line of JSON for each message
    interpreter  what Python's interpreter is told before a part serves
    loops        a thread that runs a function at an interval, or when woken
    http         an HTTP server; `/metrics`, `/healthz`
    tls          certificates and their renewal
    replacing    replaces a file atomically
"""
