"""Rotation of certificates: one pure step from the stored files to the files to store.

This module is free of stores and threads, so tests can simulate years. A CA is replaced in three steps. At each step,
every client can verify the certificates that it gets. First the next CA is only added to the bundle. After `overlap`
the next CA signs the leafs. After another `overlap`, when all replicas and clients use the new CA, the old CA is
removed.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509

from cardwise.runtime.tls.certs import (
    KeyPair,
    KeyPurpose,
    encode_certificates,
    hosts_of,
    is_authority,
    is_issued_by,
    new_authority,
    new_leaf,
    normalize_hosts,
    parse_certificates,
)

# The names of files in the store. Components read the first five files from their TLS directory.
BUNDLE = "ca.crt"
SERVER_CERT, SERVER_KEY = "tls.crt", "tls.key"
CLIENT_CERT, CLIENT_KEY = "client.crt", "client.key"
AUTHORITY_CERT, AUTHORITY_KEY = "authority.crt", "authority.key"
NEXT_CERT, NEXT_KEY, NEXT_SINCE = "authority-next.crt", "authority-next.key", "authority-next.since"
OLD_CERT, OLD_SINCE = "authority-old.crt", "authority-old.since"

_LEAF_FILES = {KeyPurpose.SERVER: (SERVER_CERT, SERVER_KEY), KeyPurpose.CLIENT: (CLIENT_CERT, CLIENT_KEY)}
_LAST_DAY = timedelta(days=1)  # the time before the end in which a leaf must be renewed: long enough for many checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The lifetimes of certificates.

    kube-scheduler reads its certificate and the CA bundle only when it starts. So client certificates live longer than
    server certificates, and `overlap` must be as long as such a client may run: see `for_clients_without_reload`.

    overlap: must be longer than the slowest client takes to get a new bundle, and longer than two check intervals.
    """

    authority: timedelta = timedelta(days=3650)
    authority_renew: timedelta = timedelta(days=730)  # replace the CA when its remaining lifetime is shorter
    leaf: timedelta = timedelta(days=365)
    leaf_renew: timedelta = timedelta(days=90)
    client: timedelta = timedelta(days=3 * 365)
    client_renew: timedelta = timedelta(days=2 * 365)
    overlap: timedelta = timedelta(days=30)

    @classmethod
    def for_clients_without_reload(cls) -> Self:
        """The lifetimes for clients that read the files only at their start and may run for a year."""
        return cls(authority_renew=timedelta(days=3 * 365), overlap=timedelta(days=365))


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateNeeds:
    """The certificates that a component needs.

    A certificate may have more hosts than `hosts`: each replica that shares the certificate adds its own hosts. If
    further hosts were not allowed, the replicas would recreate the certificate in turn. The next renewal removes unused
    hosts.

    hosts: DNS names and addresses of the server.
    client: whether a client certificate is needed.
    name: the common name of the CA and the leafs.
    """

    hosts: Sequence[str]
    client: bool = False
    name: str = "cardwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RotationStep:
    """The arguments of one call of `advance_certificates`. The call changes `files`."""

    files: dict[str, bytes]
    needs: CertificateNeeds
    lifetimes: Lifetimes
    now: datetime


def advance_certificates(
    stored: Mapping[str, bytes],
    needs: CertificateNeeds,
    lifetimes: Lifetimes,
    now: datetime,
    *,
    before: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """The files to store now; equal to `stored` if nothing is due.

    Recreates damaged certificates, and certificates that are not valid yet (because the clock was ahead when they were
    created). If the key of a CA is lost, the leaf certificates of that CA are kept while clients trust them. Meanwhile
    the next CA is added to the bundle. The next CA signs after `overlap`, or earlier if a leaf certificate must be
    replaced.

    before: the files that this process last read from the store, to restore an empty store or the lost key of a CA.
    """
    step = _RotationStep(files=dict(stored or before or {}), needs=needs, lifetimes=lifetimes, now=now)
    files = step.files
    _recover_authority(step, before or {})
    _advance_authority(step)
    uses = (KeyPurpose.SERVER, KeyPurpose.CLIENT) if needs.client else (KeyPurpose.SERVER,)
    if not has_authority_key(files) and any(_due_hosts(step, use) is not None for use in uses):
        _promote_next_authority(step)
    for use in uses:
        _renew_leaf(step, use)
    # The CA that signs now comes first, because some tools read only the first certificate of a bundle.
    files[BUNDLE] = b"".join(files[name] for name in (AUTHORITY_CERT, NEXT_CERT, OLD_CERT) if name in files)
    return files


def has_authority_key(files: Mapping[str, bytes]) -> bool:
    """Whether the CA can sign, because the key exists and matches the certificate."""
    return KeyPair(files.get(AUTHORITY_CERT, b""), files.get(AUTHORITY_KEY, b"")).matches()


def _recover_authority(step: _RotationStep, before: Mapping[str, bytes]) -> None:
    """Restore a damaged or lost certificate or key of the CA from the bundle and from `before`."""
    files = step.files
    stored_authorities = [
        authority
        for name in (AUTHORITY_CERT, BUNDLE)
        for authority in _valid_authorities(files.get(name, b""), step.now)
    ]
    own_authorities = stored_authorities or _valid_authorities(before.get(AUTHORITY_CERT, b""), step.now)
    keys = [source[AUTHORITY_KEY] for source in (files, before) if AUTHORITY_KEY in source]
    pairs = (KeyPair(encode_certificates([authority]), key) for authority in own_authorities for key in keys)
    if matching_pair := next((pair for pair in pairs if pair.matches()), None):
        files[AUTHORITY_CERT], files[AUTHORITY_KEY] = matching_pair.cert, matching_pair.key
    else:
        _drop_files(files, AUTHORITY_CERT, AUTHORITY_KEY)
        leaf = parse_certificates(files.get(SERVER_CERT, b""))[:1]
        if issuer := next(
            (
                authority
                for authority in stored_authorities
                for certificate in leaf
                if is_issued_by(certificate, authority)
            ),
            None,
        ):
            files[AUTHORITY_CERT] = encode_certificates([issuer])
    for name in (AUTHORITY_CERT, NEXT_CERT, OLD_CERT):
        # One unreadable block would make the whole bundle unreadable for OpenSSL.
        if authorities := _valid_authorities(files.get(name, b""), step.now):
            files[name] = encode_certificates(authorities if name == OLD_CERT else authorities[:1])
        else:
            _drop_files(files, name)


def _valid_authorities(pem: bytes, now: datetime) -> list[x509.Certificate]:
    """The CA certificates of a bundle that are valid now."""
    certificates = parse_certificates(pem)
    return [certificate for certificate in certificates if is_authority(certificate) and _is_valid(certificate, now)]


def _is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _advance_authority(step: _RotationStep) -> None:
    files, now = step.files, step.now
    if OLD_CERT in files and now >= _overlap_start(step, OLD_SINCE) + step.lifetimes.overlap:
        _drop_files(files, OLD_CERT)
    if OLD_CERT not in files:
        _drop_files(files, OLD_SINCE)
    next_pair = _valid_pair(files, NEXT_CERT, NEXT_KEY, now)
    if next_pair is None:
        _drop_files(files, NEXT_CERT, NEXT_KEY, NEXT_SINCE)
    if AUTHORITY_CERT not in files:
        # Clients trust no CA yet, so an overlap would be useless.
        _drop_files(files, OLD_CERT, OLD_SINCE)
        _promote_next_authority(step)
    elif next_pair is not None:
        if now >= _overlap_start(step, NEXT_SINCE) + step.lifetimes.overlap:
            _promote_next_authority(step)
    elif not has_authority_key(files) or _is_authority_renewal_due(files[AUTHORITY_CERT], step):
        _announce_next_authority(step)


def _is_authority_renewal_due(authority: bytes, step: _RotationStep) -> bool:
    (certificate,) = parse_certificates(authority)
    return certificate.not_valid_after_utc - step.now < step.lifetimes.authority_renew


def _announce_next_authority(step: _RotationStep) -> None:
    fresh = new_authority(f"{step.needs.name} CA", step.now, step.lifetimes.authority)
    step.files[NEXT_CERT], step.files[NEXT_KEY] = fresh.cert, fresh.key
    step.files[NEXT_SINCE] = _format_time(step.now)


def _promote_next_authority(step: _RotationStep) -> None:
    """Let the next CA sign from now on. The present CA stays in the bundle as the old CA."""
    files = step.files
    if NEXT_CERT not in files:
        _announce_next_authority(step)
    if AUTHORITY_CERT in files:
        files[OLD_CERT], files[OLD_SINCE] = files[AUTHORITY_CERT] + files.get(OLD_CERT, b""), _format_time(step.now)
    files[AUTHORITY_CERT], files[AUTHORITY_KEY] = files[NEXT_CERT], files[NEXT_KEY]
    _drop_files(files, NEXT_CERT, NEXT_KEY, NEXT_SINCE)


def _due_hosts(step: _RotationStep, use: KeyPurpose) -> frozenset[str] | None:
    """The hosts of the leaf to create now; None if the present leaf is kept."""
    files, lifetimes = step.files, step.lifetimes
    hosts = normalize_hosts(step.needs.hosts if use is KeyPurpose.SERVER else ())
    leaf = _valid_pair(files, *_LEAF_FILES[use], step.now)
    if leaf is None:
        return hosts
    certificate, (issuer,) = leaf.certificate(), parse_certificates(files[AUTHORITY_CERT])
    if not is_issued_by(certificate, issuer):
        return hosts
    renew = lifetimes.leaf_renew if use is KeyPurpose.SERVER else lifetimes.client_renew
    if not has_authority_key(files):
        # Clients would not trust a new leaf yet, so the present leaf is kept until its end, for its own hosts.
        renew, hosts = min(renew, _LAST_DAY), hosts if hosts.isdisjoint(hosts_of(certificate)) else frozenset()
    # A leaf expires no later than its CA. If both expire together, a new leaf would not live longer.
    end = certificate.not_valid_after_utc
    if end - step.now < renew and end < issuer.not_valid_after_utc:
        return hosts
    return None if hosts <= hosts_of(certificate) else hosts | hosts_of(certificate)


def _renew_leaf(step: _RotationStep, use: KeyPurpose) -> None:
    hosts = _due_hosts(step, use)
    if hosts is None:
        return
    name = step.needs.name if use is KeyPurpose.SERVER else f"{step.needs.name}-client"
    lifetime = step.lifetimes.leaf if use is KeyPurpose.SERVER else step.lifetimes.client
    authority = KeyPair(step.files[AUTHORITY_CERT], step.files[AUTHORITY_KEY])
    fresh = new_leaf(authority, name, sorted(hosts), use, now=step.now, lifetime=lifetime)
    step.files.update(zip(_LEAF_FILES[use], (fresh.cert, fresh.key), strict=True))


def _valid_pair(files: Mapping[str, bytes], cert: str, key: str, now: datetime) -> KeyPair | None:
    """The pair of certificate and key, if it is complete and valid now; else None."""
    pair = KeyPair(files.get(cert, b""), files.get(key, b""))
    return pair if pair.matches() and _is_valid(pair.certificate(), now) else None


def _drop_files(files: dict[str, bytes], *names: str) -> None:
    for name in names:
        files.pop(name, None)


def _format_time(now: datetime) -> bytes:
    return now.astimezone(UTC).isoformat(timespec="seconds").encode()


def _overlap_start(step: _RotationStep, name: str) -> datetime:
    """The time when the overlap began. Returns now if that time is unreadable or in the future, so that clients get a
    full overlap.
    """
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        since = datetime.fromisoformat(step.files[name].decode())
        if since.tzinfo is not None and since <= step.now:
            return since
    step.files[name] = _format_time(step.now)
    return step.now
