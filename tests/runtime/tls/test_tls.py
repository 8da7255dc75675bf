"""Certificate checks: replicas that share a store, an external CA, and files that are replaced atomically."""

import base64
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Self

import pytest
from cryptography import x509

from cardwise.kube import errors, paths
from cardwise.runtime.tls import certs, filesets, rotation
from cardwise.runtime.tls.certstore import DirStore, SecretStore
from cardwise.runtime.tls.tls import CHECK_INTERVAL_SECONDS, ExternalCertificates, Rotator, UnusableCertificates
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.runtime.tls import certificates
from tests.runtime.tls.certificates import HOSTS, NOW


@pytest.mark.parametrize("existing", [False, True])
def test_replicas_that_start_together_agree(tmp_path, existing):
    api = ApiServer()
    store = SecretStore(api.client(), "ns", "certs")
    if existing:
        store.save(certificates.issue_files(NOW - timedelta(days=300)), None)
    before = api.revision
    # All replicas read before the first one writes; a replica whose write conflicts reads again.
    everybody = threading.Barrier(2)
    api.after_request(lambda _: everybody.wait(60), "get", times=6 if existing else 4)
    rotators = [Rotator(store, HOSTS, tmp_path / str(n), need_client=True) for n in "ab"]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(Rotator.ensure_certificates, rotators, timeout=60)
    assert first == second
    assert filesets.read_files(tmp_path / "a") == filesets.read_files(tmp_path / "b")
    assert api.revision == before + 1
    secret = api.get(paths.secrets("ns", "certs"))
    assert base64.b64decode(secret["data"]["tls.crt"]) == (tmp_path / "a" / "tls.crt").read_bytes()


def test_directory_store_agrees_too_and_keys_are_private(tmp_path):
    store = tmp_path / "store"
    rotators = [Rotator(DirStore(store), HOSTS, tmp_path / str(n), need_client=True) for n in range(4)]
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(Rotator.ensure_certificates, rotators, timeout=60))) == 1
    sets = [filesets.read_files(tmp_path / str(n)) for n in range(4)]
    assert sets[0]
    assert all(files == sets[0] for files in sets)
    assert sorted(sets[0]) == ["ca.crt", "client.crt", "client.key", "tls.crt", "tls.key"]
    for directory in (store, tmp_path / "0"):
        for path in directory.glob("*.key"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((directory / "tls.crt").stat().st_mode) == 0o644
    assert not (tmp_path / "0" / "authority.key").exists()


def test_check_reports_the_bundle_and_retries_after_a_failure(tmp_path, capsys, clock):
    class Failing(DirStore):
        failures = 1

        def load(self):
            if self.failures:
                self.failures -= 1
                raise errors.ServerError(500, "InternalError", "etcd is away")
            return super().load()

    bundles: list[bytes] = []
    rotator = Rotator(Failing(tmp_path / "s"), HOSTS, tmp_path / "out", on_bundle=bundles.append, clock=clock)
    rotator.start()
    began = clock.now()
    clock.step()
    clock.until_waiting()
    assert (len(bundles), clock.now() - began <= 1) == (1, True)
    clock.step()
    clock.until_waiting()
    assert clock.now() - began > CHECK_INTERVAL_SECONDS
    rotator.stop()
    assert bundles[0] == bundles[1] == (tmp_path / "out" / "ca.crt").read_bytes()
    assert "etcd is away" in capsys.readouterr().out


class External:
    """Certificates of an external issuer that renews CA and leaf together, and the checks that follow them."""

    def __init__(self, folder: Path) -> None:
        self.directory, self.served_in = folder / "given", folder / "served"
        self.known = threading.Event()
        self.bundles: list[bytes] = []
        self.clock = FakeClock()
        self.followed = ExternalCertificates(
            self.directory,
            self.served_in,
            on_bundle=self.bundles.append,
            is_published=self.known.is_set,
            clock=self.clock,
        )

    def renew(self, name: str = "renewed") -> bytes:
        """The CA."""
        authority = certs.new_authority(name, NOW, timedelta(days=9))
        self.reissue(authority)
        return authority.cert

    def reissue(self, authority: certs.KeyPair) -> bytes:
        """The leaf."""
        leaf = certs.new_leaf(authority, "w", HOSTS, certs.KeyPurpose.SERVER, now=NOW, lifetime=timedelta(days=9))
        filesets.write_files(self.directory, {"ca.crt": authority.cert, "tls.crt": leaf.cert, "tls.key": leaf.key})
        return leaf.cert

    def served(self) -> bytes:
        """The CA of the served files; checks that they match."""
        files = filesets.read_files(self.served_in)
        assert certs.KeyPair(files["tls.crt"], files["tls.key"]).matches()
        (leaf,), (authority,) = (certs.parse_certificates(files[name]) for name in ("tls.crt", "ca.crt"))
        assert certs.is_issued_by(leaf, authority)
        return files["ca.crt"]

    def looks(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.step()
            self.clock.until_waiting()

    def __enter__(self) -> Self:
        self.followed.start()
        self.clock.until_waiting()
        return self

    def __exit__(self, *_: object) -> None:
        self.followed.stop()


def test_external_ca_is_followed(tmp_path, capsys):
    external = External(tmp_path)
    first = external.renew("first")
    assert external.followed.ensure_certificates() == external.served() == first
    with external:
        second = external.renew("second")
        external.looks()
        (external.directory / "ca.crt").unlink()
        external.looks()
        assert "not a readable CA" in capsys.readouterr().out
        third = external.renew("third")
        external.looks()
    assert external.bundles == [first, second, third]


def test_certificate_is_served_once_its_ca_is_published(tmp_path):
    """Otherwise the API server could not call the webhook in between."""
    external = External(tmp_path)
    first = external.renew("first")
    external.followed.ensure_certificates()
    with external:
        second = external.renew("second")
        external.looks(3)
        assert external.served() == first
        external.known.set()
        external.looks()
        assert external.served() == first, "it hears of what was written a moment ago"
        external.looks()
        assert external.served() == second
        external.known.clear()
        third = external.renew("third")
        external.looks(14)
        assert external.served() == second
        external.looks(3)
        assert external.served() == third, "where nobody ever knows it, waiting helps nobody"


def test_certificate_of_a_published_ca_is_served_at_once(tmp_path):
    external = External(tmp_path)
    authority = certs.new_authority("same", NOW, timedelta(days=9))
    external.reissue(authority)
    external.followed.ensure_certificates()
    leaf = external.reissue(authority)
    external.followed.ensure_certificates()
    assert filesets.read_files(external.served_in)["tls.crt"] == leaf


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nhalf of it"])
@pytest.mark.parametrize(
    ("name", "says"), [("ca.crt", "not a readable CA.*; write"), ("tls.crt", "not a readable certificate.*; write")]
)
def test_missing_file_error_names_file_and_remedy(tmp_path, name, says, content):
    external = External(tmp_path)
    external.renew()
    (external.directory / name).unlink()
    if content is not None:
        (external.directory / name).write_bytes(content)
    with pytest.raises(UnusableCertificates, match=rf"{external.directory}/{re.escape(name)}: {says}"):
        external.followed.ensure_certificates()


def test_a_key_of_another_certificate_changes_nothing(tmp_path):
    external = External(tmp_path)
    first = external.renew("first")
    external.followed.ensure_certificates()
    key = (external.directory / "tls.key").read_bytes()
    external.renew("second")
    (external.directory / "tls.key").unlink()
    (external.directory / "tls.key").write_bytes(key)
    with pytest.raises(UnusableCertificates, match="the key belongs to another certificate"):
        external.followed.ensure_certificates()
    assert external.served() == first


def test_file_set_without_its_directory_is_empty_and_writable(tmp_path):
    assert filesets.read_files(tmp_path / "nowhere") == {}
    (tmp_path / "..data").symlink_to("..lost")
    assert filesets.read_files(tmp_path) == {}
    assert filesets.write_files(tmp_path, {"a": b"1"})
    assert filesets.read_files(tmp_path) == {"a": b"1"}


def test_file_set_is_replaced_atomically(tmp_path):
    """A reader in a loop sees only whole sets."""
    filesets.write_files(tmp_path, {"a": b"0", "b.key": b"0"})
    stop = threading.Event()
    has_read = threading.Event()
    torn: list[dict] = []

    def read() -> None:
        while not stop.is_set():
            seen = filesets.read_files(tmp_path)
            if len(set(seen.values())) != 1 or len(seen) != 2:
                torn.append(seen)
            has_read.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(1, 30):
            has_read.clear()
            assert has_read.wait(60), "the reader reads between two writes"
            assert filesets.write_files(tmp_path, {"a": b"%d" % number, "b.key": b"%d" % number})
            assert (tmp_path / "a").read_bytes() == b"%d" % number
    finally:
        stop.set()
        thread.join()
    assert not torn
    assert not filesets.write_files(tmp_path, {"a": b"29", "b.key": b"29"})
    filesets.write_files(tmp_path, {"a": b"30"})
    names_left = sorted(path.name for path in tmp_path.iterdir())
    assert len(names_left) == 3  # the name, the link and one directory
    assert [name for name in names_left if not name.startswith("..")] == ["a"]


def test_deleted_store_is_saved_again(tmp_path):
    """kube-scheduler read the bundle at its start and would not trust a new CA."""
    api = ApiServer()
    store = SecretStore(api.client(), "ns", "certs")
    rotator = Rotator(store, HOSTS, tmp_path, need_client=True)
    bundle = rotator.ensure_certificates()
    before = store.load().files
    api.remove(paths.secrets("ns", "certs"))
    assert rotator.ensure_certificates() == bundle
    assert store.load().files == before
    store.save({name: content for name, content in before.items() if name != "authority.key"}, store.load().version)
    assert rotator.ensure_certificates() == bundle
    assert store.load().files == before


def test_deleted_secret_is_recreated_within_an_hour(tmp_path):
    """A replica that starts meanwhile has no files, and would create a new CA."""
    api, clock = ApiServer(), FakeClock()
    store = SecretStore(api.client(), "ns", "certs")
    rotator = Rotator(store, HOSTS, tmp_path / "a", need_client=True, clock=clock)
    rotator.start()
    clock.until_waiting()
    before = store.load().files
    api.remove(paths.secrets("ns", "certs"))
    clock.advance(3600)
    clock.until_waiting()
    assert store.load().files == before
    rotator.stop()
    assert Rotator(store, HOSTS, tmp_path / "b", need_client=True).ensure_certificates() == before["ca.crt"]


def test_a_lost_key_of_the_authority_is_logged(tmp_path, capsys):
    api = ApiServer()
    store = SecretStore(api.client(), "ns", "certs")
    files = certificates.issue_files(NOW)
    store.save({name: content for name, content in files.items() if name != "authority.key"}, None)
    Rotator(store, HOSTS, tmp_path).ensure_certificates()
    assert "the key of the CA is lost" in capsys.readouterr().out
    assert (tmp_path / "tls.crt").read_bytes() == files["tls.crt"]


def test_only_the_data_of_a_secret_is_replaced(tmp_path):
    api = ApiServer()
    store = SecretStore(api.client(), "ns", "certs")
    store.save(certificates.issue_files(NOW - timedelta(days=300)), None)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "u"}
    others = {"finalizers": ["x.io/kept"], "ownerReferences": [owner], "labels": {"a": "b"}, "annotations": {"c": "d"}}
    before = api.edit(paths.secrets("ns", "certs"), metadata=others, type="kubernetes.io/tls")
    Rotator(store, HOSTS, tmp_path).ensure_certificates()
    after = api.get(paths.secrets("ns", "certs"))
    assert after["data"]["tls.crt"] != before["data"]["tls.crt"]
    assert after["type"] == "kubernetes.io/tls", "it cannot be changed"
    assert {name: after["metadata"][name] for name in others} == {name: before["metadata"][name] for name in others}


def test_immutable_secret_error_names_the_remedy(tmp_path):
    api = ApiServer()
    store = SecretStore(api.client(), "ns", "certs")
    store.save(certificates.issue_files(NOW - timedelta(days=300)), None)
    api.edit(paths.secrets("ns", "certs"), immutable=True)
    with pytest.raises(errors.Invalid, match=r"Secret ns/certs: immutable: true, .*; replace the Secret"):
        Rotator(store, HOSTS, tmp_path).ensure_certificates()


@pytest.mark.parametrize("hours", [-5, 5])
def test_wrong_clock_neither_replaces_nor_damages_certificates(tmp_path, capsys, hours):
    """The first save conflicts with a Secret that another replica has just created; the second creates its own."""
    api = ApiServer(clock=FakeClock(wall=NOW))
    wrong = FakeClock(wall=NOW + timedelta(hours=hours))
    for name, before in (("theirs", certificates.issue_files(NOW)), ("ours", {})):
        store = SecretStore(api.client(), "ns", name)
        if before:
            store.save(before, None)
        Rotator(store, HOSTS, tmp_path / name, clock=wrong).ensure_certificates()
        files = store.load().files
        assert not before or files == before
        for file in (rotation.AUTHORITY_CERT, rotation.SERVER_CERT):
            certificate = x509.load_pem_x509_certificate(files[file])
            assert certificate.not_valid_before_utc <= NOW < certificate.not_valid_after_utc
    output = capsys.readouterr().out
    assert "clock skew" in output
    assert f"ahead_seconds={hours * 3600}" in output
