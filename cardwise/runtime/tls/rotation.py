"""Rotation of certificates: one pure step from what is stored to what should be.

Without store and thread, so that years can be played in a test. A CA is replaced in three steps, so that no client ever
meets a certificate that it cannot verify: the next CA is first only announced in the bundle; after `overlap` it signs
the leafs; after another `overlap`, when every replica and client has moved, the old one goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from cardwise.runtime.tls.certs import KeyPair, KeyPurpose, hosts_of, issued_by, new_authority, new_leaf, normal_hosts

# Names in the store; the first five are also what parts read from their directory.
BUNDLE = "ca.crt"
SERVER_CERT, SERVER_KEY = "tls.crt", "tls.key"
CLIENT_CERT, CLIENT_KEY = "client.crt", "client.key"
AUTHORITY_CERT, AUTHORITY_KEY = "authority.crt", "authority.key"
NEXT_CERT, NEXT_KEY, NEXT_SINCE = "authority-next.crt", "authority-next.key", "authority-next.since"
OLD_CERT, OLD_SINCE = "authority-old.crt", "authority-old.since"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """`overlap` must be longer than the slowest client takes to learn a new bundle, and than two check intervals.

    kube-scheduler reads its certificate and the bundle at its start and never again. So the client's certificate lives
    longer than the server's, and `overlap` must be as long as such a client may run: see `for_slow_clients`.
    """

    authority: timedelta = timedelta(days=3650)
    authority_renew: timedelta = timedelta(days=730)  # replace the CA when it has less left
    leaf: timedelta = timedelta(days=365)
    leaf_renew: timedelta = timedelta(days=90)
    client: timedelta = timedelta(days=3 * 365)
    client_renew: timedelta = timedelta(days=2 * 365)
    overlap: timedelta = timedelta(days=30)

    @classmethod
    def for_slow_clients(cls) -> Self:
        """A client that started at any time may run for a year: as long as any of what it read is good for."""
        return cls(authority_renew=timedelta(days=3 * 365), overlap=timedelta(days=365))

    @classmethod
    def every(cls, period: timedelta) -> Self:
        """The leafs are renewed after one period, the CA after two; they live as long as always."""
        usual = cls()
        return cls(
            authority_renew=usual.authority - 2 * period,
            leaf_renew=usual.leaf - period,
            client_renew=usual.client - period,
            overlap=min(period, usual.overlap),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCertificates:
    """`hosts`: DNS names and addresses of the server. `name` becomes the common name of CA and leafs.

    A certificate may be good for more hosts: each replica that shares it brings its own, and they must not take turns
    in making it anew. Names that nobody wants any more go with the next renewal.
    """

    hosts: Sequence[str]
    client: bool = False
    name: str = "cardwise"


def advance(
    stored: Mapping[str, bytes], wanted: WantedCertificates, lifetimes: Lifetimes, now: datetime
) -> dict[str, bytes]:
    """What should be stored now; equal to `stored` when nothing is due.

    Made anew are entries that are damaged, or not valid yet: from a time when the clock was ahead.
    """
    files = dict(stored)
    _advance_authority(files, wanted, lifetimes, now)
    authority = KeyPair(files[AUTHORITY_CERT], files[AUTHORITY_KEY])
    _renew_leaf(
        files, (SERVER_CERT, SERVER_KEY), authority, KeyPurpose.SERVER, wanted=wanted, lifetimes=lifetimes, now=now
    )
    if wanted.client:
        _renew_leaf(
            files, (CLIENT_CERT, CLIENT_KEY), authority, KeyPurpose.CLIENT, wanted=wanted, lifetimes=lifetimes, now=now
        )
    # The issuing CA first: tools that read only one certificate of a bundle read that.
    files[BUNDLE] = b"".join(files[name] for name in (AUTHORITY_CERT, NEXT_CERT, OLD_CERT) if name in files)
    return files


def _advance_authority(
    files: dict[str, bytes], wanted: WantedCertificates, lifetimes: Lifetimes, now: datetime
) -> None:
    current = _pair(files, AUTHORITY_CERT, AUTHORITY_KEY, now)
    following = _pair(files, NEXT_CERT, NEXT_KEY, now)
    if current is None or current.certificate().not_valid_after_utc <= now:
        # Nothing usable: no overlap can save anybody, begin at once.
        _drop(files, NEXT_CERT, NEXT_KEY, NEXT_SINCE, OLD_CERT, OLD_SINCE)
        fresh = following or new_authority(f"{wanted.name} CA", now, lifetimes.authority)
        files[AUTHORITY_CERT], files[AUTHORITY_KEY] = fresh.cert, fresh.key
        return
    if OLD_CERT in files and now >= _since(files, OLD_SINCE) + lifetimes.overlap:
        _drop(files, OLD_CERT, OLD_SINCE)
    if following is None:
        _drop(files, NEXT_CERT, NEXT_KEY, NEXT_SINCE)
        if current.certificate().not_valid_after_utc - now < lifetimes.authority_renew:
            fresh = new_authority(f"{wanted.name} CA", now, lifetimes.authority)
            files[NEXT_CERT], files[NEXT_KEY] = fresh.cert, fresh.key
            files[NEXT_SINCE] = _stamp(now)
    elif now >= _since(files, NEXT_SINCE) + lifetimes.overlap:
        files[OLD_CERT], files[OLD_SINCE] = current.cert, _stamp(now)
        files[AUTHORITY_CERT], files[AUTHORITY_KEY] = following.cert, following.key
        _drop(files, NEXT_CERT, NEXT_KEY, NEXT_SINCE)


def _renew_leaf(
    files: dict[str, bytes],
    names: tuple[str, str],
    authority: KeyPair,
    use: KeyPurpose,
    *,
    wanted: WantedCertificates,
    lifetimes: Lifetimes,
    now: datetime,
) -> None:
    hosts = normal_hosts(wanted.hosts if use is KeyPurpose.SERVER else ())
    leaf = _pair(files, *names, now)
    if leaf is not None:
        certificate, issuer = leaf.certificate(), authority.certificate()
        # A leaf is cut to its CA's end, so at that end there is nothing to gain from another one.
        left = certificate.not_valid_after_utc - now
        renew = lifetimes.leaf_renew if use is KeyPurpose.SERVER else lifetimes.client_renew
        due = left < renew and certificate.not_valid_after_utc < issuer.not_valid_after_utc
        if not due and issued_by(certificate, issuer):
            if hosts <= hosts_of(certificate):
                return
            hosts |= hosts_of(certificate)
    name = wanted.name if use is KeyPurpose.SERVER else f"{wanted.name}-client"
    lifetime = lifetimes.leaf if use is KeyPurpose.SERVER else lifetimes.client
    fresh = new_leaf(authority, name, sorted(hosts), use, now=now, lifetime=lifetime)
    files[names[0]], files[names[1]] = fresh.cert, fresh.key


def _pair(files: Mapping[str, bytes], cert: str, key: str, now: datetime) -> KeyPair | None:
    if cert not in files or key not in files:
        return None
    pair = KeyPair(files[cert], files[key])
    return pair if pair.matches() and pair.certificate().not_valid_before_utc <= now else None


def _drop(files: dict[str, bytes], *names: str) -> None:
    for name in names:
        files.pop(name, None)


def _stamp(now: datetime) -> bytes:
    return now.astimezone(UTC).isoformat(timespec="seconds").encode()


def _since(files: Mapping[str, bytes], name: str) -> datetime:
    try:
        return datetime.fromisoformat(files[name].decode())
    except (KeyError, ValueError):
        # Unreadable: as if long ago, so that the change goes on and does not hang for ever.
        return datetime.min.replace(tzinfo=UTC) + timedelta(days=1)
