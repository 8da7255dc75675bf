"""Certificates of a part: made, stored, renewed, and told to the API server.

Comes in: names for the certificate, and what a Secret or a directory holds. Goes out: files for servers, the CA in
webhook configurations.

The modules:

    tls        renews certificates, and puts them where servers read them
    rotation   what should be stored next (pure)
    certs      makes a certificate
    certstore  where certificates are kept: a directory or a Secret
    filesets   replaces files that belong together
    cabundle   the CA in the configuration of the webhooks
    expiry     a metric: when certificates end
"""
