"""Statuses: the statuses that users read equal the ledger, whatever events are lost."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import Holding
from extender.reporting.statuswriter import StatusWriter
from tests.build import gpu_quota, resource_class
from tests.extender.statuscluster import (
    CARDS,
    CLASSES,
    K80,
    QUOTAS,
    World,
    card,
    class_path,
    conditions,
    er_object,
    er_path,
    holding,
    quota_path,
)
from tests.fakes.apiserver import Fault


@pytest.fixture
def world():
    return World()


def test_a_card_shows_what_is_held_and_what_is_left_of_it(world):
    world.node("n1", card("GPU-A", classes=("slow", "k80")), card("GPU-B", 1))
    world.hold("p1", "n1", ("0", "GPU-A", 4000, 30), ("1", "GPU-A", 1000, 20))
    world.hold("p2", "n1", ("0", "GPU-A", 441, 0), ("0", "GPU-B", K80, 100))
    world.run(2)
    shown = world.status(er_path("GPU-A"))
    assert shown["allocated"] == {"memoryMiB": 5441, "corePercent": 50, "shares": 3, "whole": False, "pods": 2}
    assert (shown["freeMiB"], shown["classes"]) == (6000, ["k80", "slow"])
    assert (shown["health"], shown["gpuAccess"]) == ("Healthy", "cdi"), "these are the device plugin's"
    full = world.status(er_path("GPU-B"))
    assert full["allocated"] == {"memoryMiB": K80, "corePercent": 100, "shares": 1, "whole": True, "pods": 1}
    assert full["freeMiB"] == 0


def test_a_sick_card_has_nothing_to_give_and_an_unknown_one_still_counts_what_is_held(world):
    world.node("n1", card("GPU-A", healthy=False))
    world.api.write_object(CARDS, er_object("GPU-B", "n1"))  # of a node object that is not there yet, say
    world.hold("p1", "n1", ("0", "GPU-A", 4000, 0), ("0", "GPU-B", 100, 0))
    world.run(2)
    assert world.status(er_path("GPU-A"))["freeMiB"] == 0
    assert world.status(er_path("GPU-A"))["allocated"]["memoryMiB"] == 4000
    assert world.status(er_path("GPU-B"))["allocated"]["memoryMiB"] == 100
    assert world.status(er_path("GPU-B"))["freeMiB"] == 0


def test_a_pod_of_gpushare_counts_on_the_card_of_its_index(world):
    world.node("n1", card("GPU-A"), card("GPU-B", 1))
    share = CardShare(1, "", 4000, 0, K80)
    world.state.ledger.set_holding(Holding("p", "team", "p", "n1", Assignment({"pod": (share,)})))
    world.run(2)
    assert world.status(er_path("GPU-A"))["allocated"]["memoryMiB"] == 0
    assert world.status(er_path("GPU-B"))["allocated"]["memoryMiB"] == 4000


def test_a_class_adds_up_its_cards(world):
    world.node("n1", card("GPU-A"), card("GPU-B", 1, healthy=False))
    world.node("n2", card("GPU-C", classes=("k80", "slow")), card("GPU-D", 1, classes=()))
    world.hold("p", "n2", ("0", "GPU-C", 4000, 0))
    for name in ("k80", "slow", "none"):
        world.api.write_object(CLASSES, resource_class(name))
    world.run(3)
    numbers = ("devices", "healthyDevices", "nodes", "memoryMiB", "usedMiB", "freeMiB")

    def shown(name):
        return [world.status(class_path(name))[number] for number in numbers]

    assert shown("k80") == [3, 2, 2, 3 * K80, 4000, 2 * K80 - 4000]
    assert shown("slow") == [1, 1, 1, K80, 4000, K80 - 4000]
    assert shown("none") == [0] * 6
    assert conditions(world.status(class_path("k80"))) == {"Valid": "True"}
    world.node("n2")
    world.run(3)
    assert shown("k80") == [2, 1, 1, 2 * K80, 0, K80]
    assert shown("slow") == [0] * 6


def test_a_class_of_devices_counts_devices_without_memory(world):
    rdma = Device(uuid="rdma-0", kind="rdma", index=0, classes=frozenset({"rdma"}))
    world.state.ledger.set_other_devices("n1", [rdma, replace(rdma, uuid="rdma-1", index=1, healthy=False)])
    world.state.changed.add("n1")
    path = class_path("rdma")
    old_status = {"memoryMiB": 0, "usedMiB": 0, "freeMiB": 0}  # from the time when it was not a class of devices
    world.api.write_object(
        CLASSES, resource_class("rdma", selector={"matchLabels": {"kind": "rdma"}}) | {"status": old_status}
    )
    world.run(3)
    status = world.status(path)
    conditions = status.pop("conditions")
    assert status == {"devices": 2, "healthyDevices": 1, "nodes": 1}
    assert [condition["status"] for condition in conditions] == ["True"]


def test_a_class_shows_its_problem_while_it_lasts(world):
    world.api.write_object(CLASSES, resource_class("odd", selector={}))
    world.run(2)
    status = world.status(class_path("odd"))
    assert "selector" in status["problem"]
    assert conditions(status) == {"Valid": "False"}
    world.api.write_object(CLASSES, resource_class("odd") | {"status": status})
    world.run(2)
    assert "problem" not in world.status(class_path("odd"))
    assert conditions(world.status(class_path("odd"))) == {"Valid": "True"}


def test_a_quota_shows_used_and_hard_and_whether_it_is_exceeded(world):
    world.node("n1", card("GPU-A"), card("GPU-B", 1))
    world.api.write_object(CLASSES, resource_class("k80"))
    world.hold("p1", "n1", ("0", "GPU-A", 4000, 0))
    world.hold("p2", "n1", ("0", "GPU-B", K80, 100))
    world.hold("other", "n1", ("0", "GPU-A", 500, 0), namespace="others")
    path = quota_path("gpus")
    world.api.write_object(
        QUOTAS,
        gpu_quota({"class": "k80", "shares": 5, "memoryMiB": "64Gi"}, {"gpus": 0}, name="gpus", namespace="team"),
    )
    world.run(3)
    status = world.status(path)
    assert status["summary"] == "k80: 2/5 shares, 15441/65536 MiB; all GPUs: 1/0 whole GPUs"
    amounts = {"shares": 2, "memoryMiB": 4000 + K80, "gpus": 1}
    assert status["used"] == [
        {"class": "k80", **amounts, "hard": {"shares": 5, "memoryMiB": 65536}},
        {**amounts, "hard": {"gpus": 0}},
    ]
    assert conditions(status) == {"Exceeded": "True", "Valid": "True"}
    (exceeded,) = (condition for condition in status["conditions"] if condition["type"] == "Exceeded")
    assert exceeded["message"].startswith("all GPUs: 1 whole GPUs used, 0 allowed")
    world.release("p2")
    world.run(3)
    assert conditions(world.status(path))["Exceeded"] == "False"
    assert world.status(path)["summary"].startswith("k80: 1/5 shares, 4000/65536 MiB")


def test_a_quota_without_a_class_or_with_invalid_fields_has_a_condition(world):
    path = quota_path("gpus")
    world.api.write_object(CLASSES, resource_class("k80"))
    world.api.write_object(QUOTAS, gpu_quota({"class": "k90", "shares": 1}, name="gpus", namespace="team"))
    world.run(2)
    (valid,) = (condition for condition in world.status(path)["conditions"] if condition["type"] == "Valid")
    assert valid["status"] == "False"
    assert "spec.hard[0].class: ResourceClass k90 does not exist" in valid["message"]
    assert "k80" in valid["message"]
    assert world.status(path)["summary"] == "k90: no such class", "not as if something were limited"
    world.api.write_object(CLASSES, resource_class("k90"))
    world.run(2)
    assert conditions(world.status(path))["Valid"] == "True"
    assert world.status(path)["summary"] == "k90: 0/1 shares"
    world.api.write_object(CLASSES, resource_class("k90", selector={}))
    world.run(2)
    assert world.status(path)["summary"] == "k90: unreadable class"
    world.api.write_object(
        QUOTAS, gpu_quota({"shares": -1}, name="gpus", namespace="team") | {"status": world.status(path)}
    )
    world.run(2)
    status = world.status(path)
    assert conditions(status) == {"Valid": "False", "Exceeded": "Unknown"}
    assert "used" not in status
    assert "summary" not in status


def test_a_quota_gets_one_event_about_its_deleted_class(world):
    world.api.write_object(CLASSES, resource_class("k90"))
    quota = world.api.write_object(QUOTAS, gpu_quota({"class": "k90", "shares": 1}, name="gpus", namespace="team"))
    world.run(5)
    assert world.without_class == []
    for times in (1, 2):
        world.api.remove(class_path("k90"))
        world.run(5)
        world.node("n1", card(f"GPU-{times}"))
        world.hold(f"p{times}", "n1", ("0", f"GPU-{times}", 1, 0))
        world.run(70)
        ((name, uid, text),) = world.without_class
        assert (name, uid) == ("gpus", quota["metadata"]["uid"])
        assert "ResourceClass k90 does not exist" in text
        world.without_class.clear()
        world.api.write_object(CLASSES, resource_class("k90"))
        world.run(5)


def test_a_quota_is_told_nothing_before_its_status_says_it():
    world = World(Fault(refused=True))
    world.api.write_object(QUOTAS, gpu_quota({"class": "k90", "shares": 1}, name="gpus", namespace="team"))
    world.run(0.25)
    assert (len(world.api.requests), world.without_class) == (1, [])
    world.run(30)
    assert len(world.without_class) == 1


def test_a_class_that_cards_are_in_by_their_model_limits_without_an_object(world):
    path = quota_path("gpus")
    world.api.write_object(QUOTAS, gpu_quota({"class": "nvidia.tesla.k80", "shares": 1}, name="gpus", namespace="team"))
    world.run(2)
    assert world.status(path)["summary"] == "nvidia.tesla.k80: no such class"
    world.node("n1", card("GPU-A", classes=("nvidia.tesla.k80",)))
    world.hold("p", "n1", ("0", "GPU-A", 1, 0))
    world.run(2)
    assert world.status(path)["summary"] == "nvidia.tesla.k80: 1/1 shares"
    assert conditions(world.status(path))["Valid"] == "True"


def test_a_condition_keeps_its_time_until_its_status_changes(world):
    path = quota_path("gpus")
    world.node("n1", card("GPU-A"))
    world.api.write_object(QUOTAS, gpu_quota({"shares": 1}, name="gpus", namespace="team"))

    def since():
        world.run(3)
        return {condition["type"]: condition["lastTransitionTime"] for condition in world.status(path)["conditions"]}

    first = since()
    world.hold("p1", "n1", ("0", "GPU-A", 1, 0))
    assert since() == first
    world.hold("p2", "n1", ("0", "GPU-A", 1, 0))
    then = since()
    assert then["Valid"] == first["Valid"]
    assert then["Exceeded"] > first["Exceeded"]


def unfit(document, schema, path=""):
    """The parts of a value that the API server would refuse, or drop silently."""
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(document, types[schema["type"]]):
        return [path]
    if isinstance(document, dict):
        unknown = [f"{path}.{key}" for key in document.keys() - schema["properties"].keys()]
        missing = [f"{path}.{key}" for key in schema.get("required", []) if key not in document]
        known = {key: part for key, part in schema["properties"].items() if key in document}
        return (
            unknown
            + missing
            + [bad for key, part in known.items() for bad in unfit(document[key], part, f"{path}.{key}")]
        )
    if isinstance(document, list):
        return [bad for part in document for bad in unfit(part, schema["items"], f"{path}[]")]
    return [] if document in schema.get("enum", [document]) else [path]


def test_every_status_is_as_the_crds_have_it(world):
    world.node("n1", card("GPU-A"), card("GPU-B", 1))
    world.hold("p", "n1", ("0", "GPU-A", K80, 100))
    world.api.write_object(CLASSES, resource_class("k80"))
    world.api.write_object(CLASSES, resource_class("odd", selector={"x" * 2000: 1}))
    world.api.write_object(
        QUOTAS, gpu_quota({"class": "k80", "shares": 0}, {"model": "M", "gpus": 1}, name="gpus", namespace="team")
    )
    world.api.write_object(QUOTAS, gpu_quota({}, name="odd", namespace="team"))
    world.run(5)
    crds = Path(__file__).parents[3] / "helm" / "cardwise" / "files" / "crds"
    for collection in (CARDS, CLASSES, QUOTAS):
        plural = collection.rpartition("/")[2]
        (version,) = yaml.safe_load((crds / f"{plural}.yaml").read_text())["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]
        objects = world.api.all(collection)
        assert len(objects) == 2
        for status in (manifest["status"] for manifest in objects):
            assert unfit(status, schema) == [], plural
            texts = [condition["message"] for condition in status.get("conditions", [])] + [status.get("problem", "")]
            assert max(map(len, texts)) <= 1024


def test_a_follower_writes_nothing_and_is_up_to_date_when_it_leads(world):
    world.active = False
    world.node("n1", card("GPU-A"))
    world.hold("p1", "n1", ("0", "GPU-A", 4000, 0))
    world.run(10)
    assert world.api.requests == []
    world.active = True
    world.run(1)
    assert world.status(er_path("GPU-A"))["allocated"]["memoryMiB"] == 4000


def test_what_is_as_it_ought_to_be_is_not_written(world):
    world.node("n1", card("GPU-A"))
    world.api.write_object(CLASSES, resource_class("k80"))
    world.api.write_object(QUOTAS, gpu_quota({"class": "k80", "shares": 1}, name="gpus", namespace="team"))
    world.run(5)
    before = len(world.api.requests)
    world.run(200)
    assert len(world.api.requests) == before == 3
    world.writer = StatusWriter(
        world.api.client(), world.state, world.seen, active=lambda: True, no_class=world._no_class, clock=world.clock
    )
    world.run(20)
    assert len(world.api.requests) == before, "a restart writes nothing that is there already"


def test_one_object_is_written_at_most_so_often_and_the_newest_wins(world):
    world.node("n1", card("GPU-A"))
    world.run(5)
    before = len(world.api.requests)
    for i in range(40):  # in ten seconds
        world.hold(f"p{i}", "n1", ("0", "GPU-A", 10, 0))
        world.run(0.25)
    assert len(world.api.requests) - before <= 6
    world.run(3)
    assert world.status(er_path("GPU-A"))["allocated"]["memoryMiB"] == 400


def test_the_rate_is_bounded_while_pods_come_and_higher_when_they_have_come(world):
    for i in range(50):
        world.node(f"n{i}", *[card(f"GPU-{i}-{j}", j) for j in range(8)])
    for step in range(40):  # ten seconds in which something always changes
        world.hold(f"p{step}", f"n{step}", ("0", f"GPU-{step}-0", 10, 0))
        world.run(0.25)
    assert 150 <= len(world.api.requests) <= 220
    world.run(5)
    assert all("freeMiB" in listed["status"] for listed in world.all())


def test_while_pods_come_by_the_hundred_few_statuses_are_written_and_all_of_them_afterwards(world):
    for i in range(50):
        world.node(f"n{i}", *[card(f"GPU-{i}-{j}", j) for j in range(8)])
    world.run(15)
    before = len(world.api.requests)
    for step in range(40):  # ten seconds with 60 pods a second, each on another card
        for i in range(15):
            at = step * 15 + i
            world.hold(f"p{at}", f"n{at % 50}", (str(at // 50 % 8), f"GPU-{at % 50}-{at // 50 % 8}", 10, 0))
        world.run(0.25)
    assert 30 <= len(world.api.requests) - before <= 50
    world.run(10)
    for i in range(50):
        for j in range(8):
            assert world.status(er_path(f"GPU-{i}-{j}"))["allocated"]["memoryMiB"] in (10, 20)


def test_where_pods_come_and_go_all_the_time_no_status_stays_behind(world):
    cards = [f"GPU-{i}" for i in range(300)]
    for i, uuid in enumerate(cards):
        world.node(f"n{i}", card(uuid))
    world.run(10)
    for number in range(420):  # 105 s, in which each node changes once in 15 s
        for i in range(number % 60 * 5, number % 60 * 5 + 5):
            world.state.ledger.release(f"p{i}")
            world.hold(f"p{i}", f"n{i}", ("0", cards[i], 1 + number, 0))
        world.run(0.25)
    assert world.writer.ledger_check.counts()["status"] == 0


def test_somebodys_edit_is_repaired(world):
    world.node("n1", card("GPU-A"))
    world.api.write_object(CLASSES, resource_class("k80"))
    world.run(5)
    stored = world.api.get(class_path("k80"))
    good = stored["status"]
    world.api.write_object(CLASSES, stored | {"status": good | {"devices": 7, "problem": "lies"}})
    stored = world.api.get(er_path("GPU-A"))
    world.api.write_object(CARDS, stored | {"status": stored["status"] | {"freeMiB": 1, "classes": ["z"]}})
    world.run(3)
    assert world.status(class_path("k80")) == good
    assert world.status(er_path("GPU-A")) == stored["status"]


def test_a_missed_change_is_found(world):
    world.node("n1", card("GPU-A"))
    world.run(5)
    world.state.ledger.set_holding(holding("p", "n1", ("0", "GPU-A", 4000, 0)))
    world.run(130)
    assert world.status(er_path("GPU-A"))["allocated"]["memoryMiB"] == 4000


def test_a_watch_that_is_far_behind_does_not_make_the_same_write_again_and_again(world):
    world.node("n1", card("GPU-A"))
    world.api.show()
    world.run(120, watch=False)
    assert 2 <= len(world.api.requests) <= 8


def test_when_the_api_server_is_away_all_wait_and_then_all_is_written():
    world = World(*[Fault(status=503)] * 3)
    world.node("n1", *[card(f"GPU-{i}", i) for i in range(20)])
    world.run(0.5)
    assert len(world.api.requests) <= 2, "one failure is enough to wait"
    world.run(20)
    assert all("freeMiB" in listed["status"] for listed in world.all())


def test_an_object_whose_status_is_refused_does_not_keep_the_others_back():
    world = World(Fault(status=422))
    world.node("n1", card("GPU-A"), card("GPU-B", 1))
    world.run(3)
    assert "freeMiB" in world.status(er_path("GPU-B"))
    world.run(70)
    assert "freeMiB" in world.status(er_path("GPU-A"))


def slow_node(world, name, cards=40):
    """A node whose cards are so large that no write to them has an answer in time."""
    node_cards = [card(f"GPU-{name}-{i}", i) for i in range(cards)]
    world.node(name, *node_cards)
    world.api.fault(Fault(seconds=60.0), path=f"{er_path(f'GPU-{name}-')}*", times=1_000_000)


def seconds_until(world, ready):
    began = world.clock.now()
    while not ready():
        assert world.clock.now() - began < 300.0
        world.run(0.25)
    return world.clock.now() - began


def test_a_node_whose_cards_take_long_to_write_delays_no_others(world):
    slow_node(world, "slow")
    world.run(10)
    for i in range(20):
        world.node(f"n{i}", card(f"GPU-n{i}"))
    world.api.write_object(CLASSES, resource_class("k80"))
    for i in range(20):
        world.api.write_object(QUOTAS, gpu_quota({"memoryMiB": 1000}, name=f"q{i}", namespace=f"team{i}"))

    def written():
        cards = all("freeMiB" in world.status(er_path(f"GPU-n{i}")) for i in range(20))
        used = all("used" in world.status(quota_path(f"q{i}", f"team{i}")) for i in range(20))
        return cards and used and world.status(class_path("k80")).get("devices") == 60

    assert seconds_until(world, written) <= 8.0, "two or three writes that have no answer"


def test_what_changes_later_is_written_soon_though_a_node_is_slow(world):
    slow_node(world, "slow")
    world.node("n", card("GPU-n"))
    world.run(10)
    for i in range(5):
        world.hold(f"p{i}", "n", ("0", "GPU-n", 100, 0))
        shown = 100 * (i + 1)
        waited = seconds_until(
            world, lambda shown=shown: world.status(er_path("GPU-n"))["allocated"]["memoryMiB"] == shown
        )
        assert waited <= 5.0


def test_nodes_that_are_all_slow_let_the_api_server_rest_and_still_delay_no_others(world):
    """Many nodes may be slow, or the API server may be unreachable: these cannot be distinguished."""
    for i in range(5):
        slow_node(world, f"slow{i}")
    began = world.clock.now()
    world.run(30)
    assert world.clock.now() - began >= 2.5 * len(world.api.requests), "it is let alone between writes of two seconds"
    world.node("n", card("GPU-n"))
    assert seconds_until(world, lambda: "freeMiB" in world.status(er_path("GPU-n"))) <= 10.0


def test_an_object_that_goes_while_it_is_written_is_forgotten(world):
    world.node("n1", card("GPU-A"))
    world.api.show()
    world.api.remove(er_path("GPU-A"))
    world.run(0.5, watch=False)
    world.run(20)
    assert len(world.api.requests) == 1


def test_no_class_status_is_written_before_all_nodes_are_counted(world):
    for i in range(1500):
        world.node(f"n{i}", card(f"GPU-{i}"))
    world.api.write_object(CLASSES, resource_class("k80"))
    world.run(3)
    (write,) = world.api.sent(path=class_path("k80") + "*")
    assert write.body["status"]["devices"] == 1500


def test_many_nodes_are_counted_without_the_lock(world):
    for i in range(400):
        world.node(f"n{i}", card(f"GPU-{i}"))
    before = world.state.views
    world.writer.step()
    assert world.state.views - before <= 1, "to list the nodes of the audit"


def test_objects_that_change_while_they_are_looked_at_do_no_harm(world):
    """The threads of watches change objects while the loop reads them."""
    stop = threading.Event()
    has_changed = threading.Event()

    def watch():
        i = 0
        while not stop.is_set():
            i += 1
            uuid = f"GPU-{i % 50}"
            if i % 3:
                world.api.write_object(CARDS, er_object(uuid, f"n{i % 7}"))
            else:
                world.api.remove(er_path(uuid))
            world.api.show()
            has_changed.set()

    thread = threading.Thread(target=watch)
    world.active = False  # the fake API itself is for one thread
    thread.start()
    try:
        for step in range(3000):
            if not step % 10:
                has_changed.clear()
                assert has_changed.wait(60), "the other thread writes all the while"
            world.writer.step()
            world.clock.advance(0.25)
    finally:
        stop.set()
        thread.join()
    world.active = True
    world.run(30)
    assert all("freeMiB" in listed["status"] for listed in world.all())
