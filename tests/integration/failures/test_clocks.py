"""Certificates and clocks: what is renewed while it is in use, what has expired, and parts whose clock is hours off.

A part's clock is moved at the one place where all of our code asks for the time of day; its monotonic clocks stay, as
on a machine whose time is wrong. OpenSSL goes on using the machine's. (libfaketime breaks Python's time.sleep.)
"""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.runtime.tls import filesets, rotation
from cardwise.runtime.tls.certstore import SecretStore
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.processes import Process
from tests.integration.conftest import spaces
from tests.integration.failures.load import Load, Rules, freezes
from tests.integration.replicas import Pair, ready, two_extenders, webhooks
from tests.integration.sharing import Space, workload
from tests.runtime.tls import certificates

pytestmark = [pytest.mark.cluster("sim", last=True)]

SECRET = "cardwise-webhook-tls"
HOSTS = ("127.0.0.1",)


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(4)
        yield space


def clock_off_by(folder: Path, hours: int) -> Mapping[str, str]:
    """The environment of a process of ours whose time of day is so much ahead."""
    own = folder / f"{hours:+d}h"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import time\nfrom cardwise.clock import SystemClock\n\n"
        f"SystemClock.wall_ns = lambda _: time.time_ns() + {hours * 3600 * 10**9}\n"
    )
    return {"PYTHONPATH": str(own)}


def test_leaders_whose_clocks_are_five_hours_apart_give_no_card_twice(space: Space, cluster: Cluster, tmp_path: Path):
    """Each stands still once past its Lease, and the other takes over."""
    with two_extenders(cluster, environment=clock_off_by(tmp_path, 5)) as pair:
        freezes(space, pair, 2)


@pytest.mark.parametrize("hours", [5, pytest.param(-5, marks=pytest.mark.soak)])
def test_a_webhook_whose_clock_is_wrong_makes_good_certificates(
    space: Space, cluster: Cluster, tmp_path: Path, hours: int
):
    """And takes a CA that has expired for what it is. The API server verifies by its own clock."""
    store = SecretStore(cluster.api, names.NAMESPACE, SECRET)
    expired = certificates.issue_files(datetime.now(UTC) - timedelta(days=3651), HOSTS)
    with webhooks(cluster, 1, alone=True, environment=clock_off_by(tmp_path, hours)) as (replica,):
        for files in ({}, expired):
            log_start = len(replica.log.read_text())
            write_secret(cluster, store, files)
            replica.restart()
            ready(replica)
            space.wait(lambda files=files: is_good(store, files), "good certificates")
            assert "clock skew" in replica.log.read_text()[log_start:]
            space.rejected(workload("bad", gpu_mem="-1"))
            with Load(space, 8, dry=True) as load:
                space.wait(lambda load=load: len(load.created) > 10, "pods are admitted")
            assert load.failed == []


def write_secret(cluster: Cluster, store: SecretStore, files: Mapping[str, bytes]) -> None:
    """As somebody has left the Secret; without files it is gone."""
    with suppress(errors.NotFound):
        cluster.api.delete(paths.secrets(names.NAMESPACE, SECRET))
    if files:
        assert store.save(files, None)


def is_good(store: SecretStore, before: Mapping[str, bytes]) -> bool:
    files = store.load().files
    server = files[rotation.SERVER_CERT]
    return files != before and certificates.trusted(server, files[rotation.BUNDLE], datetime.now(UTC))


def test_the_extenders_certificate_is_renewed_while_it_is_called(space: Space, cluster: Cluster):
    """By another replica, as on one machine: the leader serves the new one from the next connection on."""
    directory = cluster.parts.tls_dir
    with two_extenders(cluster) as pair, Rules(space) as rules, Load(space, 8, sizes=(8138, 12_000)) as load:
        space.wait(lambda: len(rules.granted) > 5, "cards are given away")
        leader = pair.leader()
        before = served(leader, pair)
        files = filesets.read_files(directory / "authority")
        del files[rotation.SERVER_CERT], files[rotation.SERVER_KEY]
        filesets.write_files(directory / "authority", files)
        other = pair.other(leader)
        other.restart()
        space.wait(lambda: pair.stands_by(other.name), "the other replica has made another certificate")
        space.wait(lambda: served(leader, pair) != before, "the leader serves it")
        count = len(rules.granted)
        space.wait(lambda: len(rules.granted) > count + 5, "cards are given away by it")
        load.stop()
        assert pair.leads(leader.name), "nothing else has changed"
        space.cluster.api.delete(paths.pods(space.name), {"gracePeriodSeconds": 1})
    assert not rules.failed
    assert rules.violations == []
    assert load.failed == []
    space.create_and_locate(workload("whole", gpu_mem=P100))


def served(extender: Process, pair: Pair) -> str:
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", pair.ports[extender.name]))
