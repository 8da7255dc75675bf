"""Rotation of certificates: real handshakes succeed, and clients can verify at every moment."""

import ssl
import subprocess
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cardwise.runtime.tls import certs, rotation
from cardwise.runtime.tls.rotation import CertificateNeeds, Lifetimes
from tests.runtime.tls.certificates import HOSTS, NOW, handshake, lifetimes_for, trusted


def test_chain_verifies_for_every_host_with_strict_flags_and_both_sides(tmp_path):
    files = rotation.advance_certificates({}, CertificateNeeds(hosts=HOSTS, client=True), Lifetimes(), NOW)
    for host in HOSTS:
        handshake(files, files["ca.crt"], host, tmp_path, client=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, files["ca.crt"], "other.svc", tmp_path)


def test_key_usages_satisfy_go_and_openssl(tmp_path):
    files = rotation.advance_certificates({}, CertificateNeeds(hosts=HOSTS, client=True), Lifetimes(), NOW)
    for name, purpose in (("tls.crt", "sslserver"), ("client.crt", "sslclient")):
        (tmp_path / "ca.crt").write_bytes(files["ca.crt"])
        (tmp_path / name).write_bytes(files[name])
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "ca.crt", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    authority = x509.load_pem_x509_certificate(files["authority.crt"])
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    leaf = x509.load_pem_x509_certificate(files["tls.crt"])
    assert leaf.not_valid_after_utc - NOW == pytest.approx(timedelta(days=365), abs=timedelta(seconds=2))


def test_no_change_while_nothing_is_due():
    wanted = CertificateNeeds(hosts=HOSTS, client=True)
    files = rotation.advance_certificates({}, wanted, Lifetimes(), NOW)
    assert rotation.advance_certificates(files, wanted, Lifetimes(), NOW + timedelta(days=274)) == files
    renewed = rotation.advance_certificates(files, wanted, Lifetimes(), NOW + timedelta(days=276))
    assert renewed["tls.crt"] != files["tls.crt"]
    assert renewed["authority.crt"] == files["authority.crt"]


def test_changed_hosts_cause_a_new_leaf_of_the_same_ca():
    files = rotation.advance_certificates({}, CertificateNeeds(hosts=HOSTS), Lifetimes(), NOW)
    changed = rotation.advance_certificates(files, CertificateNeeds(hosts=("new.svc",)), Lifetimes(), NOW)
    assert changed["ca.crt"] == files["ca.crt"]
    assert "new.svc" in certs.hosts_of(x509.load_pem_x509_certificate(changed["tls.crt"]))
    same = rotation.advance_certificates(
        files, CertificateNeeds(hosts=(*reversed(HOSTS), "0:0:0:0:0:0:0:1")), Lifetimes(), NOW
    )
    assert same == files


def test_replicas_with_own_names_converge_to_one_leaf():
    mine, yours = (CertificateNeeds(hosts=("svc", machine)) for machine in ("pod-a", "pod-b"))
    files = rotation.advance_certificates(
        rotation.advance_certificates({}, mine, Lifetimes(), NOW), yours, Lifetimes(), NOW
    )
    assert certs.hosts_of(x509.load_pem_x509_certificate(files["tls.crt"])) == {"svc", "pod-a", "pod-b"}
    assert rotation.advance_certificates(files, mine, Lifetimes(), NOW) == files
    # The next renewal removes the names of deleted replicas.
    renewed = rotation.advance_certificates(files, mine, Lifetimes(), NOW + timedelta(days=300))
    assert certs.hosts_of(x509.load_pem_x509_certificate(renewed["tls.crt"])) == {"svc", "pod-a"}


@pytest.mark.parametrize("ahead", [timedelta(days=2), timedelta(days=400), timedelta(days=3000)])
@pytest.mark.parametrize("existing", [False, True])
def test_certificates_from_a_fast_clock_are_recreated(tmp_path, ahead, existing):
    wanted = CertificateNeeds(hosts=HOSTS, client=True)
    files = rotation.advance_certificates({}, wanted, Lifetimes(), NOW) if existing else {}
    for days in (0, 31):  # long enough for the next CA to be announced, and to be promoted
        files = rotation.advance_certificates(files, wanted, Lifetimes(), NOW + ahead + timedelta(days=days))
    files = rotation.advance_certificates(files, wanted, Lifetimes(), NOW)
    handshake(files, files["ca.crt"], HOSTS[0], tmp_path, client=True)
    assert trusted(files["tls.crt"], files["ca.crt"], NOW)
    for name in ("tls.crt", "client.crt", "authority.crt"):
        assert x509.load_pem_x509_certificate(files[name]).not_valid_before_utc <= NOW
    assert rotation.advance_certificates(files, wanted, Lifetimes(), NOW) == files


@pytest.mark.parametrize("name", ["authority.crt", "authority.key", "tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("damage", [None, b"", b"garbage"])
def test_damaged_entries_are_recreated(tmp_path, name, damage):
    wanted = CertificateNeeds(hosts=HOSTS)
    files = rotation.advance_certificates({}, wanted, Lifetimes(), NOW)
    damaged = {key: content for key, content in files.items() if key != name}
    if damage is not None:
        damaged[name] = damage
    repaired = rotation.advance_certificates(damaged, wanted, Lifetimes(), NOW)
    handshake(repaired, repaired["ca.crt"], HOSTS[0], tmp_path)
    assert rotation.advance_certificates(repaired, wanted, Lifetimes(), NOW) == repaired


def damage_files(files, **damages):
    """None removes an entry, such as `authority_key=None`; bytes replace it."""
    changed = files | {name.replace("_", ".", 1): content for name, content in damages.items()}
    return {name: content for name, content in changed.items() if content is not None}


WANTED = CertificateNeeds(hosts=HOSTS, client=True)
SLOW = Lifetimes.for_clients_without_reload()


@pytest.mark.parametrize(
    "damage",
    [
        {"authority_key": None},
        {"authority_key": b"garbage"},
        {"authority_crt": None},
        {"authority_crt": b"garbage", "ca_crt": b""},
        {"authority_crt": None, "authority_key": None},
    ],
    ids=str,
)
def test_damaged_ca_keeps_serving_until_clients_know_the_next(tmp_path, damage):
    """A client like kube-scheduler, which reads the bundle and its certificate only at its start."""
    before = rotation.advance_certificates({}, WANTED, SLOW, NOW - timedelta(days=30))
    running = {name: before[name] for name in ("client.crt", "client.key")}
    files = rotation.advance_certificates(damage_files(before, **damage), WANTED, SLOW, NOW)
    assert rotation.advance_certificates(files, WANTED, SLOW, NOW) == files
    if "ca_crt" in damage:
        assert files["ca.crt"].count(b"BEGIN") == 1, "nothing of the authority is left"
        return
    handshake(files | running, before["ca.crt"], HOSTS[0], tmp_path, client=True)
    # A new replica adds its own names; it must not replace the certificate that clients trust.
    other = CertificateNeeds(hosts=(*HOSTS, "new-pod"), client=True)
    files = rotation.advance_certificates(files, other, SLOW, NOW)
    handshake(files | running, before["ca.crt"], HOSTS[0], tmp_path, client=True)
    known = files["ca.crt"]
    for days in range(0, 800, 7):
        files = rotation.advance_certificates(files, WANTED, SLOW, NOW + timedelta(days=days))
        assert trusted(files["tls.crt"], known, NOW + timedelta(days=days))
        assert days > 300 or trusted(before["client.crt"], files["ca.crt"], NOW + timedelta(days=days))
    assert rotation.has_authority_key(files)
    assert "authority-next.crt" not in files


def test_expiring_certificate_is_renewed_by_the_announced_ca():
    before = rotation.advance_certificates({}, WANTED, SLOW, NOW)
    files = rotation.advance_certificates(
        damage_files(before, authority_key=None), WANTED, SLOW, NOW + timedelta(days=200)
    )
    kept, end = files["tls.crt"], NOW + timedelta(days=365)
    files = rotation.advance_certificates(files, WANTED, SLOW, end - timedelta(days=2))
    assert files["tls.crt"] == kept
    files = rotation.advance_certificates(files, WANTED, SLOW, end - timedelta(hours=12))
    assert trusted(files["tls.crt"], files["authority.crt"], end)
    assert trusted(before["client.crt"], files["ca.crt"], end)


@pytest.mark.parametrize("lost", [None, "authority.key", "authority.crt"])
def test_lost_files_are_restored_from_the_last_read(lost):
    before = rotation.advance_certificates({}, WANTED, SLOW, NOW)
    stored = {} if lost is None else {name: content for name, content in before.items() if name != lost}
    assert rotation.advance_certificates(stored, WANTED, SLOW, NOW, before=before) == before


def test_last_read_files_never_replace_another_ca():
    before, others = (rotation.advance_certificates({}, WANTED, SLOW, NOW) for _ in range(2))
    assert rotation.advance_certificates(others, WANTED, SLOW, NOW, before=before) == others
    files = rotation.advance_certificates(damage_files(others, authority_key=None), WANTED, SLOW, NOW, before=before)
    assert files["authority.crt"] == others["authority.crt"]
    assert before["authority.crt"] not in files["ca.crt"]


@pytest.mark.parametrize("kind", ["leaf", "no extensions", "may not sign"])
def test_invalid_ca_is_ignored(tmp_path, kind):
    """Certificates as created by `openssl req -x509` and stored by `kubectl create secret tls`."""
    before = rotation.advance_certificates({}, WANTED, SLOW, NOW - timedelta(days=30))
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = certs._certificate_builder(name, name, key.public_key(), NOW, NOW + timedelta(days=4000))
    if kind == "may not sign":
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(certs._key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
    pair = certs._encode_pair(builder.sign(key, hashes.SHA256()), key)
    if kind == "leaf":
        pair = certs.KeyPair(before["tls.crt"], before["tls.key"])
    for bundle in (before["ca.crt"], pair.cert):
        damaged = damage_files(before, authority_crt=pair.cert, authority_key=pair.key, ca_crt=bundle)
        files = rotation.advance_certificates(damaged, WANTED, SLOW, NOW)
        handshake(files, files["ca.crt"], HOSTS[0], tmp_path, client=True)
        assert rotation.advance_certificates(files, WANTED, SLOW, NOW) == files
        if bundle == before["ca.crt"]:
            handshake(files, bundle, HOSTS[0], tmp_path, client=True)


def announced_store():
    """A store whose next CA is announced, and the time of the announcement."""
    began = NOW - SLOW.authority + SLOW.authority_renew - timedelta(days=1)
    return rotation.advance_certificates(rotation.advance_certificates({}, WANTED, SLOW, began), WANTED, SLOW, NOW)


SINCES = [
    b"2026-11-29",
    b"2026-11-29T06:00:00",
    b"9999-12-31T00:00:00+00:00",
    b"0001-01-01T00:00:00+14:00",
    b"\xff",
    None,
]


@pytest.mark.parametrize("since", SINCES, ids=repr)
def test_unreadable_overlap_start_restarts_the_overlap(since):
    files = announced_store()
    promoted = rotation.advance_certificates(files, WANTED, SLOW, NOW + SLOW.overlap)
    for name, stored, now in (
        ("authority-next.since", files, NOW),
        ("authority-old.since", promoted, NOW + SLOW.overlap),
    ):
        damaged = {file: content for file, content in stored.items() if file != name}
        if since is not None:
            damaged[name] = since
        again = rotation.advance_certificates(damaged, WANTED, SLOW, now)
        if since != SINCES[3]:  # the overlap of a year is over
            assert again == stored
        over = rotation.advance_certificates(again, WANTED, SLOW, now + SLOW.overlap)
        assert name not in over, "it goes on"


def test_new_ca_is_created_when_all_have_expired(tmp_path):
    later = NOW + timedelta(days=20 * 365)
    files = rotation.advance_certificates(announced_store(), WANTED, SLOW, later)
    assert trusted(files["tls.crt"], files["ca.crt"], later)
    assert files["ca.crt"] == files["authority.crt"]


@pytest.mark.parametrize("name", ["authority-next.crt", "authority-old.crt", "ca.crt"])
def test_truncated_block_does_not_break_the_bundle(name):
    files = rotation.advance_certificates({}, WANTED, SLOW, NOW)
    cut = files | {name: files["ca.crt"] + certs.new_authority("next", NOW, timedelta(days=9)).cert[:300]}
    if name == "authority-next.crt":
        cut |= {name: cut[name][-300:]}
    bundle = rotation.advance_certificates(cut, WANTED, SLOW, NOW)["ca.crt"]
    ssl.create_default_context(cadata=bundle.decode())
    assert bundle.startswith(files["ca.crt"])
    assert bundle.count(b"BEGIN") == bundle.count(b"END")


def test_ca_rotation_keeps_clients_of_the_old_bundle_working(tmp_path):
    """Simulates twelve years in steps of a week; each client gets a new bundle three weeks late."""
    wanted = CertificateNeeds(hosts=HOSTS)
    lifetimes = Lifetimes(
        authority=timedelta(days=1000),
        authority_renew=timedelta(days=300),
        leaf=timedelta(days=200),
        leaf_renew=timedelta(days=50),
        overlap=timedelta(days=30),
    )
    files: dict[str, bytes] = {}
    history: list[dict[str, bytes]] = []
    authorities, leafs = set(), set()
    for week in range(12 * 52):
        now = NOW + timedelta(weeks=week)
        files = rotation.advance_certificates(files, wanted, lifetimes, now)
        history.append(files)
        authorities.add(files["authority.crt"])
        leafs.add(files["tls.crt"])
        # A late replica also serves an older leaf.
        for server in (files, history[max(0, week - 3)]):
            for bundle in (files["ca.crt"], history[max(0, week - 3)]["ca.crt"]):
                assert trusted(server["tls.crt"], bundle, now), f"week {week}"
        assert files["ca.crt"].count(b"BEGIN CERTIFICATE") <= 2
    assert 5 <= len(authorities) <= 8
    assert len(leafs) > 25
    change = next(week for week, files in enumerate(history) if "authority-old.crt" in files)
    assert history[change]["tls.crt"] != history[change - 1]["tls.crt"]
    assert history[change - 1]["ca.crt"].count(b"BEGIN CERTIFICATE") == 2


def test_client_that_reads_its_files_at_start_can_run_for_a_year():
    """Simulates fourteen years in steps of two weeks, each with kube-schedulers that started up to a year ago."""
    wanted, lifetimes = CertificateNeeds(hosts=HOSTS, client=True), Lifetimes.for_clients_without_reload()
    files: dict[str, bytes] = {}
    history: list[dict[str, bytes]] = []
    authorities = set()
    for step in range(14 * 26):
        now = NOW + timedelta(weeks=2 * step)
        files = rotation.advance_certificates(files, wanted, lifetimes, now)
        history.append(files)
        authorities.add(files["authority.crt"])
        for started in {max(0, step - age) for age in (0, 1, 13, 26)}:
            theirs = history[started]
            assert trusted(files["tls.crt"], theirs["ca.crt"], now), f"started {started}, now {step}"
            assert trusted(theirs["client.crt"], files["ca.crt"], now), f"started {started}, now {step}"
    assert len(authorities) == 2


def test_certificates_can_be_renewed_at_any_period():
    """Ten seconds, for tests; every check lies between two renewals of everything."""
    wanted, lifetimes = CertificateNeeds(hosts=HOSTS), lifetimes_for(timedelta(seconds=10))
    files: dict[str, bytes] = {}
    bundles: list[bytes] = []
    leafs, authorities = set(), set()
    for second in range(0, 300, 2):
        now = NOW + timedelta(seconds=second)
        files = rotation.advance_certificates(files, wanted, lifetimes, now)
        bundles.append(files["ca.crt"])
        leafs.add(files["tls.crt"])
        authorities.add(files["authority.crt"])
        for late in bundles[-4:]:
            assert trusted(files["tls.crt"], late, now), f"second {second}"
    assert len(leafs) >= 29
    assert len(authorities) >= 9


def test_real_handshakes_across_a_ca_rotation(tmp_path):
    wanted = CertificateNeeds(hosts=HOSTS, client=True)
    short = Lifetimes(overlap=timedelta(days=5))
    began = NOW - timedelta(days=3650 - 700)  # the CA has less than two years left
    before = rotation.advance_certificates({}, wanted, short, began)
    announced_store = rotation.advance_certificates(before, wanted, short, NOW - timedelta(days=6))
    assert announced_store["ca.crt"].startswith(before["ca.crt"])
    assert announced_store["ca.crt"] != before["ca.crt"]
    promoted = rotation.advance_certificates(announced_store, wanted, short, NOW)
    assert promoted["authority.crt"] != before["authority.crt"]
    finished = rotation.advance_certificates(promoted, wanted, short, NOW + timedelta(days=6))
    handshake(announced_store, before["ca.crt"], HOSTS[0], tmp_path, client=True)  # a client without a bundle
    handshake(promoted, announced_store["ca.crt"], HOSTS[0], tmp_path, client=True)
    handshake(announced_store, promoted["ca.crt"], HOSTS[0], tmp_path, client=True)  # a late replica
    handshake(promoted, finished["ca.crt"], HOSTS[0], tmp_path, client=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(finished, before["ca.crt"], HOSTS[0], tmp_path)
    assert finished["ca.crt"].count(b"BEGIN CERTIFICATE") == 1
