"""Where a plan looks first in a large cluster."""

import pytest

from cardwise.core.api import request
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangplan import Planned, Terms
from cardwise.core.gangs.gangs import Member
from tests.build import P100, container, pod
from tests.core.placement.test_placement_limits import ledger_with_free

NODES = {"n1": [P100 // 2, 0], "n2": [P100, P100]}


class Nodes:
    def left(self, node):
        return Load(64_000, 1 << 40, 100) if node in NODES else None

    def names(self):
        return list(NODES)


@pytest.mark.parametrize(("of_pod", "others", "chosen"), [("spread", "binpack", "n2"), ("binpack", "spread", "n1")])
def test_of_thousands_of_nodes_those_are_looked_at_that_the_pods_own_policy_likes(monkeypatch, of_pod, others, chosen):
    monkeypatch.setattr(gangplan, "_MOST_SCORED", 1)
    monkeypatch.setattr(gangplan, "_CHEAPER", 1000)  # not by the index of all cards
    asked = request.parse(pod(annotations={"cardwise.dev/policy": of_pod}, containers=[container("a", gpu_mem=1000)]))
    terms = Terms(namespace="default", policy=others, vacant=lambda _request, _load: {"n1": 8, "n2": 32})
    members = [Member(uid="u", name="p", request=asked, load=Load(1, 1, 1))]
    found = gangplan.plan(ledger_with_free(**NODES), Nodes(), members, terms)
    assert isinstance(found, Planned)
    assert found.nodes == {"u": chosen}
