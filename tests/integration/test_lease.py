"""Leader election against the real API server (etcd and kube-apiserver, no controllers)."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Self

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.leases.lease import LeaderElector, identity
from tests.cluster.controlplane import ControlPlane
from tests.cluster.processes import wait_for

pytestmark = [
    pytest.mark.cluster("api"),
    pytest.mark.timeout(1200),  # the first run of all builds the programs
    # The harness keeps its processes by pid and lets the Popen objects go.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

DURATION, EVERY = 3.0, 0.4


@pytest.fixture
def client(plane: ControlPlane) -> Iterator[KubeClient]:
    made = KubeClient.load(plane.kubeconfig("admin"))
    yield made
    made.close()


@pytest.fixture
def namespace(client: KubeClient, request: pytest.FixtureRequest) -> str:
    name = f"t-{abs(hash(request.node.name)) % 10**9}"
    client.create(paths.namespaces(), {"metadata": {"name": name}})
    return name


class Freezing:
    """A client whose threads stop dead before a request, as those of a process that the machine has no time for."""

    def __init__(self, client: KubeClient) -> None:
        self.calls = 0
        self._client = client
        self._running = threading.Event()
        self._running.set()
        self.freeze, self.thaw = self._running.clear, self._running.set

    def __getattr__(self, verb: str) -> Callable[..., dict]:
        def call(*args: object, **options: object) -> dict:
            self._running.wait()
            self.calls += 1
            return getattr(self._client, verb)(*args, **options)

        return call


class Candidates:
    """Electors in threads of their own, and a thread that looks all the time whether two lead at once."""

    def __init__(self, client: KubeClient, namespace: str, count: int, **settings: float) -> None:
        self.clients = [Freezing(client) for _ in range(count)]
        self.told: list[list[bool]] = [[] for _ in range(count)]
        self.electors = [
            LeaderElector(each, namespace, names.LEASE, identity(), on_change=told.append, **settings)  # type: ignore[arg-type]
            for each, told in zip(self.clients, self.told, strict=True)
        ]
        self.samples = 0
        self.doubles = 0
        self._over = threading.Event()
        self._sampling = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        for each in self.electors:
            each.start()
        self._sampling.start()
        return self

    def __exit__(self, *args: object) -> None:
        for each in self.clients:
            each.thaw()
        for each in self.electors:
            each.stop()
        self._over.set()
        self._sampling.join()
        assert self.samples > 0
        assert self.doubles == 0

    def _sample(self) -> None:
        while not self._over.wait(0.001):
            # Asked twice: between two questions the one may have ended and the other begun.
            leading = [each for each in self.electors if each.leader]
            self.doubles += sum(each.leader for each in leading) > 1
            self.samples += 1

    def leader(self, other_than: int | None = None) -> int:
        """The number of who leads, once somebody does."""
        found: list[int] = []

        def anybody() -> bool:
            found[:] = [i for i, each in enumerate(self.electors) if each.leader and i != other_than]
            return bool(found)

        assert wait_for(anybody), "nobody leads"
        return found[0]

    def try_again(self, times: int = 1) -> None:
        """Returns when each has begun so many calls more."""
        wanted = [each.calls + times for each in self.clients]
        assert wait_for(lambda: all(each.calls >= n for each, n in zip(self.clients, wanted, strict=True)))


def lease(client: KubeClient, namespace: str) -> dict:
    return client.get(paths.leases(namespace, names.LEASE))


def released(client: KubeClient, namespace: str) -> None:
    client.create(paths.leases(namespace), {"metadata": {"name": names.LEASE}, "spec": {"holderIdentity": ""}})


def renewed(client: KubeClient, namespace: str) -> datetime:
    return datetime.fromisoformat(lease(client, namespace)["spec"]["renewTime"])


def test_another_takes_over_from_a_leader_that_stands_still(client: KubeClient, namespace: str):
    released(client, namespace)
    with Candidates(client, namespace, 3, duration=DURATION, renew_every=EVERY) as candidates:
        first = candidates.leader()
        before = lease(client, namespace)["spec"]
        assert before["holderIdentity"] == candidates.electors[first].identity
        candidates.clients[first].freeze()
        second = candidates.leader(other_than=first)
        after = lease(client, namespace)["spec"]
        assert after["holderIdentity"] == candidates.electors[second].identity
        assert after["leaseTransitions"] == before["leaseTransitions"] + 1
        assert datetime.fromisoformat(after["acquireTime"]) > datetime.fromisoformat(before["acquireTime"])
        # It goes on with the very renewal that it was about to send.
        candidates.clients[first].thaw()
        assert wait_for(lambda: candidates.told[first] == [True, False])
        since = renewed(client, namespace) + timedelta(seconds=DURATION)
        assert wait_for(lambda: renewed(client, namespace) > since), "the other one goes on renewing"
        assert candidates.electors[second].leader
        assert candidates.electors[second].epoch == 1
        assert lease(client, namespace)["spec"]["leaseTransitions"] == after["leaseTransitions"]


def test_a_lease_given_back_is_taken_long_before_it_ends(client: KubeClient, namespace: str):
    released(client, namespace)
    with Candidates(client, namespace, 3) as candidates:  # as shipped: 15 s, renewed every 2
        first = candidates.leader()
        taken = renewed(client, namespace)
        assert wait_for(lambda: renewed(client, namespace) > taken), "all have settled: the others look now and then"
        last = renewed(client, namespace)
        assert candidates.electors[first].holds(10.0)
        candidates.electors[first].stop()
        second = candidates.leader(other_than=first)
        acquired = datetime.fromisoformat(lease(client, namespace)["spec"]["acquireTime"])
        assert acquired - last < timedelta(seconds=10)
        assert candidates.told[first] == [True, False]
        assert lease(client, namespace)["spec"]["holderIdentity"] == candidates.electors[second].identity


def test_the_last_one_leaves_a_free_lease_as_kubernetes_does(client: KubeClient, namespace: str):
    released(client, namespace)
    with Candidates(client, namespace, 1) as candidates:
        candidates.leader()
        spec = lease(client, namespace)["spec"]
        assert spec["leaseDurationSeconds"] == 15
        assert abs(datetime.fromisoformat(spec["renewTime"]) - datetime.now(UTC)) < timedelta(seconds=5)
    spec = lease(client, namespace)["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("", 1, 1)


def test_a_missing_or_deleted_lease_is_created_by_one_of_them(client: KubeClient, namespace: str):
    with Candidates(client, namespace, 3, duration=DURATION, renew_every=EVERY) as candidates:
        candidates.leader()
        client.delete(paths.leases(namespace, names.LEASE))
        assert wait_for(lambda: not any(each.leader for each in candidates.electors))
        leader = candidates.leader()
        assert lease(client, namespace)["spec"]["holderIdentity"] == candidates.electors[leader].identity


def test_nobody_leads_while_the_api_server_hangs_and_somebody_soon_after(
    plane: ControlPlane, client: KubeClient, namespace: str
):
    released(client, namespace)
    with Candidates(client, namespace, 3, duration=DURATION, renew_every=EVERY) as candidates:
        first = candidates.leader()
        epoch = candidates.electors[first].epoch
        process = plane.process("kube-apiserver")
        process.pause()
        try:
            hung = time.monotonic()
            assert wait_for(lambda: not candidates.electors[first].leader)
            assert candidates.electors[first].remaining() == 0
            assert time.monotonic() - hung > DURATION / 2
            candidates.try_again()
            assert not any(each.leader for each in candidates.electors)
        finally:
            process.resume()
        again = candidates.leader()
        if again == first:
            assert candidates.electors[first].epoch > epoch


def test_who_may_not_write_does_not_lead(plane: ControlPlane, client: KubeClient, namespace: str):
    released(client, namespace)
    # Controllers' own identity may read much, and has no rights to this Lease.
    stranger = KubeClient.load(plane.kubeconfig("kube-scheduler"))
    try:
        with pytest.raises(errors.Forbidden):
            stranger.get(paths.leases(namespace, names.LEASE))
        with Candidates(stranger, namespace, 1, duration=DURATION, renew_every=EVERY) as candidates:
            candidates.try_again(3)
            assert not candidates.electors[0].leader
    finally:
        stranger.close()
    assert lease(client, namespace)["spec"]["holderIdentity"] == ""
