"""What a node says of types: capacities of classes and the label `accelerator`."""

import random

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import names
from deviceplugin.publish.node import LAST_LABEL_ANNOTATION
from tests.deviceplugin.conftest import (
    CLASSES,
    NODE,
    NODES,
    P100,
    PODS,
    RESOURCES,
    Rig,
    card_uuid,
    health,
    offers,
)

K80_SPEC = {"selector": {"matchLabels": {"model": "Tesla K80"}}}
P100_SPEC = {"selector": {"matchLabels": {"model": "Tesla-P100"}}}
K80, PASCAL, TIER = "cardwise.dev/nvidia.tesla.k80", "cardwise.dev/p100", "cardwise.dev/gold"


def ask_for(rig: Rig, name: str, extended_resource: str, amount: int) -> dict:
    """A pod of this node that asks for a class besides its share."""
    with rig.api.changed:
        pod = rig.bind(name, [(0, 100)])
        pod["spec"]["containers"][0]["resources"]["limits"][extended_resource] = str(amount)
        return rig.api.write_object(PODS, pod)


def label_card(rig: Rig, index: int, **labels: str | None) -> None:
    """As `kubectl label extendedresource`; None takes one away."""
    with rig.api.changed:
        card = rig.card(index)
        card["metadata"]["labels"] = {k: v for k, v in (card["metadata"]["labels"] | labels).items() if v is not None}
        rig.api.write_object(RESOURCES, card)


def label(rig: Rig) -> str | None:
    return rig.node()["metadata"].get("labels", {}).get(names.ACCELERATOR)


class TestCapacitiesOfClasses:
    def test_it_follows_classes_that_change_and_go(self, rig):
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        rig.make_class("p100", {"selector": {"matchLabels": {"uuid": card_uuid(0)}}})
        offers(rig, PASCAL, "128")
        rig.make_class("p100", K80_SPEC)
        offers(rig, PASCAL, None)
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        rig.api.remove(f"{CLASSES}/p100")
        offers(rig, PASCAL, None)
        offers(rig, names.GPU_MEM, str(2 * P100))

    def test_it_follows_cards_that_come_and_go(self, rig):
        rig.make_class("p100", P100_SPEC)
        rig.make_class("nvidia.tesla.k80", K80_SPEC)
        offers(rig, PASCAL, "256")
        rig.cards[1]["model"] = "Tesla K80"
        rig.write_cards()
        offers(rig, PASCAL, "128")
        offers(rig, K80, "128")
        del rig.cards[1]
        rig.write_cards()
        offers(rig, K80, None)

    def test_labels_that_a_person_puts_on_a_card_count(self, rig):
        rig.make_class("gold", {"selector": {"matchLabels": {"tier": "gold"}}})
        rig.make_class("tagged", {"selector": {"matchExpressions": [{"key": names.NODE_LABEL, "operator": "Exists"}]}})
        label_card(rig, 1, tier="gold")
        offers(rig, TIER, "128")
        assert rig.capacity("cardwise.dev/tagged") is None, "our own label is no person's"
        label_card(rig, 0, Tier="gold", model="mine")
        offers(rig, TIER, "256")
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        label_card(rig, 0, Tier=None)
        label_card(rig, 1, tier="silver")
        offers(rig, TIER, None)

    def test_never_below_what_living_pods_ask_for(self, rig):
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        pods = [ask_for(rig, f"p{number}", PASCAL, amount) for number, amount in enumerate((250, 50))]
        offers(rig, PASCAL, "300")
        rig.api.remove(f"{CLASSES}/p100")
        rig.force_delete(pods[0])
        offers(rig, PASCAL, "50")
        rig.api.write_object(PODS, pods[1] | {"status": {"phase": "Succeeded"}})
        offers(rig, PASCAL, None)

    def test_only_what_is_a_class_of_ours_is_taken_away(self, rig):
        foreign = {"example.com/p100": "3", "aliyun.com/other": "1", names.SHARE: "32", "cardwise.dev": "1"}
        find_stale_specs = foreign | {"cardwise.dev/stale": "48"}
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        rig.edit_node(status={"capacity": find_stale_specs, "allocatable": find_stale_specs})
        offers(rig, "cardwise.dev/stale", None)
        assert {name: rig.capacity(name) for name in foreign} == foreign

    def test_a_kubelet_that_registers_anew_zeroes_them_for_a_moment_only(self, rig):
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        rig.edit_node(status={"capacity": {PASCAL: "0"}, "allocatable": {PASCAL: "0"}})
        offers(rig, PASCAL, "256")

    def test_a_class_that_cannot_be_read_is_left_out_and_told_once(self, rig):
        with capture_logs() as logs:
            rig.make_class("broken", {"selector": {}})
            rig.make_class("p100", P100_SPEC)
            offers(rig, PASCAL, "256")
            rig.make_class("broken", {"selector": {}, "priority": 0})  # another version of the same
            rig.make_class("gold", P100_SPEC)
            offers(rig, TIER, "256")
        assert rig.capacity("cardwise.dev/broken") is None
        (events,) = [line for line in logs if line["event"] == "ignored an invalid ResourceClass"]
        assert events["name"] == "broken"
        assert "spec.selector: an empty selector would select every GPU" in events["problem"]
        rig.make_class("broken", P100_SPEC)
        offers(rig, "cardwise.dev/broken", "256")

    def test_a_restart_of_the_agent_never_takes_a_capacity_away(self, rig):
        rig.make_class("p100", P100_SPEC)
        offers(rig, PASCAL, "256")
        before = len(rig.writes())
        rig.stop()
        rig.start()
        assert rig.problems() == []
        gone = [
            request.body
            for request in rig.writes()[before:]
            if None in (request.body or {}).get("status", {}).get("capacity", {}).values()
        ]
        assert gone == []
        assert rig.capacity(PASCAL) == "256"

    def test_without_the_crd_all_else_goes_on_until_it_is_there(self, idle_rig):
        rig = idle_rig
        rig.api.missing.add(CLASSES)
        amounts = {TIER: "0", PASCAL: "48"}
        rig.edit_node(status={"capacity": amounts, "allocatable": amounts})
        ask_for(rig, "a", TIER, 2)
        with capture_logs() as logs:
            rig.start()
            assert health(rig) == ["Healthy", "Healthy"]
            assert rig.problems() == []
            offers(rig, names.GPU_MEM, str(2 * P100))
            offers(rig, TIER, "2")
            assert rig.capacity(PASCAL) == "48", "nobody knows whether there is such a class"
            rig.settle()
        events = [line["event"] for line in logs if "cannot list ResourceClasses" in line["event"]]
        assert len(events) == 1
        assert "check that the CRD is installed" in events[0]
        rig.make_class("p100", P100_SPEC)
        rig.api.missing.clear()
        offers(rig, PASCAL, "256")

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_the_order_it_ends_true(self, rig, seed):
        """Classes, labels, models and pods change together; in the end the node says what they add up to."""
        dice = random.Random(seed)
        models = ["Tesla-P100", "Tesla K80"]
        seconds = 0
        classes = {}
        for step in range(25):
            match dice.choice(["class", "drop", "model", "pod"]):
                case "class":
                    name = dice.choice(["a", "b"])
                    classes[name] = dice.choice(models)
                    rig.make_class(name, {"selector": {"matchLabels": {"model": classes[name]}}})
                case "drop" if classes:
                    name = dice.choice(sorted(classes))
                    del classes[name]
                    rig.api.remove(f"{CLASSES}/{name}")
                case "model":
                    dice.choice(rig.cards)["model"] = dice.choice(models)
                    rig.write_cards()
                case "pod":
                    seconds += 30
                    ask_for(rig, f"p{step}", "cardwise.dev/a", 30)
            for _ in range(dice.choice([0, 0, 1, 4])):
                rig.pass_second()
        cards = {name: sum(card["model"] == model for card in rig.cards) for name, model in classes.items()}
        wanted = {name: 128 * count for name, count in cards.items()}
        wanted["a"] = max(wanted.get("a", 0), seconds)
        for name in ("a", "b"):
            offers(rig, f"cardwise.dev/{name}", str(wanted[name]) if wanted.get(name) else None)


class TestAccelerator:
    def test_a_node_of_one_model_is_labelled_as_the_old_selectors_want_it(self, rig):
        assert label(rig) == "nvidia-tesla-p100"
        assert rig.node()["metadata"]["annotations"][LAST_LABEL_ANNOTATION] == "nvidia-tesla-p100"

    def test_the_label_follows_the_cards(self, rig):
        rig.cards[1]["model"] = "Tesla K80"
        rig.write_cards()
        rig.settle()
        assert label(rig) is None
        assert LAST_LABEL_ANNOTATION not in rig.node()["metadata"].get("annotations", {})
        rig.cards[0]["model"] = "Tesla K80"
        rig.write_cards()
        rig.settle()
        assert label(rig) == "nvidia-tesla-k80"

    def test_a_label_set_between_our_look_and_our_write_is_not_overwritten(self, idle_rig):
        rig = idle_rig

        def first(_):
            rig.edit_node(metadata={"labels": {names.ACCELERATOR: "theirs"}})

        rig.api.before_request(first, "patch", f"{NODES}/{NODE}")
        rig.start()
        assert label(rig) == "theirs"
