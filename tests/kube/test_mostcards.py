"""The memory that the cards of one node take is limited."""

from dataclasses import dataclass

from cardwise.kube.mostcards import MostCards
from cardwise.kube.survey import MOST_CARDS
from cardwise.kube.watch.reflector import Woken
from cardwise.kube.watch.store import Store


@dataclass(frozen=True)
class Card:
    node: str


class World:
    """A store that is fed as a reflector's."""

    def __init__(self) -> None:
        self.store: Store[Card] = Store()
        self.limited = MostCards(self.project, Woken())

    def project(self, content: bytes) -> tuple[str, Card]:
        key, _, node = content.decode().partition("@")
        return key, Card(node)

    def put(self, key: str, node: str) -> bool:
        """Whether it is kept."""
        diff = self.store.apply(key, self.limited.project(f"{key}@{node}".encode()))
        for gone, old in diff.deleted:
            self.limited.on_delete(gone, old)
        return self.store.get(key) is not None

    def remove(self, key: str) -> None:
        for gone, old in self.store.apply(key, None).deleted:
            self.limited.on_delete(gone, old)


def test_no_more_cards_of_a_node_are_kept_than_count():
    world = World()
    assert [world.put(f"evil-{i}", "evil") for i in range(MOST_CARDS + 9)] == [True] * MOST_CARDS + [False] * 9
    assert len(world.store) == MOST_CARDS
    assert world.put("evil-0", "evil"), "a change of one that is kept"
    assert world.put("honest-0", "honest")
    world.remove("evil-0")
    assert world.put("evil-900", "evil")
    assert not world.put("honest-0", "evil"), "it has moved to a node that is full"
    assert world.put("evil-900", "honest")
    assert world.put("honest-0", "evil")
