"""Reservations for nominated pods while another pod is placed."""

from types import MappingProxyType

import pytest

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.request import PodRequest
from cardwise.core.placement.ledger import Ledger
from cardwise.core.values.quantity import MiB, Percent
from extender.cache.cache import Cache
from extender.cache.nominated import NominatedPods
from extender.cache.nominations import NominatedPlace
from extender.cache.reservations import Timeouts
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef
from tests.fakes.clock import FakeClock


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [(["n1"], {"u1@n1"}), (["n2"], {"u2@n2"}), (["n1", "n2"], {"u1@n1", "u2@n2"}), (None, {"u1@n1", "u2@n2"})],
)
def test_only_reservations_on_the_offered_nodes_count(nodes, kept):
    cache = Cache(Ledger(), Timeouts(), FakeClock())
    for number in (1, 2):
        pod = WaitingPod(PodRef(f"u{number}", "d", f"p{number}"), PodRequest(containers=(), priority=5))
        share = CardShare(0, f"GPU-{number}", MiB(100), Percent(0), MiB(16000), whole=False)
        place = NominatedPlace(Assignment(MappingProxyType({"0": (share,)})))
        cache.reservations.nominations.set_own_place(pod, f"n{number}", place, 0.0)
    with NominatedPods(cache).count_reserved(("other",), 0, nodes):
        assert {holding.uid for holding in cache.ledger.holdings()} == kept
    assert not cache.ledger.holdings()
