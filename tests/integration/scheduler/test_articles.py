"""The figures of Alibaba's articles and the shapes of requests, on the real scheduler.

What a container sees of its share: node/test_articles_inside.py.
"""

import pytest

from cardwise.core.api import names
from tests.build import P100
from tests.integration.sharing import Space, assigned, workload

pytestmark = [pytest.mark.cluster("sim")]


@pytest.fixture
def node(space: Space) -> str:
    """Of two cards."""
    (only_node,) = space.nodes()
    return only_node


def fill(space: Space, node: str, *used: int) -> None:
    """Take this much of each card. Spread takes the emptiest card, so card after card while each is less than full."""
    for card, mem in enumerate(used):
        pod = workload(f"fill-{node}-{card}", gpu_mem=mem, node=node, annotations={names.POLICY: "spread"})
        assert space.create_and_locate(pod) == (node, str(card))


def test_a_pod_goes_where_one_card_fits_not_where_the_sum_does(space):
    first, second, third = space.nodes(3)
    fill(space, first, 12207, P100)
    fill(space, second, 12207, 12207)
    fill(space, third, 8138, P100)
    assert space.create_and_locate(workload("wants-8138", gpu_mem=8138)) == (third, "0")


def test_a_full_card_keeps_a_pod_waiting_until_there_is_room(space, node):
    fill(space, node, P100 - 800, P100 - 800)
    space.create(workload("late", gpu_mem=1024))
    space.refused("late", "Insufficient GPU Memory in one device")
    space.delete(f"fill-{node}-1")
    assert space.placed("late") == (node, "1")


def test_a_share_is_split_over_two_cards(space, node):
    assert space.create_and_locate(workload("split", gpu_mem="8Gi", gpu_count=2)) == (node, "0,1")
    pod = space.get("split")
    assert [(share.index, share.mem) for share in assigned(pod).shares()] == [(0, 4096), (1, 4096)]
    assert pod["metadata"]["annotations"][names.POD_MEM] == "8192"
