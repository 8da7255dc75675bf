"""One automatic class for each model, and no change of other classes."""

import json

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import classes, names
from cardwise.kube.objects import resourceclasses
from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE
from extender.reporting.classcontroller import (
    MAX_CLASSES_WITHOUT_CARDS,
    ClassChanges,
    ClassController,
    automatic_class,
    plan_changes,
)
from extender.reporting.listers import Listers
from tests.build import resource_class
from tests.extender.statuscluster import CARDS, CLASSES, Watched, class_path, er_object, er_path
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock

K80, V100, A100 = "nvidia.tesla.k80", "nvidia.tesla.v100", "nvidia.a100"


def class_record(resource_class):
    return resourceclasses.decode(json.dumps(resource_class).encode())


def auto(model="Tesla K80", *spellings, created="", **changed):
    manifest = automatic_class(classes.name_of_model(model), model, *spellings)
    manifest["metadata"]["creationTimestamp"] = created
    return class_record(manifest | {"spec": manifest["spec"] | {"priority": 0} | changed})


def many_classes(number):
    """This number of automatic classes, the oldest first."""
    models = [f"Tesla {i:03}" for i in range(number)]
    return {
        classes.name_of_model(model): auto(model, created=f"2026-11-{28 - i // 60:02}T00:{i % 60:02}:00Z")
        for i, model in enumerate(reversed(models))
    }


def unused(name):
    return False


def test_a_class_is_wanted_for_each_model_that_has_none():
    wanted = plan_changes({"Tesla K80", "Tesla V100"}, {V100: auto("Tesla V100")}, unused)
    assert wanted == ClassChanges(creates={K80: ("Tesla K80",)}, deletes=[])


def test_a_class_outlives_its_cards():
    assert plan_changes((), {K80: auto()}, unused) == ClassChanges(deletes=[])
    assert plan_changes((), many_classes(MAX_CLASSES_WITHOUT_CARDS), unused) == ClassChanges(deletes=[])


def test_of_too_many_classes_without_cards_the_youngest_go_unless_they_are_in_use():
    known = many_classes(MAX_CLASSES_WITHOUT_CARDS + 3)
    oldest_first = sorted(known, key=lambda name: known[name].created)
    *kept, first, second, third = oldest_first
    assert plan_changes((), known, unused).deletes == [first, second, third]
    assert plan_changes((), known, lambda name: name == second).deletes == [first, third]
    with_cards = [known[name].auto_models[0] for name in kept[:3]]
    assert plan_changes(with_cards, known, unused) == ClassChanges(deletes=[]), (
        "a class with cards takes nobody's place"
    )


@pytest.mark.parametrize(
    "theirs",
    [
        auto(priority=7),
        auto(selector={"matchLabels": {"model": "Tesla K80", "node": "n1"}}),
        auto("Tesla K80", "NVIDIA Tesla K80", priority=7),
        class_record(resource_class(K80)),
        class_record(resource_class(K80, model="other")),
    ],
)
def test_a_class_that_a_person_made_or_edited_is_theirs(theirs):
    for models in ((), ("Tesla K80",), ("Tesla K80", "NVIDIA Tesla K80")):
        assert plan_changes(models, {K80: theirs}, unused) == ClassChanges(deletes=[])


def test_a_copy_of_an_automatic_class_under_another_name_is_somebodys_own():
    copy = automatic_class(K80, "Tesla K80")
    copy["metadata"]["name"] = "mine"
    assert plan_changes((), {"mine": class_record(copy)}, unused).deletes == []


def test_all_spellings_of_a_model_are_one_class():
    spellings = ("A100", "NVIDIA A100")
    assert plan_changes(spellings[::-1], {}, unused).creates == {A100: spellings}
    for written in (spellings[:1], spellings[1:]):
        assert plan_changes(spellings, {A100: auto(*written)}, unused) == ClassChanges(
            updates={A100: spellings}, deletes=[]
        )
        assert plan_changes(written, {A100: auto(*spellings)}, unused) == ClassChanges(
            updates={A100: written}, deletes=[]
        )
    assert plan_changes(spellings, {A100: auto(*spellings)}, unused) == ClassChanges(deletes=[])
    assert plan_changes((), {A100: auto(*spellings)}, unused) == ClassChanges(deletes=[])


class World:
    def __init__(self, *faults):
        self.clock = FakeClock()
        self.seen = Listers()
        self.api = Watched(self.seen, self.clock, *faults)
        self.active = True
        self.in_use = set()
        self.controller = ClassController(
            self.api.client(), self.seen, active=lambda: self.active, in_use=self.in_use.__contains__, clock=self.clock
        )

    def run(self, seconds):
        for _ in range(int(seconds * 4)):
            self.api.show()
            self.controller.step()
            self.clock.advance(0.25)
        self.api.show()

    def card(self, uuid="GPU-A", model="Tesla K80"):
        self.api.write_object(CARDS, er_object(uuid, "n1", model=model))

    def calls(self):
        return [(call.verb, call.path.rsplit("/", 1)[-1]) for call in self.api.requests]


@pytest.fixture
def world():
    return World()


def test_the_class_comes_with_the_first_card_and_stays_after_the_last(world):
    world.card("GPU-A")
    world.card("GPU-B")
    world.card("GPU-C", model="")
    world.run(3)
    stored = world.api.get(class_path(K80))
    assert stored["metadata"]["labels"] == {names.AUTO_LABEL: "true"}
    assert json.loads(stored["metadata"]["annotations"][names.AUTO_SPEC]) == stored["spec"]
    assert stored["spec"] == {"selector": {"matchLabels": {"model": "Tesla K80"}}}
    assert classes.auto_models(stored) == ("Tesla K80",)
    world.api.remove(er_path("GPU-A"))
    world.api.remove(er_path("GPU-B"))
    world.run(60)
    assert world.api.get(class_path(K80)) == stored
    assert world.calls() == [("create", "resourceclasses")]


def test_a_class_that_an_admin_deletes_comes_again_with_cards_only(world):
    world.card()
    world.run(3)
    world.api.remove(er_path("GPU-A"))
    world.run(3)
    world.api.remove(class_path(K80))
    world.run(60)
    assert world.api.get(class_path(K80)) is None
    world.card()
    world.run(10)
    assert world.api.get(class_path(K80)) is not None


def crowd(world):
    """As many other classes without cards as are kept, older than all that come later."""
    for i in range(MAX_CLASSES_WITHOUT_CARDS):
        world.api.write_object(CLASSES, automatic_class(classes.name_of_model(f"Xavier {i:03}"), f"Xavier {i:03}"))
    world.clock.advance(60)


def test_what_is_deleted_is_what_was_seen(world):
    crowd(world)
    world.card()
    world.run(3)
    stored = world.api.get(class_path(K80))
    world.api.remove(er_path("GPU-A"))
    world.run(30)
    assert world.api.get(class_path(K80)) is None
    assert world.calls() == [("create", "resourceclasses"), ("delete", K80)]
    assert world.api.requests[-1].body["preconditions"] == {
        key: stored["metadata"][key] for key in ("uid", "resourceVersion")
    }


def test_a_card_that_moves_does_not_take_its_class_away(world):
    crowd(world)
    world.card()
    world.run(3)
    world.api.remove(er_path("GPU-A"))
    world.run(5)
    world.card()
    world.run(30)
    assert world.calls() == [("create", "resourceclasses")]


def test_a_class_that_pods_hold_or_wait_for_stays_until_they_are_gone(world):
    crowd(world)
    world.card()
    world.run(3)
    world.api.remove(er_path("GPU-A"))
    world.in_use.add(K80)
    world.run(60)
    assert world.api.get(class_path(K80)) is not None
    world.in_use.clear()
    world.run(30)
    assert world.api.get(class_path(K80)) is None


def test_a_class_edited_since_the_last_watch_event_is_not_deleted(world):
    crowd(world)
    world.card()
    world.run(3)
    world.api.remove(er_path("GPU-A"))
    world.run(9)
    world.api.hold(CLASSES)
    world.api.edit(class_path(K80), spec={"priority": 7})
    world.run(10)
    assert world.api.get(class_path(K80)) is not None
    assert ("delete", K80) in world.calls()


def test_a_persons_class_of_that_name_is_left_alone_and_said_once(world):
    world.api.write_object(CLASSES, resource_class(K80, model="something else"))
    world.card()
    with capture_logs() as logs:
        world.run(100)
    assert world.calls() == []
    assert len(logs) == 1
    assert "created by hand" in logs[0]["problem"]


def test_a_class_that_another_writer_created_first_is_not_retried_at_once(world):
    world.card()
    world.api.hold(CLASSES)
    world.api.write_object(CLASSES, resource_class(K80))
    with capture_logs() as logs:
        world.run(25)
    assert world.calls() == [("create", "resourceclasses")]
    assert logs == []


def test_a_class_that_is_deleted_while_its_cards_are_there_comes_again(world):
    world.card()
    world.run(10)
    world.api.remove(class_path(K80))
    with capture_logs() as logs:
        world.run(10)
    assert world.api.get(class_path(K80)) is not None
    assert ["recreating" in line["event"] for line in logs] == [True, False]


def test_a_refused_class_is_tried_again_after_a_while():
    world = World(Fault(status=403), Fault(refused=True))
    world.card()
    with capture_logs() as logs:
        world.run(70)
    assert world.api.get(class_path(K80)) is not None
    assert [line["log_level"] for line in logs] == ["warning", "warning", "info"]


def test_an_answer_that_was_lost_leaves_one_class():
    world = World(Fault(lost=True))
    world.card()
    world.run(60)
    assert world.calls() == [("create", "resourceclasses")]


def test_a_follower_writes_no_class(world):
    world.active = False
    world.card()
    world.run(30)
    assert world.calls() == []


def selected(resource_class):
    selector = classes.parse(resource_class).selector
    return [model for model in ("A100", "NVIDIA A100") if selector.matches({"model": model})]


def test_a_class_follows_the_spellings_of_its_model(world):
    world.card("GPU-A", model="NVIDIA A100")
    world.run(10)
    first = world.api.get(class_path(A100))
    world.card("GPU-B", model="A100")
    world.run(10)
    stored = world.api.get(class_path(A100))
    assert selected(stored) == ["A100", "NVIDIA A100"]
    assert json.loads(stored["metadata"]["annotations"][names.AUTO_SPEC]) == stored["spec"]
    assert stored["metadata"]["uid"] == first["metadata"]["uid"]
    world.api.remove(er_path("GPU-A"))
    world.run(5)
    assert selected(world.api.get(class_path(A100))) == ["A100", "NVIDIA A100"], "it may only have moved"
    world.run(30)
    assert world.api.get(class_path(A100))["spec"] == {"selector": {"matchLabels": {"model": "A100"}}}
    assert world.calls() == [("create", "resourceclasses"), ("patch", A100), ("patch", A100)]


def test_an_edit_since_the_last_watch_event_is_not_undone(world):
    world.card("GPU-A", model="NVIDIA A100")
    world.run(10)
    world.api.hold(CLASSES)
    theirs = world.api.edit(class_path(A100), spec={"priority": 7})
    world.card("GPU-B", model="A100")
    world.run(10)
    assert world.api.get(class_path(A100)) == theirs
    assert ("patch", A100) in world.calls()


def test_a_refused_change_is_tried_again_after_a_while():
    world = World(Fault(), Fault(status=403), Fault(refused=True))
    world.card("GPU-A", model="NVIDIA A100")
    world.run(10)
    world.card("GPU-B", model="A100")
    with capture_logs() as logs:
        world.run(70)
    assert selected(world.api.get(class_path(A100))) == ["A100", "NVIDIA A100"]
    assert [line["log_level"] for line in logs] == ["warning", "warning", "info"]


def test_a_node_that_invents_models_delays_no_class(world):
    for i in range(2 * MAX_CARDS_PER_NODE):
        world.card(f"GPU-{i}", f"Evil {i:03}")
    world.run(1)
    assert len(world.calls()) == 8
    world.api.write_object(CARDS, er_object("GPU-A", "n2", model="Tesla K80"))
    world.run(MAX_CARDS_PER_NODE / 8)
    assert len(world.calls()) == MAX_CARDS_PER_NODE + 1, "no more of one node than the ledger counts"
    assert world.api.get(class_path(K80)) is not None
    assert len(world.seen.cards.cards_on("n1")) == MAX_CARDS_PER_NODE


def test_models_that_a_node_invents_leave_few_classes_and_push_out_no_older_one(world):
    world.api.write_object(CARDS, er_object("GPU-A", "n2", model="Tesla K80"))
    world.run(3)
    for turn in range(2):
        for i in range(MAX_CARDS_PER_NODE):
            world.card(f"GPU-{i}", f"Evil {turn} {i:03}")
        world.run(MAX_CARDS_PER_NODE / 8 + 10)
    for i in range(MAX_CARDS_PER_NODE):
        world.api.remove(er_path(f"GPU-{i}"))
    world.api.remove(er_path("GPU-A"))
    world.run(2 * MAX_CARDS_PER_NODE / 8 + 30)
    assert len(world.seen.classes.snapshot()) == MAX_CLASSES_WITHOUT_CARDS
    assert world.api.get(class_path(K80)) is not None


def test_classes_that_take_long_to_write_do_not_keep_the_statuses_of_others_waiting(world):
    """The thread writes those too."""
    world.api.fault(Fault(seconds=60.0), times=1_000_000)
    for i in range(8):
        world.card(f"GPU-{i}", f"Tesla {i}")
    world.api.show()
    began = world.clock.now()
    world.controller.step()
    assert 0.0 < world.clock.now() - began <= 3.0


def test_the_longest_waiting_class_is_created_first(world):
    for i in range(16):
        world.card(f"GPU-{i}", f"Tesla {i:02}")
    world.run(1)
    for i in range(16):
        world.card(f"GPU-{i}", f"A {i:02}" if i < 8 else f"Tesla {i:02}")
    world.run(1)
    assert world.api.get(class_path("nvidia.tesla.15")) is not None
    assert world.api.get(class_path("nvidia.a.00")) is None
