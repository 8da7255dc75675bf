"""bind against an API server with every kind of failure."""

import math

import pytest

from cardwise.core.api import assignment, names, request
from cardwise.kube import errors, paths
from extender.binding import binder
from extender.binding.binder import Binder, BindFailed
from extender.cache.reservations import Phase
from extender.leadership.fence import Fence
from extender.leadership.leadership import Leadership
from extender.records.podref import PodRef
from extender.records.wire import BindArgs
from tests.build import P100, asking, extended_resource
from tests.extender.states import as_card, as_pod, bound, comes, free, make_state, mark, with_cards
from tests.fakes.apiserver import ApiServer, Fault, Request, Rule
from tests.fakes.clock import FakeClock

ARGS = BindArgs(pod_name="p", pod_namespace="default", pod_uid="uid-p", node="n1")
POD = paths.pods("default", "p")
UNHEARD = Fault(seconds=99)  # longer than any caller waits, and the Binding is not executed


class World:
    """One pod p, one call to bind it; `faults` are of the Bindings, one each."""

    def __init__(self, *faults: Fault, seconds: float = 10.0, pod: dict | None = None) -> None:
        self.clock = FakeClock()
        self.state = with_cards(make_state(self.clock), n1=2, n2=2)
        self.api = ApiServer(self.clock)
        self.api.write_object(paths.pods(), pod or asking("p", gpu_mem=8138))
        for fault in faults:
            self.fault(fault)
        self.posts: list[tuple[float, dict]] = []
        self.api.before_request(self._record_call, "create", f"{POD}/binding", times=math.inf)
        self.client = self.api.client()
        self.outdated: list[str] = []
        self.binder = Binder(
            self.client,
            self.state,
            policy="binpack",
            seconds=seconds,
            outdated_watches=lambda: self.outdated,
            clock=self.clock,
        )

    def _record_call(self, call: Request) -> None:
        self.posts.append((self.clock.now(), call.body))

    def fault(self, fault: Fault, times: float = 1) -> Rule:
        """For Bindings."""
        return self.api.fault(fault, "create", f"{POD}/binding", times)

    def shown(self) -> None:
        """Let a filter call show the pod."""
        pod_request = request.parse(asking("p", gpu_mem=8138))
        comes(self.state, "p", pod_request, self.api.get(POD)["metadata"]["resourceVersion"])

    def bind(self, args: BindArgs = ARGS) -> str:
        return self.binder.bind(args)

    def fails(self, outcome: str) -> str:
        with pytest.raises(BindFailed) as failed:
            self.bind()
        assert failed.value.outcome == outcome
        return str(failed.value)


def test_by_an_outdated_picture_nothing_is_bound():
    world = World()
    world.outdated.append("the watch of nodes is interrupted")
    assert "the watch of nodes is interrupted" in world.fails("not_ready")
    assert world.posts == []
    world.outdated.clear()
    assert world.bind() == "bound"


def test_bind_writes_the_whole_assignment_with_the_uid_in_one_call():
    world = World()
    began = world.clock.wall_ns()
    assert world.bind() == "bound"
    ((_, body),) = world.posts
    assert body["metadata"]["uid"] == "uid-p"
    assert body["target"]["name"] == "n1"
    written = body["metadata"]["annotations"]
    assert written[names.IDX] == "0"
    assert written[names.POD_MEM] == "8138"
    assert written[names.ASSIGNED] == "false"
    assert written[names.ASSUME_TIME] == str(began)
    assert assignment.decode(written).shares()[0].uuid == "GPU-n1-0"
    assert mark(world.state, "uid-p") == "bound"


@pytest.mark.parametrize(("access", "visible"), [("cdi", "void"), ("", "void"), ("env", "GPU-n1-0")])
def test_what_the_environment_reads_opens_no_card_unless_the_node_gives_cards_by_it(access, visible):
    world = World()
    for index in range(2):
        card = extended_resource(index)
        card["status"]["gpuAccess"] = access
        world.state.set_card(*as_card(card))
    world.bind()
    ((_, body),) = world.posts
    assert body["metadata"]["annotations"][names.DEVICES_OF + "0"] == visible


def test_bind_reads_the_pod_only_when_no_filter_call_has_shown_it():
    world = World()
    world.shown()
    world.bind()
    assert world.api.sent("get") == []
    world = World()
    world.bind()
    assert [call.path for call in world.api.sent("get")] == [POD]


def test_bind_twice_is_bound_once():
    world = World()
    world.bind()
    assert world.bind() == "already_bound"
    assert len(world.posts) == 1


def test_bind_of_a_pod_that_the_watch_shows_bound_elsewhere_is_refused():
    world = World()
    world.state.set_pod(as_pod(bound("p", 8138, 0, node="n2", uid="uid-p")))
    assert "n2" in world.fails("conflict")
    assert world.posts == []


def test_a_lost_answer_is_found_out_by_reading_the_pod():
    world = World(Fault(lost=True))
    assert world.bind() == "bound"
    assert mark(world.state, "uid-p") == "bound"
    assert len(world.posts) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, retry_after=1),
        Fault(status=500),
        Fault(status=503),
        Fault(refused=True),
        Fault(status=409),
    ],
    ids=str,
)
def test_passing_trouble_is_tried_again_with_the_same_words(fault):
    world = World(fault, fault)
    assert world.bind() == "bound"
    bodies = [body for _, body in world.posts]
    assert len(bodies) == 3
    assert bodies[0] == bodies[1] == bodies[2]
    if fault.retry_after:
        assert world.posts[1][0] - world.posts[0][0] >= 1.0


@pytest.mark.parametrize("status", [410, 403, 422, 400])
def test_a_refusal_frees_the_cards_at_once(status):
    world = World(Fault(status=status))
    assert "refused the binding" in world.fails("api_error")
    assert free(world.state) == [P100, P100]
    assert len(world.posts) == 1


def test_nothing_is_posted_after_the_deadline():
    world = World(*[Fault(status=429, retry_after=3)] * 9, seconds=10.0)
    began = world.clock.now()
    world.fails("api_error")
    assert [at - began < 10.0 for at, _ in world.posts] == [True] * len(world.posts)
    assert 2 <= len(world.posts) <= 4
    assert free(world.state) == [P100 - 8138, P100]


def carries_out(world: World) -> None:
    """Execute the next Binding, and then respond with its fault: a proxy has sent it twice."""
    world.api.before_request(
        lambda _: world.api.write_object(paths.pods(), bound("p", 8138, 0, node="n1", uid="uid-p")), "create", times=1
    )


@pytest.mark.parametrize(
    "fault",
    [Fault(status=429, retry_after=60), *(Fault(status=status) for status in (400, 403, 409, 422, 500))],
    ids=str,
)
def test_no_answer_of_a_proxy_frees_cards_of_a_binding_that_may_have_landed(fault):
    world = World(*[fault] * 99, pod=asking("p", gpu_mem=8138), seconds=4.0)
    world.shown()
    carries_out(world)
    world.api.fault(Fault(status=503), "get", times=math.inf)  # the pod's current state cannot be read
    world.fails("api_error")
    assert mark(world.state, "uid-p") == "unconfirmed"
    assert free(world.state) == [P100 - 8138, P100]


def test_a_binding_that_a_proxy_sends_twice_is_there_whatever_the_second_answer_says():
    world = World(Fault(status=403), pod=asking("p", gpu_mem=8138))
    world.shown()
    carries_out(world)
    assert world.bind() == "bound"


def test_after_lost_responses_the_cards_stay_reserved_until_the_outcome_is_known():
    world = World(*[Fault(refused=True)] * 99, seconds=5.0)
    world.fails("api_error")
    assert mark(world.state, "uid-p") == "unconfirmed"
    world.clock.advance(76)
    looks_up(world)
    assert free(world.state) == [P100, P100]


def test_an_unconfirmed_bind_that_landed_is_found_by_a_later_lookup_and_a_later_bind():
    world = World(Fault(lost=True), seconds=5.0)
    world.shown()
    reads = world.api.fault(Fault(refused=True), "get", times=math.inf)
    world.fails("api_error")
    reads.remaining = 0
    world.clock.advance(76)
    looks_up(world)
    assert mark(world.state, "uid-p") == "unconfirmed"
    assert world.bind() == "bound"


def test_a_pod_that_is_gone_or_another_one_frees_the_cards():
    world = World()
    world.api.before_request(lambda _: world.api.remove(POD), "create")
    world.fails("deleted")
    assert free(world.state) == [P100, P100]
    world = World(pod=asking("p", uid="another", gpu_mem=8138))
    world.shown()
    world.fails("deleted")
    assert free(world.state) == [P100, P100]


def test_a_pod_that_another_scheduler_bound_is_an_error_and_frees_our_cards():
    world = World(pod=bound("p", 8138, 1, node="n1", uid="uid-p"))
    world.shown()
    assert "another program" in world.fails("conflict")
    assert free(world.state) == [P100, P100]


def test_a_pod_without_room_on_the_node_gets_the_constant_reason():
    world = World(pod=asking("p", gpu_mem=P100 + 1))
    assert world.fails("refused") == "The pod requests more GPU memory than any GPU of the node has"
    assert world.posts == []


def test_a_pod_that_was_not_mutated_is_not_bound():
    pod = asking("p", gpu_mem=8138)
    del pod["spec"]["containers"][0]["resources"]["limits"][names.SHARE]
    world = World(pod=pod)
    assert "not rewritten by the Cardwise webhook" in world.fails("invalid")


def test_a_pod_that_came_by_its_marker_only_is_bound_without_annotations():
    pod = asking("p")
    pod["spec"]["containers"][0]["resources"]["limits"] = {names.BIND_CALL_RESOURCE: "1"}
    world = World(pod=pod)
    assert world.bind() == "bound"
    assert world.posts[0][1]["metadata"]["annotations"] == {}
    assert world.api.get(POD)["spec"]["nodeName"] == "n1"


@pytest.mark.parametrize("second", [Fault(status=403), Fault(status=429, retry_after=60), Fault(status=404)], ids=str)
def test_a_later_call_that_surely_did_not_bind_says_nothing_of_an_earlier_one_that_may_have(second):
    world = World(pod=asking("p", gpu_mem=P100), seconds=4.0)
    unheard = world.fault(UNHEARD, times=99)
    with pytest.raises(BindFailed):
        world.bind()
    unheard.remaining = 0
    world.fault(second, times=99)
    with pytest.raises(BindFailed):
        world.bind()
    assert mark(world.state, "uid-p") == "unconfirmed"
    assert free(world.state) == [0, P100]


def test_a_call_that_began_while_an_unheard_one_was_posting_holds_on_too():
    """Before the other call ended, it read that no Binding was unconfirmed."""
    world = World(Fault(status=403), seconds=4.0)

    def other(_: Request) -> None:
        pod_request = request.parse(asking("p", gpu_mem=8138))
        world.state.assume(PodRef("uid-p", "default", "p"), pod_request, "n1", "binpack", epoch=0)
        world.state.record_binding_outcome("uid-p", Phase.UNCONFIRMED)

    world.api.before_request(other, "get")
    world.fails("api_error")
    assert mark(world.state, "uid-p") == "unconfirmed"


def test_a_lookup_of_a_deleted_pod_after_a_lost_response_proves_nothing():
    world = World(UNHEARD)
    world.shown()
    world.api.before_request(lambda _: world.api.remove(POD), "get")
    world.fails("deleted")
    assert mark(world.state, "uid-p") == "unconfirmed"


@pytest.mark.parametrize("fault", [Fault(), UNHEARD], ids=["refused", "unheard"])
def test_an_unbound_pod_that_is_being_deleted_can_never_be_bound_and_is_given_up_at_once(fault):
    pod = asking("p", gpu_mem=8138)
    pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    world = World(fault, pod=pod)
    world.shown()
    world.fails("deleted")
    assert len(world.posts) == 1
    assert free(world.state) == [P100, P100]


def test_the_deadline_counts_from_the_arrival_of_the_call_not_from_when_a_thread_took_it_up():
    world = World(seconds=4.0)
    with pytest.raises(BindFailed) as failed:
        world.binder.bind(ARGS, arrived=world.clock.now() - 4.1)
    assert failed.value.outcome == "api_error"
    assert world.posts == []
    assert free(world.state) == [P100, P100]


def test_looking_up_many_in_an_outage_takes_one_step_no_longer_than_a_few_seconds():
    world = World()
    pod_request = request.parse(asking("p", gpu_mem=100))
    for i in range(20):
        world.state.assume(PodRef(f"u{i}", "default", f"p{i}"), pod_request, "n1", "binpack", epoch=0)
        world.state.record_binding_outcome(f"u{i}", Phase.UNCONFIRMED)
    world.clock.advance(76)
    world.api.before_request(lambda call: times_out(world, call), "get", times=math.inf)
    looks_up(world)
    asked_for = [call.path for call in world.api.sent("get")]
    assert len(asked_for) <= 8, "at once, and none after them"
    looks_up(world)
    assert len({call.path for call in world.api.sent("get")}) > len(asked_for), "then others come first"


def test_one_that_cannot_be_changed_keeps_no_other_share():
    world = World()
    for name in ("first", "second"):
        world.api.write_object(paths.pods(), asking(name, gpu_mem=100))
        world.state.assume(
            PodRef(f"uid-{name}", "default", name), request.parse(asking(name, gpu_mem=100)), "n1", "binpack", epoch=0
        )
        world.state.record_binding_outcome(f"uid-{name}", Phase.UNCONFIRMED)
    world.clock.advance(76)
    world.api.before_request(lambda call: times_out(world, call), "patch", "*/first/status", times=math.inf)
    for _ in range(3):
        looks_up(world)
        world.clock.advance(0.1)
    assert [mark(world.state, f"uid-{name}") for name in ("first", "second")] == ["unconfirmed", None]
    tried = len(world.api.sent("patch", "*/first/status"))
    for _ in range(600):
        looks_up(world)
        world.clock.advance(0.1)
    assert len(world.api.sent("patch", "*/first/status")) - tried <= 8


def unheard_for_long():
    """The Binding gets no response, nor does the read after it; the next look-up may release the cards."""
    world = World(UNHEARD, seconds=5.0)
    world.shown()
    reads = world.api.fault(Fault(refused=True), "get", times=math.inf)
    world.fails("api_error")
    reads.end()
    world.clock.advance(76)
    return world


@pytest.mark.parametrize("status", [400, 403, 422])
def test_what_cannot_be_made_void_is_kept(status):
    """The reason is another vendor's policy, or a pod whose annotations have reached their size limit."""
    world = unheard_for_long()
    refused = world.api.fault(Fault(status=status), "patch", times=math.inf)
    looks_up(world)
    assert mark(world.state, "uid-p") == "unconfirmed"
    refused.end()
    world.clock.advance(76)
    looks_up(world)
    assert mark(world.state, "uid-p") is None


@pytest.mark.parametrize("containers", ["running", "terminated"])
def test_a_bind_that_comes_once_more_for_a_finished_pod_holds_no_card_for_ever(containers):
    """The watch has shown the end of the pod before, so nothing that it shows later would free the card."""
    world = World()
    world.shown()
    assert world.bind() == "bound"
    state = {"name": "main", "state": {containers: {}}}
    world.api.edit(POD, status={"phase": "Succeeded", "containerStatuses": [state]})
    finished = world.api.get(POD)
    world.state.set_pod(as_pod(finished | {"status": finished["status"] | {"containerStatuses": []}}))
    assert free(world.state) == [P100, P100]
    assert world.bind() == "bound"
    world.clock.advance(76)
    looks_up(world)
    assert (free(world.state) == [P100, P100]) is (containers == "terminated")


def looks_up(world):
    world.state.expire_reservations()
    due = world.state.overdue_bindings()
    binder.confirm_bindings(due, Fence(world.client, world.clock), world.state, Leadership(), clock=world.clock)


def times_out(world, call):
    assert call.timeout <= 1.0
    world.clock.advance(call.timeout)
    raise TimeoutError("read timed out")


def test_what_is_given_up_never_lands():
    world = unheard_for_long()
    looks_up(world)
    assert free(world.state) == [P100, P100]
    with pytest.raises(errors.Conflict):
        world.api.client().create(f"{POD}/binding", world.api.sent("create", f"{POD}/binding")[0].body)


def test_what_landed_at_the_last_moment_is_not_given_up():
    world = unheard_for_long()
    (late, *_) = world.api.sent("create", f"{POD}/binding")
    world.api.before_request(lambda _: world.api.client().create(f"{POD}/binding", late.body), "patch")
    looks_up(world)
    assert mark(world.state, "uid-p") == "unconfirmed"


def test_a_pod_that_was_changed_since_it_was_read_is_bound_as_it_is_now_at_once():
    world = World()
    world.shown()
    world.api.edit(POD, metadata={"labels": {"changed": "yes"}})
    began = world.clock.now()
    assert world.bind() == "bound"
    assert world.clock.now() == began
    versions = [body["metadata"]["resourceVersion"] for _, body in world.posts]
    assert len(set(versions)) == 2


def test_a_pod_that_changes_all_the_time_is_not_posted_without_a_pause():
    world = World(seconds=5.0)
    world.shown()
    world.api.before_request(
        lambda _: world.api.edit(POD, metadata={"labels": {"at": str(len(world.posts))}}),
        "create", f"{POD}/binding", times=math.inf,
    )  # fmt: skip
    world.fails("api_error")
    assert len(world.posts) < 20
    assert free(world.state) == [P100, P100]


def test_a_lookup_that_began_before_a_newer_bind_settles_nothing():
    world = World()
    pod_request = request.parse(asking("p", gpu_mem=8138))
    for _ in range(2):
        world.state.assume(PodRef("uid-p", "default", "p"), pod_request, "n1", "binpack", epoch=0)
        world.state.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
        world.clock.advance(76)
    world.state.expire_reservations()
    assert world.state.overdue_bindings()
    world.state.assume(PodRef("uid-p", "default", "p"), pod_request, "n1", "binpack", epoch=0)
    world.state.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    world.state.on_lookup("uid-p", bound=False, exists=True)
    assert mark(world.state, "uid-p") == "unconfirmed"
