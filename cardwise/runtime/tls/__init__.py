"""Certificates of a part: made, stored, renewed, and told to the API server.

Read first: `tls` (the keeper), `rotation` (pure: what should be), `certs` (how one is made), `certstore` (where it is).
"""
