"""PodGroups of Kubernetes on its own scheduler: members that ask for shares, and groups that may only go together."""

from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.cards import TestCard
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, prioritize, workload
from tests.integration.since import since

pytestmark = [
    pytest.mark.cluster,
    since(37, "PodGroups as v1beta1"),
]

API = "scheduling.k8s.io/v1beta1"
ONE_CARD = [TestCard(memory_mib=P100)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    for cluster in started(SpecOf(gates=["GenericWorkload"], apis=[API])):
        prioritize(cluster, {"low": 10, "high": 1000})
        yield cluster


def groups(space: Space, name: str = "") -> str:
    path = f"/apis/{API}/namespaces/{space.name}/podgroups"
    return f"{path}/{name}" if name else path


def group(space: Space, name: str, minimum: int | None, **spec: Json | str) -> None:
    """None: its pods need not start together."""
    policy: Json = {"basic": {}} if minimum is None else {"gang": {"minCount": minimum}}
    space.cluster.api.create(groups(space), {"metadata": {"name": name}, "spec": {"schedulingPolicy": policy} | spec})


def condition(space: Space, name: str) -> str:
    """What kube-scheduler says of the group: whether it has been scheduled."""
    status = space.cluster.api.get(groups(space, name)).get("status") or {}
    return next(
        (
            condition["status"]
            for condition in status.get("conditions") or ()
            if condition["type"].endswith("Scheduled")
        ),
        "",
    )


def member(name: str, of: str, **spec: str | Json) -> Json:
    return workload(name, gpu_mem=P100, spec={"schedulingGroup": {"podGroupName": of}} | spec)


def ours(space: Space, name: str) -> Json:
    """Our PodGroup of the gang, or nothing."""
    try:
        return space.cluster.api.get(paths.podgroups(space.name, name))
    except errors.NotFound:
        return {}


def phase(space: Space, name: str) -> str:
    return str((ours(space, name).get("status") or {}).get("phase", ""))


def bound(space: Space) -> set[str]:
    return {pod["metadata"]["name"] for pod in space.pods() if pod["spec"].get("nodeName")}


def gates(space: Space, name: str) -> list[Json]:
    pod_gates: list[Json] = space.get(name)["spec"].get("schedulingGates") or []
    return pod_gates


def single(name: str, priority: str) -> Json:
    return workload(name, gpu_mem=P100, spec={"priorityClassName": priority})


def test_a_gang_gets_a_card_each_or_nothing(space: Space) -> None:
    space.nodes(2, ONE_CARD)
    group(space, "g", 3)
    for i in range(2):
        space.create(member(f"m{i}", "g"))
    space.wait(lambda: phase(space, "g") == "Pending", "two of three are there")
    assert [name["name"] for name in gates(space, "m0")] == [names.GANG]
    space.create(member("m2", "g"))
    space.wait(lambda: phase(space, "g") == "Waiting", "one of three fits nowhere")
    space.wait(lambda: condition(space, "g") == "False", "kube-scheduler has tried them")
    assert bound(space) == set()
    space.nodes(1, ONE_CARD)
    assert len({space.placed(f"m{i}") for i in range(3)}) == 3
    space.running("m0", "m1", "m2")
    space.wait(lambda: condition(space, "g") == "True", "kube-scheduler says so")
    space.wait(lambda: phase(space, "g") == "Running", "and the extender")


def test_one_member_that_fits_nowhere_leaves_all_without_a_node(space: Space) -> None:
    space.nodes(4, ONE_CARD)
    group(space, "g", 3)
    for i in range(3):
        space.create(member(f"m{i}", "g", **({"nodeSelector": {"zone": "none"}} if i == 2 else {})))
    space.wait(lambda: condition(space, "g") == "False", "kube-scheduler has tried them")
    space.wait(lambda: phase(space, "g") == "Reserved", "it fits but for what kube-scheduler alone knows")
    space.create_and_locate(single("later", "low"))
    assert bound(space) == {"later"}


def test_members_beyond_the_minimum_are_bound_where_there_is_room(space: Space) -> None:
    space.nodes(4, ONE_CARD)
    group(space, "g", 3)
    for i in range(5):
        space.create(member(f"m{i}", "g"))
    space.wait(lambda: len(bound(space)) == 4, "three, and one more that fits")
    space.wait(lambda: phase(space, "g") == "Running", "the gang runs")
    space.nodes(1, ONE_CARD)
    space.wait(lambda: len(bound(space)) == 5, "the fifth follows")


def test_a_group_evicts_nobody_and_goes_when_there_is_room(space: Space) -> None:
    """kube-scheduler tries the group again without the pods that it could evict, and we still count them there."""
    space.nodes(2, ONE_CARD)
    lower = {space.create_and_locate(single(f"low{i}", "low")) for i in range(2)}
    group(space, "g", 2, priorityClassName="high")
    for i in range(2):
        space.create(member(f"m{i}", "g", priorityClassName="high"))
    space.wait(lambda: condition(space, "g") == "False", "kube-scheduler has tried them")
    # That it evicts at all: a single pod that comes later takes the place of a lower one.
    space.nodes(1, ONE_CARD)
    alone = space.create_and_locate(single("low2", "low"))
    assert space.create_and_locate(single("high", "high")) in {alone, *lower}
    assert len([name for name in ("low0", "low1", "low2") if name in bound(space)]) == 2
    space.delete("low0", "low1", "low2", "high", grace=1)
    assert len({space.placed(f"m{i}") for i in range(2)}) == 2
    space.wait(lambda: phase(space, "g") == "Running", "the gang runs")


def test_pods_that_ask_for_nothing_count_and_are_bound_by_kube_scheduler(space: Space) -> None:
    space.nodes(2, ONE_CARD)
    group(space, "g", 3)
    space.create(workload("ps", spec={"schedulingGroup": {"podGroupName": "g"}}))
    space.create(member("m0", "g"))
    space.wait(lambda: phase(space, "g") == "Pending", "two of three are there")
    assert gates(space, "ps") == []
    assert gates(space, "m0")
    space.create(member("m1", "g"))
    space.running("ps", "m0", "m1")
    space.wait(lambda: phase(space, "g") == "Running", "the gang runs")


def test_a_group_may_come_after_its_pods_and_be_made_again(space: Space) -> None:
    space.nodes(2, ONE_CARD)

    def no_podgroup_left() -> bool:
        return not space.cluster.api.get(groups(space))["items"]

    for i in range(2):
        space.create(member(f"m{i}", "g"))
    group(space, "g", 3)
    space.wait(lambda: phase(space, "g") == "Pending", "two of three are there")
    space.cluster.api.delete(groups(space, "g"))  # its finalizer keeps it for its pods
    space.delete("m0", "m1")
    space.wait(no_podgroup_left, "the group is gone with its pods")
    space.wait(lambda: not ours(space, "g"), "nothing is left of it")
    group(space, "g", 2)
    for i in range(2):
        space.create(member(f"m{i}", "g"))
    space.running("m0", "m1")
    space.wait(lambda: phase(space, "g") == "Running", "the gang runs")


def test_a_group_without_a_minimum_is_no_gang(space: Space) -> None:
    space.nodes(2, ONE_CARD)
    group(space, "g", None)
    for i in range(3):
        space.create(member(f"m{i}", "g"))
    space.wait(lambda: len(bound(space)) == 2, "two have a card each")
    (third,) = {"m0", "m1", "m2"} - bound(space)
    space.wait(lambda: not gates(space, third), "nothing keeps the third but the cards")
    assert ours(space, "g") == {}
    space.delete(min(bound(space)), grace=1)
    space.running(third)


def test_nobody_goes_of_a_group_that_would_break_and_others_do(space: Space) -> None:
    """On each node kube-scheduler names both pods of the group, and refuses an answer that does the same."""
    space.nodes(2, ONE_CARD)
    group(space, "g", 2, priorityClassName="low", disruptionMode={"all": {}})
    for i in range(2):
        space.create(member(f"m{i}", "g", priorityClassName="low"))
    grouped = {space.placed(f"m{i}") for i in range(2)}
    assert len(grouped) == 2
    space.nodes(1, ONE_CARD)
    alone = space.create_and_locate(single("low", "low"))
    assert alone not in grouped
    assert space.create_and_locate(single("high", "high")) == alone
    assert {space.placed(f"m{i}") for i in range(2)} == grouped
    space.wait_for_deletion("low")
