"""What every part is started with: settings, logs, loops, certificates, an HTTP server, health.

Read first: `settings` and `logs`; then `http` (what serves, and `/metrics`) and `tls` (certificates and their renewal).
"""
