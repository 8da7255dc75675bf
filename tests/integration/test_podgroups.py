"""PodGroups of Kubernetes on its own scheduler: members that ask for shares, and groups that may only go together."""

from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.kube import errors
from tests.build import P100
from tests.cluster import Cluster, versions
from tests.cluster.cards import TestCard
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Json, Space, prioritize, workload

SINCE = (1, 37)
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(480),
    pytest.mark.skipif(
        tuple(map(int, versions.minor().split("."))) < SINCE, reason="PodGroups are served as v1beta1 since 1.37"
    ),
]

API = "scheduling.k8s.io/v1beta1"
ONE_CARD = [TestCard(memory_mib=P100)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    for made in started(SpecOf(gates=["GenericWorkload"], apis=[API])):
        prioritize(made, {"low": 10, "high": 1000})
        yield made


def group(space: Space, name: str, minimum: int, **spec: Json | str) -> None:
    made = {"metadata": {"name": name}, "spec": {"schedulingPolicy": {"gang": {"minCount": minimum}}} | spec}
    space.cluster.api.create(f"/apis/{API}/namespaces/{space.name}/podgroups", made)


def condition(space: Space, name: str) -> str:
    """What kube-scheduler says of the group: whether it has been scheduled."""
    status = space.cluster.api.get(f"/apis/{API}/namespaces/{space.name}/podgroups/{name}").get("status") or {}
    return next((one["status"] for one in status.get("conditions") or () if one["type"].endswith("Scheduled")), "")


def member(name: str, of: str, **spec: str) -> Json:
    return workload(name, gpu_mem=P100, spec={"schedulingGroup": {"podGroupName": of}} | spec)


def single(name: str, priority: str) -> Json:
    return workload(name, gpu_mem=P100, spec={"priorityClassName": priority})


def test_a_group_gets_a_card_each_or_nothing(space: Space) -> None:
    space.nodes(2, ONE_CARD)
    group(space, "g", 3)
    for i in range(3):
        space.create(member(f"m{i}", "g"))
    space.wait(lambda: condition(space, "g") == "False", "one of three fits nowhere")
    assert not any(pod["spec"].get("nodeName") for pod in space.pods())
    space.nodes(1, ONE_CARD)
    assert len({space.placed(f"m{i}") for i in range(3)}) == 3
    space.running("m0", "m1", "m2")
    space.wait(lambda: condition(space, "g") == "True", "kube-scheduler says so")


def test_nobody_goes_of_a_group_that_would_break_and_others_do(space: Space) -> None:
    """On each node kube-scheduler names both pods of the group, and refuses an answer that does the same."""
    space.nodes(2, ONE_CARD)
    group(space, "g", 2, priorityClassName="low", disruptionMode={"all": {}})
    for i in range(2):
        space.create(member(f"m{i}", "g", priorityClassName="low"))
    grouped = {space.placed(f"m{i}") for i in range(2)}
    assert len(grouped) == 2
    space.nodes(1, ONE_CARD)
    alone = space.put(single("low", "low"))
    assert alone not in grouped
    assert space.put(single("high", "high")) == alone
    assert {space.placed(f"m{i}") for i in range(2)} == grouped
    space.gone("low")


def test_a_pod_in_a_gang_of_each_kind_is_refused(space: Space) -> None:
    both = member("both", "g")
    both["metadata"]["annotations"] = {names.GROUP_NAME: "g", names.GROUP_NUM: "1"}
    with pytest.raises(errors.KubeError, match="names a PodGroup of Kubernetes"):
        space.create(both)
