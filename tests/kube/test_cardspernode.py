"""The limit of kept cards per node."""

import json
from dataclasses import dataclass

import pytest

from cardwise.kube import errors, paths
from cardwise.kube.cardspernode import CardsPerNodeLimiter
from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE
from cardwise.kube.watch.reflector import Reflector, WakeHandler
from cardwise.kube.watch.store import Store
from tests.fakes.apiserver import Fault


@dataclass(frozen=True)
class Card:
    node: str


class World:
    """A store that receives changes like a reflector's."""

    def __init__(self) -> None:
        self.store: Store[Card] = Store()
        self.limited = CardsPerNodeLimiter(self.project, WakeHandler())

    def project(self, content: bytes) -> tuple[str, Card]:
        key, _, node = content.decode().partition("@")
        return key, Card(node)

    def put_card(self, key: str, node: str) -> bool:
        """Add or change a card; returns whether it is kept."""
        diff = self.store.apply_event(key, self.limited.project(f"{key}@{node}".encode()))
        for gone, old in diff.deleted:
            self.limited.on_delete(gone, old)
        return self.store.get(key) is not None

    def remove(self, key: str) -> None:
        for gone, old in self.store.apply_event(key, None).deleted:
            self.limited.on_delete(gone, old)


def test_kept_cards_per_node_are_limited():
    world = World()
    assert [world.put_card(f"evil-{i}", "evil") for i in range(MAX_CARDS_PER_NODE + 9)] == [
        True
    ] * MAX_CARDS_PER_NODE + [False] * 9
    assert len(world.store) == MAX_CARDS_PER_NODE
    assert world.put_card("evil-0", "evil"), "a change of one that is kept"
    assert world.put_card("honest-0", "honest")
    world.remove("evil-0")
    assert world.put_card("evil-900", "evil")
    assert not world.put_card("honest-0", "evil"), "it has moved to a node that is full"
    assert world.put_card("evil-900", "honest")
    assert world.put_card("honest-0", "evil")


def test_failed_list_releases_its_places(clock, api):
    """Each object that was deleted before the next list used to occupy a place for ever, and cards of the node were
    ignored.
    """

    def project(content):
        head = json.loads(content)
        return head["metadata"]["name"], Card(head["spec"]["nodeName"])

    def put_card(name, node="n1"):
        api.write_object(paths.extendedresources(), {"metadata": {"name": name}, "spec": {"nodeName": node}})

    limited = CardsPerNodeLimiter(project, WakeHandler())
    reflector = Reflector(
        api.client(clock=clock),
        paths.extendedresources(),
        limited.project,
        limited,
        on_list_failed=limited.on_list_failed,
        list_limit=MAX_CARDS_PER_NODE,
        clock=clock,
    )
    put_card("a-moves")
    put_card("z-stays")
    reflector._relist()
    put_card("a-moves", "n2")
    for index in range(MAX_CARDS_PER_NODE):
        put_card(f"b-{index:03}")
    api.fault(Fault(), "list")  # the first page comes, the second one fails
    api.fault(Fault(status=500), "list")
    with pytest.raises(errors.ServerError):
        reflector._relist()
    assert limited._node_of == {"a-moves": "n1", "z-stays": "n1"}
    for index in range(MAX_CARDS_PER_NODE):
        api.remove(paths.extendedresources(f"b-{index:03}"))
    for index in range(MAX_CARDS_PER_NODE - 1):
        put_card(f"c-{index:03}")
    reflector._relist()
    assert reflector.store.snapshot().keys() == {
        manifest["metadata"]["name"] for manifest in api.all(paths.extendedresources())
    }
    assert limited._pending == {}
