"""`spread-by=KEY` with the real kube-scheduler: the pods of a Deployment are spread over the zones of the nodes."""

from collections import Counter

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import P100
from tests.integration.gangpods import create_at_once, member
from tests.integration.sharing import Space, deployment

ZONE = "topology.kubernetes.io/zone"
ZONES = "abc"
pytestmark = [pytest.mark.cluster("sim")]


def nodes_in_zones(space: Space, per_zone: int) -> dict[str, str]:
    """Nodes with two cards each. Returns their zones by node."""
    nodes = space.nodes(per_zone * len(ZONES))
    zones = {node: ZONES[i // per_zone] for i, node in enumerate(nodes)}
    for node, zone in zones.items():
        space.cluster.api.patch(paths.nodes(node), {"metadata": {"labels": {ZONE: zone}}})
    return zones


def pods_by_zone(space: Space, zones: dict[str, str]) -> Counter[str]:
    """How many pods that are not being deleted each zone has."""
    pods = [pod for pod in space.pods() if "deletionTimestamp" not in pod["metadata"]]
    return Counter(zones[pod["spec"]["nodeName"]] for pod in pods if pod["spec"].get("nodeName"))


def test_the_pods_of_a_deployment_are_spread_over_zones_also_as_it_grows_and_is_rolled_out(space: Space):
    zones = nodes_in_zones(space, per_zone=2)
    annotations = {names.POLICY: f"spread-by={ZONE}"}
    space.apply(deployment("web", 6, gpu_mem=P100 // 16, annotations=annotations))
    space.wait(lambda: pods_by_zone(space, zones) == Counter(a=2, b=2, c=2), "two pods in each zone")
    space.kubectl("scale", "deployment", "web", "--replicas=9")
    space.wait(lambda: pods_by_zone(space, zones) == Counter(a=3, b=3, c=3), "three pods in each zone")
    space.apply(deployment("web", 9, gpu_mem=P100 // 8, annotations=annotations))
    space.kubectl("rollout", "status", "deployment", "web", "--timeout=60s")
    space.wait(lambda: pods_by_zone(space, zones) == Counter(a=3, b=3, c=3), "the new pods are spread anew")


def test_the_members_of_a_gang_are_spread_over_zones(space: Space):
    zones = nodes_in_zones(space, per_zone=2)
    annotations = {names.POLICY: f"spread-by={ZONE}"}
    create_at_once(space, [member(f"g-{i}", "g", 6, gpu_mem=P100 // 16, annotations=annotations) for i in range(6)])
    space.wait(lambda: pods_by_zone(space, zones) == Counter(a=2, b=2, c=2), "two members in each zone")


def test_a_zone_without_capacity_is_left_out_and_no_pod_waits_for_it(space: Space):
    zones = nodes_in_zones(space, per_zone=1)
    blocked = [node for node, zone in zones.items() if zone == "c"]
    space.kubectl("cordon", *blocked)
    space.apply(deployment("web", 4, gpu_mem=P100, annotations={names.POLICY: f"spread-by={ZONE}"}))
    space.wait(lambda: pods_by_zone(space, zones) == Counter(a=2, b=2), "all four cards of the open zones are used")
