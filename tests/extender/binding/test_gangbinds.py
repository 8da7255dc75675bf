"""Members that wait in bind, with the real binder and real threads."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from extender.api.verbs import filter_nodes
from extender.binding.binder import Binder, BindFailed
from extender.binding.permit import WaitingBinds
from extender.gangs.gangtypes import GangSettings, Permit
from extender.records.nodeinfo import NodeRecord
from extender.records.wire import BindArgs, FilterArgs
from extender.state import State
from tests.build import P100, extended_resource
from tests.extender.gangcluster import PREFERENCES, World, member
from tests.extender.gangcluster import single as single_pod
from tests.extender.states import as_card, as_pod
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock


class Server:
    """An extender with a pool of threads for bind."""

    def __init__(self, *, seconds: float = 20.0) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.state = State(gang_settings=GangSettings(max_waiting=50), clock=self.clock)
        self.state.set_node("n1", NodeRecord())
        for i in range(4):
            self.state.set_card(*as_card(extended_resource(i)))
        self.binder = Binder(self.api.client(), self.state, policy="binpack", seconds=seconds, clock=self.clock)
        self.pool = ThreadPoolExecutor(40)
        self.lines: dict[str, socket.socket] = {}

    def create(self, *pods: dict) -> None:
        for pod in pods:
            self.api.write_object(paths.pods(), pod)
            self.state.set_pod(as_pod(pod))

    def pod(self, name: str) -> dict:
        return self.api.get(paths.pods("default", name))

    def posts(self) -> list[str]:
        """The pods of which a Binding was posted."""
        return [call.path.split("/")[-2] for call in self.api.sent("create", "*/binding")]

    def filter(self, name: str) -> list[str]:
        args = FilterArgs(pod=self.pod(name), node_names=["n1"])
        return filter_nodes(self.state, PREFERENCES, args).node_names or []

    def bind(self, name: str, **options: object) -> "Future[str]":
        """Call filter, then bind."""
        assert self.filter(name) == ["n1"]
        return self.call(name, **options)

    def call(self, name: str, **options: object) -> "Future[str]":
        """Call bind on a separate connection."""
        if name in self.lines:
            self.lines[name].close()
        ours, self.lines[name] = socket.socketpair()
        args = BindArgs(pod_name=name, pod_namespace="default", pod_uid=f"uid-{name}", node="n1")

        def call() -> str:
            with ours:
                return self.binder.bind(args, connection=ours, **options)

        return self.pool.submit(call)

    def waiting_for(self, gang: str) -> tuple[str, ...]:
        """The members whose bind calls have not arrived, as the status shows them."""
        (view,) = (view for view in self.state.gangs.views() if view.name == gang)
        return view.waiting_for

    def wait(self, binds: int) -> None:
        """Wait until this number of bind calls waits for other members, and one thread watches their connections."""
        self.clock.until_waiting(binds + 1)

    def close(self) -> None:
        self.state.gangs.cancel_permits("the test is over")
        self.pool.shutdown()
        self.clock.advance(60.0)  # no thread watches connections any more
        for line in self.lines.values():
            line.close()


@pytest.fixture
def server():
    api_server = Server()
    api_server.create(*(member(f"g{i}", gated=False, created=i, gpu_mem=P100) for i in range(3)))
    yield api_server
    api_server.close()


def test_nothing_is_posted_before_the_last_one_has_come(server):
    first, second = server.bind("g0"), server.bind("g1")
    server.wait(2)
    assert server.waiting_for("g") == ("g2",)
    assert server.posts() == []
    assert not first.done()
    last = server.bind("g2")
    assert [future.result(60) for future in (first, second, last)] == ["bound"] * 3
    assert sorted(server.posts()) == ["g0", "g1", "g2"]


def test_a_waiting_gang_does_not_hold_up_filter(server):
    for name in ("g0", "g1", "g2"):
        server.state.remove_pod(as_pod(server.pod(name)))
    server.create(*(member(f"g{i}", "g", 9, gated=False, gpu_mem=100) for i in range(9)))
    for i in range(8):
        server.bind(f"g{i}")
    server.wait(8)
    assert server.waiting_for("g") == ("g8",)
    assert not server.binder.throttle.is_busy
    server.create(single_pod("x", created=9, gpu_mem=100))
    assert server.bind("x").result(60) == "bound"


@pytest.mark.parametrize("failure", ["connection", "filter", "deleted", "lease", "stop"])
def test_all_waiting_binds_fail_with_the_reason(server, failure):
    calls = [server.bind("g0"), server.bind("g1")]
    server.wait(2)
    if failure == "connection":
        server.lines["g1"].close()
        server.clock.step()
    elif failure == "filter":
        server.filter("g0")
    elif failure == "deleted":
        server.state.remove_pod(as_pod(server.pod("g2")))
    elif failure == "lease":
        server.state.forget_plans()
    else:
        server.state.gangs.cancel_permits("the extender is shutting down")
    message = {
        "connection": "gave up the bind of g1",
        "filter": "g0 again while it waited",
        "deleted": "g2 was deleted",
        "lease": "lease",
        "stop": "the extender is shutting down",
    }[failure]
    for call in calls:
        with pytest.raises(BindFailed, match=message):
            call.result(60)
    assert server.posts() == []
    with server.state.view() as ledger:
        assert ledger.holdings() == []


def test_no_bind_waits_longer_than_a_call_may_take():
    server = Server(seconds=0.4)
    server.create(*(member(f"g{i}", gated=False, created=i, gpu_mem=P100) for i in range(3)))
    call = server.bind("g0")
    server.wait(1)
    server.clock.advance(0.29)
    server.wait(1)
    assert not call.done()
    server.clock.advance(0.01)
    with pytest.raises(BindFailed, match="the bind of g0 timed out"):
        call.result(60)
    assert server.posts() == []
    server.close()


def test_no_bind_waits_on_the_port_of_the_other_verbs(server):
    with pytest.raises(BindFailed, match="--bind-port-bind"):
        server.bind("g0", may_wait=False).result(60)
    assert server.waiting_for("g") == ("g0", "g1", "g2")


def test_a_member_that_is_refused_keeps_its_cards(server):
    refused = server.api.fault(Fault(status=403, message="denied"), "create", "*/g1/binding")
    calls = [server.bind(name) for name in ("g0", "g1", "g2")]
    assert calls[0].result(60) == calls[2].result(60) == "bound"
    with pytest.raises(BindFailed, match="denied"):
        calls[1].result(60)
    with server.state.view() as ledger:
        assert ledger.holding("uid-g1").phase_name == "waiting"
    assert refused.remaining == 0
    assert server.bind("g1").result(60) == "bound"


def test_members_without_cards_wait_and_are_bound_like_the_others(server):
    for name in ("g0", "g1", "g2"):
        server.state.remove_pod(as_pod(server.pod(name)))
    server.create(member("ps", "t", 2, gated=False), member("w", "t", 2, gated=False, created=1, gpu_mem=100))
    ps = server.bind("ps")
    server.wait(1)
    assert server.waiting_for("t") == ("w",)
    assert server.posts() == []
    assert server.bind("w").result(60) == ps.result(60) == "bound"
    assert names.ASSIGNMENT not in server.pod("ps")["metadata"]["annotations"]


def test_many_gangs_with_threads_that_give_up_at_random():
    """Rule 4 under real concurrency: the first Binding is posted only when all other members are present."""
    server = Server()
    gangs = [[f"{chr(97 + k)}{i}" for i in range(4)] for k in range(6)]
    for k, names_of in enumerate(gangs):
        server.create(
            *(member(name, f"gang-{k}", 4, gated=False, created=k * 10, gpu_mem=P100 // 8) for name in names_of)
        )

    unbound, calls = {name for names_of in gangs for name in names_of}, {}

    def come(names_of: list[str], attempts: int = 1) -> None:
        """Let kube-scheduler try one pod while other members of its gang wait in bind."""
        for name in names_of:
            if name in calls and calls[name].done():
                error = calls.pop(name).exception()
                assert error is None or isinstance(error, BindFailed)
                unbound.difference_update([name] if error is None else [])
        for name in names_of:
            if attempts and name in unbound and name not in calls and server.filter(name) == ["n1"]:
                calls[name] = server.call(name)
                attempts -= 1

    with ThreadPoolExecutor(6) as drivers:
        list(drivers.map(partial(come, attempts=3), gangs))
        server.wait(6 * 3)
        for names_of in gangs[::2]:
            server.lines[names_of[0]].close()
        server.clock.step()
        for name in (name for names_of in gangs[::2] for name in names_of[:3]):
            assert "gave up the bind" in str(calls[name].exception(60))
        for turn in range(10_000):
            list(drivers.map(come, gangs))
            if not unbound:
                break
            if turn < 12:
                list(server.lines.values())[turn % len(server.lines)].close()
            server.clock.advance(0.1)  # a gang that fails again and again backs off, for up to a minute
    server.close()
    assert sorted(server.posts()) == sorted(name for names_of in gangs for name in names_of), "each once"


def test_a_hold_that_nobody_decides_ends_with_its_time():
    """A failure between the decision and its notification would let a bind wait for ever, and occupy its thread."""
    clock, cancelled = FakeClock(), []
    hold = Permit("default/g", clock.now())
    WaitingBinds(lambda _, reason: cancelled.append(reason), clock).wait_for_permit(hold, "g0", None, 10.0)
    assert clock.now() == 1010
    assert len(cancelled) == 1
    assert hold.done.is_set()
    assert not hold.allowed
    assert "tried again" in hold.reason


def test_the_connection_of_a_bind_that_waits_no_more_is_not_looked_at():
    """Its file descriptor may belong to another connection by then."""
    clock, cancelled = FakeClock(), []
    waits = WaitingBinds(lambda hold, _: cancelled.append(hold.key), clock)
    over, other = (Permit(key, clock.now()) for key in ("default/over", "default/other"))
    lines = [socket.socketpair() for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.wait_for_permit, over, "over-0", lines[0][0], 10.0)
        clock.until_waiting(2)  # the watching thread has checked, and sleeps
        over.decide(allowed=True)
        waiting.result(60)
        lines[0][1].close()
        waiting = pool.submit(waits.wait_for_permit, other, "other-0", lines[1][0], 10.0)
        for _ in range(3):
            clock.step(2)
        clock.until_waiting(2)
        other.decide(allowed=True)
        waiting.result(60)
    clock.advance(1.0)  # no thread watches connections any more
    for line in (lines[0][0], *lines[1]):
        line.close()
    assert cancelled == []


def test_those_who_wait_are_told_also_where_what_counts_it_fails():
    world = World({"n1": 2})
    world.create(*(member(f"g{i}", "g", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.keep()

    def fail(*_: object) -> None:
        raise RuntimeError("a histogram is broken")

    world.state.gangs.on_permit_ended = world.state.gangs.on_binding_started = fail
    assert world.schedule("g0") == ""
    with pytest.raises(RuntimeError):
        world.schedule("g1")
    (first,) = [bind for bind in world.binding if bind.pod["metadata"]["name"] == "g0"]
    assert first.hold.done.is_set()
    assert first.hold.allowed
