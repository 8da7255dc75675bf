"""How full cards are by the node's own word, and that a scrape tells it."""

import pytest
from prometheus_client import REGISTRY

from cardwise.core.api import assignment
from cardwise.core.api.assignment import Assignment
from cardwise.gpus.protocol import GpuCard, Health
from deviceplugin.grants.grants import Grant
from deviceplugin.publish import cardloads
from deviceplugin.publish.cardloads import CardLoad
from deviceplugin.sources.pods import NodePod
from tests.build import P100, shares
from tests.deviceplugin import records

CARDS = [GpuCard(index=i, uuid=f"GPU-n1-{i}", model="Tesla P100", memory=P100, devices=()) for i in (0, 1)]


def parse_pod(uid: str, mem: int, *indices: int, phase: str = "Running", **annotations: str) -> NodePod:
    samples = assignment.encode(Assignment({"0": shares(mem, *indices, core=20)}), assume_time_ns=1)
    return records.pod_view(uid=uid, phase=phase, annotations=samples | annotations)


def grant(uid: str, mem: int, index: int) -> Grant:
    return records.grant(uid, shares(mem, index)[0])


def card_loads(pods: list[NodePod], grants: list[Grant], health: dict[str, Health] | None = None) -> list[CardLoad]:
    return cardloads.card_loads(CARDS, health or {}, pods, grants)


def test_pods_on_the_node_use_their_cards_before_they_have_started():
    first, second = card_loads([parse_pod("a", 1000, 0), parse_pod("b", 500, 0, 1)], [grant("a", 1000, 0)])
    assert (first.used, first.free, first.shares, first.core, first.granted) == (1500, P100 - 1500, 2, 40, 1000)
    assert (second.used, second.shares, second.granted) == (500, 1, 0)


def test_a_pod_that_ended_counts_until_its_grant_goes():
    ended = parse_pod("a", 1000, 0, phase="Succeeded")
    assert card_loads([ended], [grant("a", 1000, 0)])[0].used == 1000
    assert card_loads([], [grant("a", 1000, 0)])[0].used == 1000
    assert card_loads([ended], [])[0].used == 0


def test_the_card_of_a_former_binding_counts_until_its_grant_goes():
    first, second = card_loads([parse_pod("a", 1000, 1)], [grant("a", 1000, 0)])
    assert (first.used, first.granted, first.shares) == (1000, 1000, 1)
    assert (second.used, second.granted, second.shares) == (1000, 0, 1)


@pytest.mark.parametrize(("now", "granted"), [(1000, 3000), (3000, 1000), (1000, 1000)])
def test_of_a_card_that_a_pod_has_in_both_bindings_the_larger_amount_counts(now, granted):
    first, second = card_loads([parse_pod("a", now, 0)], [grant("a", granted, 0)])
    assert (first.used, first.granted) == (max(now, granted), granted)
    assert second.used == 0


def test_sick_cards_and_unreadable_pods():
    broken = records.pod_view(uid="x", annotations={"cardwise.dev/assignment": "{"})
    first, second = card_loads([broken], [], {CARDS[1].uuid: Health(healthy=False, reason="Xid 79")})
    assert (first.healthy, first.used) == (True, 0)
    assert not second.healthy


def test_a_card_that_is_over_full_has_nothing_free():
    assert card_loads([parse_pod("a", P100, 0), parse_pod("b", 1, 0)], [])[0].free == 0


def test_a_scrape_tells_each_card(rig):
    pod = rig.bind("a", [(1, 4096)])
    rig.run(pod)

    def sample(name: str, index: int) -> float | None:
        samples = [
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == name and sample.labels.get("index") == str(index)
        ]
        return samples[0] if samples else None

    rig.settle()
    assert sample("cardwise_gpu_granted_bytes", 1) == 4096 * 1024**2
    assert sample("cardwise_gpu_used_bytes", 1) == 4096 * 1024**2
    assert sample("cardwise_gpu_used_bytes", 0) == 0
    memory = sample("cardwise_gpu_memory_bytes", 1)
    assert memory
    assert sample("cardwise_gpu_free_bytes", 1) == memory - 4096 * 1024**2
    assert sample("cardwise_gpu_shares", 1) == 1
    assert sample("cardwise_gpu_healthy", 1) == 1
    assert sample("cardwise_gpu_isolation", 1) == 1
