"""Handshakes as by clients, and the certificates that a client with a bundle trusts."""

import functools
import socket
import ssl
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509

from cardwise.runtime.tls import certs, rotation
from cardwise.runtime.tls.rotation import CertificateNeeds, Lifetimes

NOW = datetime.now(UTC)
HOSTS = ("cardwise-webhook.cardwise.svc", "127.0.0.1", "::1")


def lifetimes_for(period: timedelta) -> Lifetimes:
    """Renew the leafs after one period and the CA after two, with the usual lifetimes."""
    usual = Lifetimes()
    return Lifetimes(
        authority_renew=usual.authority - 2 * period,
        leaf_renew=usual.leaf - period,
        client_renew=usual.client - period,
        overlap=min(period, usual.overlap),
    )


def issue_files(now: datetime, hosts: Sequence[str] = HOSTS) -> dict[str, bytes]:
    """The files of a store with certificates created at this time."""
    return rotation.advance_certificates({}, CertificateNeeds(hosts=hosts), Lifetimes(), now)


def handshake(server_files: dict[str, bytes], bundle: bytes, host: str, tmp_path, client: bool = False) -> None:
    """Perform a real handshake over a socket pair; raises ssl.SSLError if either side refuses."""
    for name, content in server_files.items():
        (tmp_path / name).write_bytes(content)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    user = ssl.create_default_context(cadata=bundle.decode())
    user.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    if client:
        server.load_verify_locations(cadata=server_files["ca.crt"].decode())
        server.verify_mode = ssl.CERT_REQUIRED
        server.verify_flags |= ssl.VERIFY_X509_STRICT
        user.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    client_end, right = socket.socketpair()
    client_end.settimeout(60)
    right.settimeout(60)

    def serve() -> None:
        try:
            with server.wrap_socket(client_end, server_side=True) as secure:
                secure.sendall(b"hello")
        except (ssl.SSLError, OSError):
            client_end.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with user.wrap_socket(right, server_hostname=host) as secure:
            assert secure.recv(5) == b"hello"
    finally:
        right.close()
        thread.join()


def trusted(leaf: bytes, bundle: bytes, now: datetime) -> bool:
    certificate, issuers = _read(leaf, bundle)
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc and any(
        authority.not_valid_after_utc > now for authority in issuers
    )


@functools.cache
def _read(leaf: bytes, bundle: bytes) -> tuple[x509.Certificate, list[x509.Certificate]]:
    """The leaf, and the certificates of the bundle that signed it."""
    certificate = x509.load_pem_x509_certificate(leaf)
    return certificate, [
        authority for authority in x509.load_pem_x509_certificates(bundle) if certs.is_issued_by(certificate, authority)
    ]
