"""One node with MPS on all its cards, as the default installation has it, and four kinds of pods beside each other:
what the webhook makes of them, where they are placed, for which cards MPS runs, and how they start.
"""

from dataclasses import replace
from itertools import permutations

import msgspec
import pytest

from cardwise.core.api import mps, names, request
from cardwise.core.api.mps import MpsState
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ExtendedResource
from mps.host import pods
from tests import build
from tests.deviceplugin.conftest import RESOURCES, card_uuid
from tests.deviceplugin.mps.managednode import LIMIT_ENV, PIPE_ENV, World, start
from tests.mps import records
from tests.mps.agent.pods import Card
from tests.webhook.reviews import Known
from tests.webhook.sharing import admitted

CARDS = 4
KNOWN = Known(scopes=frozenset({"card"}))
PODS = {
    "plain": {"gpu_mem": 4000},
    "split": {"gpu_mem": 8000, "gpu_count": 2},
    "whole": {"gpu_count": 1},
    "opted-out": {"gpu_mem": 4000, "annotations": {names.ISOLATION: "none"}},
}


@pytest.fixture
def world(idle_rig):
    first = idle_rig.cards[0]
    for index in range(len(idle_rig.cards), CARDS):
        idle_rig.cards.append(first | {"index": index, "uuid": card_uuid(index)})
    idle_rig.write_cards()
    world = World(idle_rig)
    world.cards += [Card(world.root, card_uuid(i), idle_rig.mps_clock).runs().says() for i in range(2, CARDS)]
    idle_rig.start()
    ready = {"mode": "card", "state": "Ready", "multiUser": True, "maxClients": 48}
    for index in range(CARDS):
        status = idle_rig.status(index) | {"mps": ready}
        idle_rig.api.write_object(RESOURCES, idle_rig.card(index) | {"status": status})
    idle_rig.settle()
    yield world
    world.close()


@pytest.mark.parametrize("order", list(permutations(PODS)), ids="-".join)
def test_each_pod_starts_as_it_should_whichever_came_first(world, order):
    rig, ledger = world.rig, Ledger()
    resources = [msgspec.convert(rig.card(index), ExtendedResource) for index in range(CARDS)]
    ledger.set_cards("n1", [extendedresources.card_of(resource) for resource in resources])
    views, env = [], {}
    for name in order:
        stored, _ = admitted(build.pod(name, **PODS[name]), KNOWN)
        pod_request = request.parse(stored)
        placed = placement.place_on(ledger.kinds, ledger.node("n1"), pod_request, "binpack")
        assert isinstance(placed, Placement), placed
        ledger.set_holding(Holding(name, "default", name, "n1", placed.assignment, mps_client=pod_request.mps_client))
        views.append(
            replace(records.pod(name, placed.assignment.containers), without_mps=not pod_request.isolation.uses_mps)
        )
        for uuid, demand in pods.compute_demands(views, rig.gpus.cards()).items():
            state = MpsState.OFF if demand.without_mps else MpsState.READY
            next(card for card in world.cards if card.uuid == uuid).says(state=state)
        pod = rig.put_pod(
            name,
            placed.assignment,
            {"main": {names.GPU_MEM: "1", names.SHARE: "1"}},
            **{names.ISOLATION: str(pod_request.isolation)},
        )
        env[name] = rig.env(start(rig, pod, "main"))
    limits = {name: (variables.get(LIMIT_ENV), variables.get(PIPE_ENV)) for name, variables in env.items()}
    assert limits.pop("plain") == ("0=4000M", mps.CONTAINER_PIPE)
    assert limits == dict.fromkeys(("split", "whole", "opted-out"), (None, None))
    held = {holding.uid: holding.assignment.indices() for holding in ledger.holdings()}
    assert set(held["opted-out"]) < set(held["split"]), "they are together"
    assert len({*held["plain"], *held["split"], *held["whole"]}) == CARDS
    assert {resource.status.isolation.memory for resource in resources} == {"mps"}
