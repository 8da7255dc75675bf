"""Creates certificates: our own CA, server and client certificates, all ECDSA P-256.

This module decides the contents of certificates; `rotation` decides their times. Go verifies names by SAN only; Python
3.13 needs key identifiers and critical basic constraints. Times are aware datetimes in UTC.
"""

import contextlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of nodes differ; a new certificate must be valid on all of them.
_BACKDATE = timedelta(hours=1)
_PEM_BEGIN = b"-----BEGIN CERTIFICATE-----"


class KeyPurpose(Enum):
    """The purpose of a leaf certificate."""

    SERVER = ExtendedKeyUsageOID.SERVER_AUTH
    CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its PKCS#8 key, as PEM."""

    cert: bytes
    key: bytes

    def certificate(self) -> x509.Certificate:
        """The parsed certificate. Raises ValueError if the PEM is damaged."""
        return x509.load_pem_x509_certificate(self.cert)

    def private_key(self) -> ec.EllipticCurvePrivateKey:
        """The parsed key. Raises ValueError if the PEM is damaged or the key has another type."""
        key = serialization.load_pem_private_key(self.key, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("not an EC key")
        return key

    def matches(self) -> bool:
        """Whether certificate and key are readable and belong together."""
        try:
            return self.certificate().public_key() == self.private_key().public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm):
            return False


def new_authority(common_name: str, now: datetime, lifetime: timedelta) -> KeyPair:
    """Create a self-signed CA that can sign leaf certificates only."""
    key = ec.generate_private_key(ec.SECP256R1())
    # With the time, two CAs have different subjects, so that verifiers which search issuers by name find the right CA.
    name = _x509_name(f"{common_name} {now:%Y-%m-%d %H:%M:%S}")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _certificate_builder(name, name, key.public_key(), now, now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return _encode_pair(builder.sign(key, hashes.SHA256()), key)


def new_leaf(
    authority: KeyPair, common_name: str, hosts: Sequence[str], use: KeyPurpose, *, now: datetime, lifetime: timedelta
) -> KeyPair:
    """Create a leaf certificate for `hosts` (DNS names and IP addresses). It expires no later than its CA."""
    issuer, issuer_key = authority.certificate(), authority.private_key()
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + lifetime, issuer.not_valid_after_utc)
    builder = (
        _certificate_builder(_x509_name(common_name), issuer.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use.value]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_authority_identifier(issuer), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_parse_host(host) for host in hosts]), False)
    return _encode_pair(builder.sign(issuer_key, hashes.SHA256()), key)


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether clients accept this certificate as a CA: clients in Go, and OpenSSL with strict flags (Python 3.13)."""
    try:
        extensions = certificate.extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return False
    return constraints.critical and constraints.value.ca and usage.key_cert_sign


def parse_certificates(pem: bytes) -> list[x509.Certificate]:
    """Parse the certificates of a bundle. Unreadable blocks are left out."""
    certificates = []
    for block in pem.split(_PEM_BEGIN)[1:]:
        with contextlib.suppress(ValueError):
            certificates.append(x509.load_pem_x509_certificate(_PEM_BEGIN + block))
    return certificates


def encode_certificates(certificates: Iterable[x509.Certificate]) -> bytes:
    """Encode a bundle as PEM."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def is_issued_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the CA's key signed the leaf."""
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def hosts_of(certificate: x509.Certificate) -> frozenset[str]:
    """The DNS names and IP addresses of the certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = names.get_values_for_type(x509.IPAddress)
    return frozenset(names.get_values_for_type(x509.DNSName)) | {str(address) for address in addresses}


def normalize_hosts(hosts: Sequence[str]) -> frozenset[str]:
    """The hosts in the form of `hosts_of`."""
    return frozenset(str(name.value) for name in map(_parse_host, hosts))


def _parse_host(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _x509_name(common_name: str) -> x509.Name:
    # 64 characters are the limit of a common name.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(until)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    subject = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject)


def _encode_pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
