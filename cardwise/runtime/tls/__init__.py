"""Creates, stores and renews the certificates of a component, and publishes its CA in the API server.

Input: host names, the files in a Secret or directory. Output: files for servers, the CA in webhook configurations.

The modules:

    tls        renews certificates, and writes them for servers and clients
    rotation   the next step of a rotation (pure)
    certs      creates certificates
    certstore  stores certificates in a directory or a Secret
    filesets   replaces a set of files atomically
    cabundle   keeps the CA in the webhook configurations up to date
    expiry     a metric: the expiry of certificates
"""
