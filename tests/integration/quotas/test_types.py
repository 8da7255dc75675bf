"""Asking for a type of card on the real API server, scheduler and kubelet: the articles' YAML and what follows from it.

One real node with a K80 and a P100, and simulated nodes of their own for each test that only looks at placement.
"""

from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.kube import errors, paths
from tests.cluster import Cluster, CommandFailed
from tests.cluster.cards import TestCard
from tests.integration.sharing import (
    Json,
    Space,
    assigned,
    cards_of,
    device_numbers,
    node_and_card,
    probe,
    probed,
    wait_for_classes,
    workload,
)

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node, pytest.mark.in_order]

K80, P100 = 11441, 16276  # MiB
SMALL_K80 = 5632
K80_CLASS, P100_CLASS = "nvidia.tesla.k80", "nvidia.tesla.p100"
MODELS = {model: [TestCard(model=f"Tesla {model}", memory_mib=mib)] for model, mib in (("K80", K80), ("P100", P100))}
K80_OBJECT = {"selector": {"matchLabels": {"model": "Tesla K80"}}}
HIGH_MEM = {"selector": [{"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["12GiB"]}]}]}


@pytest.fixture(autouse=True, scope="module")
def sims(cluster: Cluster) -> Iterator[list[str]]:
    """Three simulated nodes with cards of several types; and n1 has one of each. A class by hand is there, and the
    nodes say so.
    """
    small = TestCard(model="Tesla K80", memory_mib=SMALL_K80)
    with cards_of(cluster, n1=[*MODELS["K80"], *MODELS["P100"]]), Space(cluster, "types-nodes") as space:
        space.nodes(1, [*MODELS["P100"], *MODELS["K80"], small])
        space.nodes(1, MODELS["K80"] * 2)
        space.nodes(1, [TestCard(model="Tesla V100", memory_mib=32510)])
        make_class(cluster, "high-mem", HIGH_MEM)
        wait_for_classes(space, K80_CLASS, P100_CLASS, "high-mem")
        for node, resource_class in (
            ("n1", K80_CLASS), ("n1", P100_CLASS), ("n1", "high-mem"), (space.own_nodes[1], K80_CLASS)
        ):  # fmt: skip
            cluster.wait(
                lambda n=node, c=resource_class: capacity(cluster, n, c) > 0, f"{node} offers {resource_class}"
            )
        yield space.own_nodes
        cluster.kubectl_object("delete", "resourceclass", "high-mem")


def make_class(cluster: Cluster, name: str, spec: Json) -> None:
    cluster.apply(
        [{"apiVersion": names.API_VERSION, "kind": "ResourceClass", "metadata": {"name": name}, "spec": spec}]
    )


def capacity(cluster: Cluster, node: str, resource_class: str) -> int:
    status = cluster.api.get(paths.nodes(node))["status"]
    amounts = {status[kind].get(names.CLASS_PREFIX + resource_class, "0") for kind in ("capacity", "allocatable")}
    return int(amounts.pop()) if len(amounts) == 1 else 0


def typed(name: str, limits: Json, **settings: object) -> Json:
    """A pod whose container has exactly these limits."""
    pod = workload(name, **settings)  # type: ignore[arg-type]
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    return pod


def template_of(kind: str, name: str, limits: Json) -> Json:
    """A workload of this kind with a container that has exactly these limits."""
    pod = typed(name, limits, spec={"terminationGracePeriodSeconds": 0})
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod["spec"]}
    group = "batch/v1" if "Job" in kind else "v1" if kind in ("PodTemplate", "ReplicationController") else "apps/v1"
    manifest: Json = {"apiVersion": group, "kind": kind, "metadata": {"name": name}}
    if kind in ("Job", "CronJob"):
        template["spec"]["restartPolicy"] = "Never"
    match kind:
        case "PodTemplate":
            manifest["template"] = template
        case "Job":
            manifest["spec"] = {"template": template}
        case "CronJob":
            manifest["spec"] = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": template}}}
        case "ReplicationController":
            manifest["spec"] = {"replicas": 1, "selector": labels, "template": template}
        case _:
            manifest["spec"] = {"selector": {"matchLabels": labels}, "template": template}
    if kind == "StatefulSet":
        manifest["spec"]["serviceName"] = name
    return manifest


def limits_of(space: Space, kind: str, name: str) -> Json:
    """Of the only container of the workload's template."""
    stored = space.kubectl_json("get", kind, name)
    inner = stored.get("spec", {})
    template = (
        stored["template"] if kind == "PodTemplate" else inner.get("jobTemplate", {}).get("spec", inner)["template"]
    )
    limits: Json = template["spec"]["containers"][0]["resources"]["limits"]
    return limits


def test_the_bare_name_opens_a_card_of_that_type(space):
    numbers = device_numbers(space.cluster, "n1")
    for name, limits, index in (
        ("k80", {K80_CLASS: 1}, "0"),
        ("p100", {f"cardwise.dev/{P100_CLASS}": 1}, "1"),
    ):
        space.create(typed(name, limits, node="n1", command=probe(numbers), spec={"restartPolicy": "Never"}))
        space.wait(lambda n=name: space.phase(n) == "Succeeded", f"{name} has run")
        assert node_and_card(space.get(name)) == ("n1", index)
        assert space.termination_message(name) == probed(numbers, index)
        space.kubectl_json("delete", "pod", name)


def test_a_share_of_a_type_is_placed_card_by_card(space, sims):
    """The first node has all three; binpack alone would take the smallest card."""
    places = {
        "p100": ({P100_CLASS: 1, names.GPU_MEM: 4000}, "0"),
        "k80": ({K80_CLASS: 1, names.GPU_MEM: 8000}, "1"),
        "high-mem": ({"cardwise.dev/high-mem": 1, names.GPU_MEM: 1000}, "0"),
        "any": ({names.GPU_MEM: 3500}, "2"),
    }
    for name, (limits, index) in places.items():
        assert space.create_and_locate(typed(name, limits, node=sims[0])) == (sims[0], index)


def test_a_class_with_a_share_stands_for_that_much(space, sims):
    make_class(space.cluster, "k80-half", K80_OBJECT | {"share": {"memoryMiB": "5Gi"}})
    space.cluster.wait(lambda: capacity(space.cluster, sims[1], "k80-half") > 0, "the second node offers k80-half")
    assert space.create_and_locate(typed("one", {"cardwise.dev/k80-half": 1}, node=sims[1])) == (sims[1], "0")
    assert space.create_and_locate(typed("two", {"cardwise.dev/k80-half": 2}, node=sims[1])) == (sims[1], "1")
    assert [assigned(space.get(name)).mem for name in ("one", "two")] == [5120, 10240]
    space.kubectl_json("delete", "resourceclass", "k80-half")


@pytest.mark.parametrize(
    "kind",
    ["Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job", "CronJob", "PodTemplate", "ReplicationController"],
)
def test_every_template_takes_the_bare_name(space, sims, kind):
    name = f"t-{kind.lower()}"
    space.kubectl_json("create", stdin=template_of(kind, name, {K80_CLASS: 1}))
    assert limits_of(space, kind, name) == {names.CLASS_PREFIX + K80_CLASS: "1"}
    if kind not in ("CronJob", "PodTemplate"):
        space.wait(
            lambda: any(
                (p["metadata"].get("labels") or {}).get("app") == name and node_and_card(p)[0] in ("n1", *sims[:2])
                for p in space.pods()
            ),
            f"a pod of {name} was placed",
        )
    space.kubectl_json("delete", kind, name, "--cascade=foreground", "--wait=false")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"selector": {"matchExpressions": [{"key": "memory", "operator": "Near", "values": ["1"]}]}}, "operator"),
        ({"selector": {"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["tall"]}]}}, "values"),
        ({"selector": {}}, "selector"),
        ({"selector": {"matchLabels": {"model": "x"}}, "share": {"memoryMiB": "-1"}}, "memoryMiB"),
    ],
)
def test_a_class_that_cannot_be_read_is_refused(cluster, spec, says):
    with pytest.raises(CommandFailed) as refused:
        make_class(cluster, "bad", spec)
    assert says in str(refused.value)
    with pytest.raises(errors.NotFound):
        cluster.api.get(paths.resourceclasses("bad"))


@pytest.mark.parametrize("name", ["cpu", "share", "hugepages-2Mi", "pods"])
def test_a_class_may_not_have_the_name_of_a_resource(cluster, name):
    with pytest.raises(CommandFailed, match="name"):
        make_class(cluster, name.lower(), K80_OBJECT)


def test_a_class_without_a_card_waits_and_is_told(space):
    make_class(space.cluster, "rare", {"selector": {"matchLabels": {"model": "Tesla Rare"}}})
    space.create(typed("waits", {"cardwise.dev/rare": 1}))
    space.wait(lambda: "rare" in space.reasons("waits"), "a reason that names the type")
    space.kubectl_json("delete", "resourceclass", "rare")
    space.wait(lambda: "ResourceClassDeleted" in space.reasons("waits"), "the event of the deletion")


def test_a_type_that_is_scaled_to_zero_can_be_asked_for_until_an_admin_removes_it(space):
    """A node group of its own goes away as a whole; an autoscaler would see the pod that waits."""
    resource_class = "nvidia.tesla.zero"
    with Space(space.cluster, "types-to-zero") as group:
        group.nodes(1, [TestCard(model="Tesla Zero", memory_mib=K80)])
        wait_for_classes(group, resource_class)
    space.wait(lambda: cards_known(space, resource_class) == 0, "the class says that it has no card")
    space.kubectl_json("create", stdin=template_of("Deployment", "by-class", {resource_class: 1}))
    space.wait(space.pods, "the Deployment has its pod: nobody refuses it")
    (waits,) = (pod["metadata"]["name"] for pod in space.pods())
    space.wait(lambda: resource_class in space.reasons(waits), "kube-scheduler names the resource that it misses")
    assert (space.phase(waits), node_and_card(space.get(waits))[0]) == ("Pending", "")
    space.kubectl_json("delete", "resourceclass", resource_class)
    space.wait(lambda: "ResourceClassDeleted" in space.reasons(waits), "its pod is told that an admin removed it")
    assert f"there is no ResourceClass {resource_class}" in space.rejected(typed("late", {resource_class: 1}))


def cards_known(space: Space, resource_class: str) -> int:
    """What the status of the class says; -1 where it says nothing."""
    status = space.kubectl_json("get", "resourceclass", resource_class).get("status") or {}
    return int(status.get("devices", -1))
