"""Sizes of cards, while cards change."""

from cardwise.core.values.quantity import MiB
from webhook.cluster.cards import CardFacts, CardSums


def test_a_sum_of_cards_that_changed_meanwhile_is_not_remembered():
    sums = CardSums(MiB(0))
    cards = {"gone": CardFacts("n1", MiB(80_000), {}), "stays": CardFacts("n1", MiB(16_000), {})}

    def change() -> dict[str, CardFacts]:
        before = dict(cards)
        del cards["gone"]
        sums.forget()
        return before

    assert sums.of(None, change).largest == 80_000
    assert sums.of(None, lambda: cards).largest == 16_000
