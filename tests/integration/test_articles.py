"""The figures of Alibaba's articles and the shapes of requests, on the real scheduler.

What a container sees of its share: test_articles_inside.py.
"""

import pytest

from cardwise.core.api import names
from tests.build import P100
from tests.cluster.cards import TestCard
from tests.integration.sharing import Space, assigned, deployment, where, workload

pytestmark = [pytest.mark.cluster("sim"), pytest.mark.timeout(180)]

SMALL, LARGE = TestCard(memory_mib=8138), TestCard(memory_mib=P100)


@pytest.fixture
def node(space: Space) -> str:
    """Of two cards."""
    (made,) = space.nodes()
    return made


def fill(space: Space, node: str, *used: int) -> None:
    """Take this much of each card. Spread takes the emptiest card, so card after card while each is less than full."""
    for card, mem in enumerate(used):
        pod = workload(f"fill-{node}-{card}", gpu_mem=mem, node=node, annotations={names.POLICY: "spread"})
        assert space.put(pod) == (node, str(card))


def test_a_pod_goes_where_one_card_fits_not_where_the_sum_does(space):
    first, second, third = space.nodes(3)
    fill(space, first, 12207, P100)
    fill(space, second, 12207, 12207)
    fill(space, third, 8138, P100)
    assert space.put(workload("wants-8138", gpu_mem=8138)) == (third, "0")


def test_three_replicas_land_on_one_card(space):
    space.nodes(2)
    space.apply(deployment("binpack-1", 3, gpu_mem=1024))
    space.wait(lambda: sum(where(pod)[0] != "" for pod in space.pods()) == 3, "all are placed")
    assert len({where(pod) for pod in space.pods()}) == 1


def test_a_pod_above_the_largest_card_is_refused_with_the_remedy(space, node):
    said = space.rejected(workload("too-large", gpu_mem=P100 + 1))
    assert "16277 MiB is more than the largest card has (16276); ask for at most" in said
    assert space.pods() == []


def test_a_pod_above_every_card_of_its_node_waits_and_is_told_why(space):
    (small, _) = (*space.nodes(1, [SMALL, SMALL]), *space.nodes(1, [LARGE]))
    space.create(workload("large", gpu_mem=10_000, node=small))
    space.refused("large", "The GPU memory asked for is more than any card of the node has")
    assert where(space.get("large")) == ("", "")


def test_a_full_card_keeps_a_pod_waiting_until_there_is_room(space, node):
    fill(space, node, P100 - 800, P100 - 800)
    space.create(workload("late", gpu_mem=1024))
    space.refused("late", "Insufficient GPU Memory in one device")
    space.delete(f"fill-{node}-1")
    assert space.placed("late") == (node, "1")


def test_a_whole_card_is_an_empty_one_and_stays_alone(space, node):
    fill(space, node, 1024)
    assert space.put(workload("whole", gpu_count=1)) == (node, "1")
    share = assigned(space.get("whole")).shares()[0]
    assert (share.mem, share.total) == (P100, P100)
    space.create(workload("second", gpu_count=1))
    space.refused("second", "Insufficient empty GPU cards")
    space.delete("second")
    # Room for one more share there is beside the first pod only.
    assert space.put(workload("share", gpu_mem=1)) == (node, "0")


def test_a_share_is_split_over_two_cards(space, node):
    assert space.put(workload("split", gpu_mem="8Gi", gpu_count=2)) == (node, "0,1")
    pod = space.get("split")
    assert [(share.index, share.mem) for share in assigned(pod).shares()] == [(0, 4096), (1, 4096)]
    assert pod["metadata"]["annotations"][names.POD_MEM] == "8192"
