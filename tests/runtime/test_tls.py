"""Certificates: right for real handshakes, and never a moment in which a client cannot verify."""

import base64
import socket
import ssl
import stat
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from cardwise.kube import errors
from cardwise.runtime import certs, filesets, rotation
from cardwise.runtime.certstore import DirStore, SecretStore
from cardwise.runtime.rotation import Lifetimes, Wanted
from cardwise.runtime.tls import Given, Rotator, Unusable

NOW = datetime.now(UTC)
HOSTS = ("cardwise-webhook.cardwise.svc", "127.0.0.1", "::1")


def handshake(server_files: dict[str, bytes], bundle: bytes, host: str, tmp_path, client: bool = False) -> None:
    """A real one, over a socket pair; raises ssl.SSLError when either side refuses."""
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
    left, right = socket.socketpair()
    left.settimeout(5)
    right.settimeout(5)

    def serve() -> None:
        try:
            with server.wrap_socket(left, server_side=True) as secure:
                secure.sendall(b"hello")
        except (ssl.SSLError, OSError):
            left.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with user.wrap_socket(right, server_hostname=host) as secure:
            assert secure.recv(5) == b"hello"
    finally:
        right.close()
        thread.join()


def test_chain_verifies_for_every_host_with_strict_flags_and_both_sides(tmp_path):
    files = rotation.advance({}, Wanted(hosts=HOSTS, client=True), Lifetimes(), NOW)
    for host in HOSTS:
        handshake(files, files["ca.crt"], host, tmp_path, client=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, files["ca.crt"], "other.svc", tmp_path)


def test_usages_are_what_go_and_openssl_ask_for(tmp_path):
    files = rotation.advance({}, Wanted(hosts=HOSTS, client=True), Lifetimes(), NOW)
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


def test_nothing_changes_while_nothing_is_due():
    wanted = Wanted(hosts=HOSTS, client=True)
    files = rotation.advance({}, wanted, Lifetimes(), NOW)
    assert rotation.advance(files, wanted, Lifetimes(), NOW + timedelta(days=274)) == files
    renewed = rotation.advance(files, wanted, Lifetimes(), NOW + timedelta(days=276))
    assert renewed["tls.crt"] != files["tls.crt"]
    assert renewed["authority.crt"] == files["authority.crt"]


def test_other_hosts_make_a_new_leaf_and_keep_the_ca():
    files = rotation.advance({}, Wanted(hosts=HOSTS), Lifetimes(), NOW)
    changed = rotation.advance(files, Wanted(hosts=("new.svc",)), Lifetimes(), NOW)
    assert changed["ca.crt"] == files["ca.crt"]
    assert "new.svc" in certs.hosts_of(x509.load_pem_x509_certificate(changed["tls.crt"]))
    same = rotation.advance(files, Wanted(hosts=(*reversed(HOSTS), "0:0:0:0:0:0:0:1")), Lifetimes(), NOW)
    assert same == files


def test_replicas_with_names_of_their_own_come_to_one_leaf():
    mine, yours = (Wanted(hosts=("svc", machine)) for machine in ("pod-a", "pod-b"))
    files = rotation.advance(rotation.advance({}, mine, Lifetimes(), NOW), yours, Lifetimes(), NOW)
    assert certs.hosts_of(x509.load_pem_x509_certificate(files["tls.crt"])) == {"svc", "pod-a", "pod-b"}
    assert rotation.advance(files, mine, Lifetimes(), NOW) == files
    # Names of replicas that are no more go with the next renewal.
    renewed = rotation.advance(files, mine, Lifetimes(), NOW + timedelta(days=300))
    assert certs.hosts_of(x509.load_pem_x509_certificate(renewed["tls.crt"])) == {"svc", "pod-a"}


@pytest.mark.parametrize("ahead", [timedelta(days=2), timedelta(days=400), timedelta(days=3000)])
@pytest.mark.parametrize("existing", [False, True])
def test_certificates_of_a_clock_that_was_ahead_are_made_anew(tmp_path, ahead, existing):
    wanted = Wanted(hosts=HOSTS, client=True)
    files = rotation.advance({}, wanted, Lifetimes(), NOW) if existing else {}
    for days in (0, 31):  # long enough for the next CA to be announced, and to be promoted
        files = rotation.advance(files, wanted, Lifetimes(), NOW + ahead + timedelta(days=days))
    files = rotation.advance(files, wanted, Lifetimes(), NOW)
    handshake(files, files["ca.crt"], HOSTS[0], tmp_path, client=True)
    assert trusted(files["tls.crt"], files["ca.crt"], NOW)
    for name in ("tls.crt", "client.crt", "authority.crt"):
        assert x509.load_pem_x509_certificate(files[name]).not_valid_before_utc <= NOW
    assert rotation.advance(files, wanted, Lifetimes(), NOW) == files


@pytest.mark.parametrize("name", ["authority.crt", "authority.key", "tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("damage", [None, b"", b"garbage"])
def test_damaged_entries_are_made_anew(tmp_path, name, damage):
    wanted = Wanted(hosts=HOSTS)
    files = rotation.advance({}, wanted, Lifetimes(), NOW)
    damaged = {key: value for key, value in files.items() if key != name}
    if damage is not None:
        damaged[name] = damage
    repaired = rotation.advance(damaged, wanted, Lifetimes(), NOW)
    handshake(repaired, repaired["ca.crt"], HOSTS[0], tmp_path)
    assert rotation.advance(repaired, wanted, Lifetimes(), NOW) == repaired


def test_ca_rotation_keeps_clients_of_the_old_bundle_working(tmp_path):
    """Twelve years in steps of a week; each client learns a new bundle only three weeks late."""
    wanted = Wanted(hosts=HOSTS)
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
        files = rotation.advance(files, wanted, lifetimes, now)
        history.append(files)
        authorities.add(files["authority.crt"])
        leafs.add(files["tls.crt"])
        # A replica that is late itself serves an older leaf, too.
        for server in (files, history[max(0, week - 3)]):
            for bundle in (files["ca.crt"], history[max(0, week - 3)]["ca.crt"]):
                assert trusted(server["tls.crt"], bundle, now), f"week {week}"
        assert files["ca.crt"].count(b"BEGIN CERTIFICATE") <= 2
    assert 5 <= len(authorities) <= 8
    assert len(leafs) > 25
    change = next(week for week, each in enumerate(history) if "authority-old.crt" in each)
    assert history[change]["tls.crt"] != history[change - 1]["tls.crt"]
    assert history[change - 1]["ca.crt"].count(b"BEGIN CERTIFICATE") == 2


def trusted(leaf: bytes, bundle: bytes, now: datetime) -> bool:
    certificate = x509.load_pem_x509_certificate(leaf)
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        return False
    return any(
        certs.issued_by(certificate, authority) and authority.not_valid_after_utc > now
        for authority in x509.load_pem_x509_certificates(bundle)
    )


def test_real_handshakes_across_a_ca_rotation(tmp_path):
    wanted = Wanted(hosts=HOSTS, client=True)
    short = Lifetimes(overlap=timedelta(days=5))
    began = NOW - timedelta(days=3650 - 700)  # the CA has less than two years left
    before = rotation.advance({}, wanted, short, began)
    announced = rotation.advance(before, wanted, short, NOW - timedelta(days=6))
    assert announced["ca.crt"].startswith(before["ca.crt"])
    assert announced["ca.crt"] != before["ca.crt"]
    promoted = rotation.advance(announced, wanted, short, NOW)
    assert promoted["authority.crt"] != before["authority.crt"]
    finished = rotation.advance(promoted, wanted, short, NOW + timedelta(days=6))
    handshake(announced, before["ca.crt"], HOSTS[0], tmp_path, client=True)  # a client that knows nothing yet
    handshake(promoted, announced["ca.crt"], HOSTS[0], tmp_path, client=True)
    handshake(announced, promoted["ca.crt"], HOSTS[0], tmp_path, client=True)  # a replica that is late
    handshake(promoted, finished["ca.crt"], HOSTS[0], tmp_path, client=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(finished, before["ca.crt"], HOSTS[0], tmp_path)
    assert finished["ca.crt"].count(b"BEGIN CERTIFICATE") == 1


class FakeSecrets:
    """The API server's rules for one Secret: versions, conflicts."""

    def __init__(self) -> None:
        self.secret: dict | None = None
        self.version = 0
        self.lock = threading.Lock()
        self.writes = 0
        self.barrier: threading.Barrier | None = None

    def get(self, path, query=None, *, timeout=None):
        with self.lock:
            found = self.secret
        if self.barrier is not None:
            # Every replica has read before the first one writes.
            self.barrier.wait(5)
        if found is None:
            raise errors.NotFound(404, "NotFound", path)
        return found

    def create(self, path, obj, *, query=None, timeout=None):
        with self.lock:
            if self.secret is not None:
                raise errors.AlreadyExists(409, "AlreadyExists", path)
            return self._store(obj)

    def update(self, path, obj, *, query=None, timeout=None):
        with self.lock:
            if obj["metadata"]["resourceVersion"] != self.secret["metadata"]["resourceVersion"]:
                raise errors.Conflict(409, "Conflict", path)
            return self._store(obj)

    def _store(self, obj):
        self.version += 1
        self.writes += 1
        self.barrier = None
        self.secret = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        return self.secret


@pytest.mark.parametrize("existing", [False, True])
def test_replicas_that_start_at_once_agree(tmp_path, existing):
    fake = FakeSecrets()
    if existing:
        old = NOW - timedelta(days=300)
        Rotator(SecretStore(fake, "ns", "certs"), HOSTS, tmp_path / "seed", now=lambda: old).ensure()
    fake.writes = 0
    fake.barrier = threading.Barrier(2)
    rotators = [Rotator(SecretStore(fake, "ns", "certs"), HOSTS, tmp_path / str(n), need_client=True) for n in "ab"]
    bundles: list[bytes] = []
    threads = [threading.Thread(target=lambda each=each: bundles.append(each.ensure())) for each in rotators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(bundles) == 2
    assert bundles[0] == bundles[1]
    assert filesets.read(tmp_path / "a") == filesets.read(tmp_path / "b")
    assert fake.writes == 1
    assert base64.b64decode(fake.secret["data"]["tls.crt"]) == (tmp_path / "a" / "tls.crt").read_bytes()


def test_directory_store_agrees_too_and_keys_are_private(tmp_path):
    store = tmp_path / "store"
    rotators = [Rotator(DirStore(store), HOSTS, tmp_path / str(n), need_client=True) for n in range(4)]
    threads = [threading.Thread(target=each.ensure) for each in rotators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    sets = [filesets.read(tmp_path / str(n)) for n in range(4)]
    assert sets[0]
    assert all(each == sets[0] for each in sets)
    assert sorted(sets[0]) == ["ca.crt", "client.crt", "client.key", "tls.crt", "tls.key"]
    for directory in (store, tmp_path / "0"):
        for path in directory.glob("*.key"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((directory / "tls.crt").stat().st_mode) == 0o644
    assert not (tmp_path / "0" / "authority.key").exists()


def test_run_tells_the_bundle_and_tries_again_after_a_failure(tmp_path, capsys):
    class Failing(DirStore):
        failures = 1

        def load(self):
            if self.failures:
                self.failures -= 1
                raise errors.ServerError(500, "InternalError", "etcd is away")
            return super().load()

    told: list[bytes] = []
    twice = threading.Event()

    def on_bundle(pem: bytes) -> None:
        told.append(pem)
        if len(told) == 2:
            twice.set()

    rotator = Rotator(Failing(tmp_path / "s"), HOSTS, tmp_path / "out", on_bundle=on_bundle, interval=0.2)
    rotator.start()
    assert twice.wait(10)
    rotator.stop()
    assert told[0] == told[1] == (tmp_path / "out" / "ca.crt").read_bytes()
    assert "etcd is away" in capsys.readouterr().out


def test_a_ca_that_somebody_else_keeps_is_followed(tmp_path, capsys):
    first, second = (certs.new_authority(name, NOW, timedelta(days=9)).cert for name in ("first", "second"))
    told: list[bytes] = []
    given = Given(tmp_path, on_bundle=told.append, interval=0.02)
    filesets.write(tmp_path, {"ca.crt": first})
    assert given.ensure() == first
    given.start()
    eventually(lambda: told[-1:] == [first])
    filesets.write(tmp_path, {"ca.crt": second})
    eventually(lambda: told[-1] == second)
    (tmp_path / "ca.crt").unlink()
    eventually(lambda: "there is no CA" in capsys.readouterr().out)
    filesets.write(tmp_path, {"ca.crt": first})
    eventually(lambda: told[-1] == first)
    given.stop()
    assert set(told) == {first, second}


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nhalf of it"])
def test_a_ca_that_is_missing_is_told_by_its_file_with_the_remedy(tmp_path, content):
    if content is not None:
        (tmp_path / "ca.crt").write_bytes(content)
    with pytest.raises(Unusable, match=rf"{tmp_path}/ca\.crt: there is no CA.*; put there"):
        Given(tmp_path, on_bundle=lambda _: None).ensure()


def eventually(condition, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not come true in time"
        time.sleep(0.01)


def test_set_whose_directory_was_lost_is_empty_and_can_be_written(tmp_path):
    assert filesets.read(tmp_path / "nowhere") == {}
    (tmp_path / "..data").symlink_to("..lost")
    assert filesets.read(tmp_path) == {}
    assert filesets.write(tmp_path, {"a": b"1"})
    assert filesets.read(tmp_path) == {"a": b"1"}


def test_set_of_files_is_replaced_whole(tmp_path):
    """A reader in a loop sees only whole sets."""
    filesets.write(tmp_path, {"a": b"0", "b.key": b"0"})
    stop = threading.Event()
    torn: list[dict] = []

    def read() -> None:
        while not stop.is_set():
            seen = filesets.read(tmp_path)
            if len(set(seen.values())) != 1 or len(seen) != 2:
                torn.append(seen)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 60):
        assert filesets.write(tmp_path, {"a": b"%d" % number, "b.key": b"%d" % number})
        assert (tmp_path / "a").read_bytes() == b"%d" % number
    stop.set()
    thread.join()
    assert not torn
    assert not filesets.write(tmp_path, {"a": b"59", "b.key": b"59"})
    filesets.write(tmp_path, {"a": b"60"})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 3  # the name, the link and one directory
    assert [name for name in left if not name.startswith("..")] == ["a"]
