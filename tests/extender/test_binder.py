"""bind against an API server that fails in every way it knows."""

import json

import pytest

from cardwise.core import assignment, names, request
from cardwise.kube import errors
from extender import binder
from extender.binder import Binder, Failed
from extender.decisions import Stage
from extender.requests import Requests
from extender.wire import BindArgs
from tests.extender.worlds import P100, as_pod, asking, bound, free, mark, state, with_cards
from tests.fakes.clock import FakeClock

ARGS = BindArgs(pod_name="p", pod_namespace="default", pod_uid="uid-p", node="n1")
CONFLICT = errors.Conflict(409, "Conflict", "pod p is already assigned to a node")


class FakeApi:
    """At the seam of KubeClient. `answers`: for each POST an exception, "land" or "lose" (done, but nobody hears)."""

    def __init__(self, clock: FakeClock, *answers: object, pod: dict | None = None) -> None:
        self.clock = clock
        self.answers = list(answers)
        self.get_seconds = 0.0
        self.pod = pod if pod is not None else asking("p", gpu_mem=8138)
        self.posts: list[tuple[float, dict]] = []
        self.gets = 0
        self.get_error: errors.KubeError | None = None
        self.post_seconds = 0.01

    def request(self, method: str, path: str, *, body: dict, timeout: float) -> bytes:
        assert (method, path) == ("POST", "/api/v1/namespaces/default/pods/p/binding")
        self.posts.append((self.clock.now(), body))
        answer = self.answers.pop(0) if self.answers else "land"
        self.clock.advance(min(timeout, self.post_seconds))
        if isinstance(answer, Exception):
            raise answer
        if self.pod["spec"].get("nodeName"):
            raise CONFLICT
        self.pod["spec"]["nodeName"] = body["target"]["name"]
        self.pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
        if answer == "lose":
            raise errors.Unreachable("timed out")
        return b"{}"

    def get(self, path: str, *, timeout: float) -> dict:
        self.gets += 1
        self.clock.advance(min(timeout, self.get_seconds))
        if self.get_error is not None:
            raise self.get_error
        if self.pod is None:
            raise errors.NotFound(404, "NotFound", path)
        return self.pod


class World:
    def __init__(self, *answers: object, seconds: float = 10.0, **how: object) -> None:
        self.clock = FakeClock()
        self.state = with_cards(state(self.clock), n1=2, n2=2)
        self.api = FakeApi(self.clock, *answers, **how)
        self.requests = Requests()
        self.binder = Binder(
            self.api, self.state, self.requests, policy="binpack", seconds=seconds,
            clock=self.clock,
        )  # fmt: skip

    def bind(self, args: BindArgs = ARGS) -> str:
        return self.binder.bind(args)

    def fails(self, outcome: str) -> str:
        with pytest.raises(Failed) as failed:
            self.bind()
        assert failed.value.outcome == outcome
        return str(failed.value)


def test_bind_writes_the_whole_assignment_with_the_uid_in_one_call():
    world = World()
    began = world.clock.wall_ns()
    assert world.bind() == "bound"
    ((_, body),) = world.api.posts
    assert body["metadata"]["uid"] == "uid-p"
    assert body["target"]["name"] == "n1"
    written = body["metadata"]["annotations"]
    assert written[names.IDX] == "0"
    assert written[names.POD_MEM] == "8138"
    assert written[names.ASSIGNED] == "false"
    assert written[names.ASSUME_TIME] == str(began)
    assert assignment.decode(written).shares()[0].uuid == "GPU-n1-0"
    assert mark(world.state, "uid-p") == "bound"


def test_bind_reads_the_pod_only_when_no_filter_call_has_shown_it():
    world = World()
    world.requests.put("uid-p", request.parse(asking("p", gpu_mem=8138)))
    world.bind()
    assert world.api.gets == 0
    world = World()
    world.bind()
    assert world.api.gets == 1


def test_bind_twice_is_bound_once():
    world = World()
    world.bind()
    assert world.bind() == "repeated"
    assert len(world.api.posts) == 1


def test_bind_of_a_pod_that_the_watch_shows_bound_elsewhere_is_refused():
    world = World()
    world.state.set_pod(as_pod(bound("p", 8138, 0, node="n2", uid="uid-p")))
    assert "n2" in world.fails("taken")
    assert world.api.posts == []


def test_a_lost_answer_is_found_out_by_reading_the_pod():
    world = World("lose")
    assert world.bind() == "bound"
    assert mark(world.state, "uid-p") == "bound"
    assert len(world.api.posts) == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.TooManyRequests(429, "TooManyRequests", "slow down", retry_after=1.0),
        errors.ServerError(500, "InternalError", "etcd leader changed"),
        errors.ServerError(503, "ServiceUnavailable", ""),
        errors.Unreachable("connection reset"),
        errors.Conflict(409, "Conflict", "the object has been modified"),
    ],
)
def test_passing_trouble_is_tried_again_with_the_same_words(error):
    world = World(error, error)
    assert world.bind() == "bound"
    bodies = [body for _, body in world.api.posts]
    assert len(bodies) == 3
    assert bodies[0] == bodies[1] == bodies[2]
    if error.retry_after:
        assert world.api.posts[1][0] - world.api.posts[0][0] >= 1.0


@pytest.mark.parametrize(
    "error",
    [
        errors.Gone(410, "Expired", ""),
        errors.Forbidden(403, "Forbidden", "denied by a policy"),
        errors.Invalid(422, "Invalid", ""),
        errors.BadRequest(400, "BadRequest", ""),
    ],
)
def test_a_refusal_frees_the_cards_at_once(error):
    world = World(error)
    assert "refused the binding" in world.fails("api")
    assert free(world.state) == [P100, P100]
    assert len(world.api.posts) == 1


def test_nothing_is_posted_after_the_deadline():
    world = World(*[errors.TooManyRequests(429, "", "", retry_after=3.0)] * 9, seconds=10.0)
    began = world.clock.now()
    world.fails("api")
    assert [at - began < 10.0 for at, _ in world.api.posts] == [True] * len(world.api.posts)
    assert 2 <= len(world.api.posts) <= 4
    assert free(world.state) == [P100, P100]  # 429 was never carried out


def test_after_lost_answers_to_the_deadline_the_cards_stay_held_until_somebody_knows():
    world = World(*[errors.Unreachable("timed out")] * 99, seconds=5.0)
    world.fails("api")
    assert mark(world.state, "uid-p") == "unsure"
    world.clock.advance(76)
    binder.look_up(world.api, world.state)
    assert free(world.state) == [P100, P100]


def test_an_unsure_bind_that_did_land_is_found_by_a_later_look_and_by_a_later_bind():
    world = World(*[errors.Unreachable("timed out")] * 99, seconds=5.0)
    world.requests.put("uid-p", request.parse(asking("p", gpu_mem=8138)))
    world.api.get_error = errors.Unreachable("timed out")
    world.fails("api")
    world.api.get_error = None
    _, body = world.api.posts[0]
    world.api.pod["spec"]["nodeName"] = "n1"
    world.api.pod["metadata"]["annotations"] = body["metadata"]["annotations"]
    world.clock.advance(76)
    binder.look_up(world.api, world.state)
    assert mark(world.state, "uid-p") == "unsure"
    world.api.answers.clear()
    assert world.bind() == "bound"


def test_a_pod_that_is_gone_or_another_one_frees_the_cards():
    world = World(errors.NotFound(404, "NotFound", ""))
    world.fails("gone")
    assert free(world.state) == [P100, P100]
    world = World(errors.Conflict(409, "Conflict", "the UID in the precondition does not match"))
    world.requests.put("uid-p", request.parse(asking("p", gpu_mem=8138)))
    world.api.pod = asking("p", uid="another", gpu_mem=8138)
    world.fails("gone")
    assert free(world.state) == [P100, P100]


def test_a_pod_bound_by_somebody_else_is_an_error_and_frees_our_cards():
    world = World(CONFLICT)
    world.requests.put("uid-p", request.parse(asking("p", gpu_mem=8138)))
    world.api.pod = bound("p", 8138, 1, node="n1", uid="uid-p")
    assert "somebody else" in world.fails("taken")
    assert free(world.state) == [P100, P100]


def test_a_pod_without_room_on_the_node_gets_the_constant_reason():
    world = World()
    world.api.pod = asking("p", gpu_mem=P100 + 1)
    assert world.fails("refused") == "The GPU memory asked for is more than any card of the node has"
    assert world.api.posts == []


def test_a_pod_that_was_not_mutated_is_not_bound():
    world = World()
    limits = world.api.pod["spec"]["containers"][0]["resources"]["limits"]
    del limits[names.SHARE]
    assert "not rewritten by the Cardwise webhook" in world.fails("invalid")


def test_a_pod_that_came_by_its_marker_only_is_bound_without_annotations():
    world = World()
    world.api.pod["spec"]["containers"][0]["resources"]["limits"] = {names.BIND_MARKER: "1"}
    assert world.bind() == "bound"
    assert json.loads(json.dumps(world.api.posts[0][1]["metadata"]["annotations"])) == {}


@pytest.mark.parametrize(
    "second",
    [
        errors.Forbidden(403, "Forbidden", "denied by a policy"),
        errors.TooManyRequests(429, "TooManyRequests", "busy", retry_after=60),
        errors.NotFound(404, "NotFound", ""),
    ],
)
def test_a_later_call_that_surely_did_not_bind_says_nothing_of_an_earlier_one_that_may_have(second):
    world = World(*[errors.Unreachable("timed out")] * 99, seconds=4.0)
    world.api.pod = asking("p", gpu_mem=P100)
    with pytest.raises(Failed):
        world.bind()
    world.api.answers = [second] * 99
    with pytest.raises(Failed):
        world.bind()
    assert mark(world.state, "uid-p") == "unsure"
    assert free(world.state) == [0, P100]


def test_a_call_that_began_while_an_unheard_one_was_posting_holds_on_too():
    """It read that nothing was unsure yet, before the other one ended."""
    world = World(*[errors.Unreachable("timed out")] * 99, seconds=4.0)
    real = world.api.get

    def get(path, *, timeout):
        if world.api.gets == 0:
            asked = request.parse(asking("p", gpu_mem=8138))
            world.state.begin_bind("uid-p", ("default", "p"), asked, "n1", "binpack")
            world.state.finish_bind("uid-p", Stage.UNSURE)
        return real(path, timeout=timeout)

    world.api.get = get
    world.api.answers = [errors.Forbidden(403, "Forbidden", "")]
    world.fails("api")
    assert mark(world.state, "uid-p") == "unsure"


def test_a_look_that_finds_the_pod_gone_after_an_unheard_post_proves_nothing():
    world = World(errors.Unreachable("timed out"))
    world.requests.put("uid-p", request.parse(asking("p", gpu_mem=8138)))
    world.api.get_error = errors.NotFound(404, "NotFound", "")
    world.fails("gone")
    assert mark(world.state, "uid-p") == "unsure"


@pytest.mark.parametrize("answer", [CONFLICT, errors.Unreachable("timed out")])
def test_an_unbound_pod_that_is_being_deleted_can_never_be_bound_and_is_given_up_at_once(answer):
    world = World(*[answer] * 99)
    world.requests.put("uid-p", request.parse(asking("p", gpu_mem=8138)))
    world.api.pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    world.fails("gone")
    assert len(world.api.posts) == 1
    assert free(world.state) == [P100, P100]


def test_the_deadline_counts_from_the_arrival_of_the_call_not_from_when_a_thread_took_it_up():
    world = World(seconds=4.0)
    with pytest.raises(Failed) as failed:
        world.binder.bind(ARGS, arrived=world.clock.now() - 4.1)
    assert failed.value.outcome == "api"
    assert world.api.posts == []
    assert free(world.state) == [P100, P100]


def test_looking_up_many_in_an_outage_takes_one_step_no_longer_than_a_few_seconds():
    world = World()
    asked = request.parse(asking("p", gpu_mem=100))
    for i in range(20):
        world.state.begin_bind(f"u{i}", ("default", f"p{i}"), asked, "n1", "binpack")
        world.state.finish_bind(f"u{i}", Stage.UNSURE)
    world.clock.advance(76)
    world.api.get_seconds, world.api.get_error = 60.0, errors.Unreachable("timed out")
    began = world.clock.now()
    binder.look_up(world.api, world.state, clock=world.clock)
    assert world.clock.now() - began <= 3.0


def test_a_look_from_before_a_newer_bind_settles_nothing():
    world = World()
    asked = request.parse(asking("p", gpu_mem=8138))
    for _ in range(2):
        world.state.begin_bind("uid-p", ("default", "p"), asked, "n1", "binpack")
        world.state.finish_bind("uid-p", Stage.UNSURE)
        world.clock.advance(76)
    assert world.state.tick()
    world.state.begin_bind("uid-p", ("default", "p"), asked, "n1", "binpack")
    world.state.finish_bind("uid-p", Stage.UNSURE)
    world.state.looked_up("uid-p", bound=False, exists=True)
    assert mark(world.state, "uid-p") == "unsure"
