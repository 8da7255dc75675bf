"""Gangs on the real scheduler: never bound in part, nothing held in vain, never stuck, whatever is short or dies."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import P100
from tests.cluster import Cluster
from tests.cluster.cards import card_uuid
from tests.cluster.processes import PATIENCE
from tests.integration.conftest import spaces
from tests.integration.gangpods import bound, create_at_once, groups, many_gangs, member, phase, waits
from tests.integration.ruleone import Follower
from tests.integration.sharing import Space, kill9, outlive_lease, workload
from tests.integration.since import since

pytestmark = [pytest.mark.cluster("sim")]

NODES = 6  # of two cards each
CARDS = 2 * NODES
MANY_NODES = 50  # likewise
MANY_CARDS = 2 * MANY_NODES


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(NODES)
        yield space
        space.clear()
        space.wait(lambda space=space: not groups(space), "automatic PodGroups go with their pods")


@pytest.fixture
def big_space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(MANY_NODES)
        yield space


class Witness(Follower):
    """Does something as soon as the API server tells that a pod of the gang is bound."""

    def __init__(self, space: Space, gang: str, first: Callable[[], object]) -> None:
        super().__init__(space.cluster, paths.pods(space.name))
        self.died = threading.Event()
        self._gang = gang
        self._act = first

    def on_event(self, kind: str, manifest: Json) -> None:
        """The pod is so now."""
        ours = (manifest["metadata"].get("labels") or {}).get(names.GANG) == self._gang
        if ours and manifest["spec"].get("nodeName") and not self.died.is_set():
            self._act()
            self.died.set()


@since(33, "resize in place")
def test_what_a_pod_gets_by_a_resize_a_gang_does_not(space):
    """And what its node will never give it is not taken from others. Nodes here have 64 CPUs, and nobody resizes."""
    node = space.nodes(1)[0]
    grown = workload("grown", gpu_mem=64, node=node)
    grown["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    space.create(grown)
    space.running("grown")

    def patch(sub: str, wanted: Json) -> None:
        space.cluster.api.patch(paths.pods(space.name, "grown", sub), wanted, "strategic")

    def resize(**requests: str) -> None:
        patch("resize", {"spec": {"containers": [{"name": "main", "resources": {"requests": requests}}]}})

    has = space.get("grown")["status"]["containerStatuses"][0] | {"allocatedResources": {"cpu": "1"}}
    has["resources"] = {"requests": {"cpu": "1"}}
    patch("status", {"status": {"containerStatuses": [has]}})
    for name in (names.GPU_MEM, names.SHARE):
        with pytest.raises(errors.KubeError, match="only cpu and memory"):
            resize(**{name: "2"})
    resize(cpu="40")
    space.create(member("a-1", "a", 1, gpu_mem=64, cpu="30", spec={"nodeSelector": {"kubernetes.io/hostname": node}}))
    space.wait(lambda: phase(space, "a") == "Waiting", "it does not fit beside the other")
    never = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}
    patch("status", {"status": {"conditions": [never]}})
    assert space.placed("a-1")[0] == node


def test_the_articles_scene(space):
    """Three free cards, and in the queue A1, x, y, A2, A3."""
    create_at_once(space, [workload(f"fill-{i}", gpu_mem=P100) for i in range(CARDS - 3)])
    space.wait(lambda: len(bound(space)) == CARDS - 3, "three cards are free")
    space.create(member("a-1", "a", 3, gpu_mem=P100))
    space.create(workload("x", gpu_mem=P100))
    space.create(workload("y", gpu_mem=P100))
    space.create(member("a-2", "a", 3, gpu_mem=P100))
    space.placed("x")
    space.placed("y")
    space.wait(lambda: "waiting for 1 of 3 members" in space.reasons("a-1"), "who waits is told for how many")
    space.create(member("a-3", "a", 3, gpu_mem=P100))
    waits(space, "a")
    space.wait(lambda: "does not fit as a whole" in space.reasons("a-1"), "the scheduler says why")
    space.delete("x", "y")
    space.wait(lambda: len(bound(space, "a-")) == 3, "a is bound")
    space.wait(lambda: phase(space, "a") == "Running", "its PodGroup says so")
    space.wait(lambda: "GangBound" in space.reasons("a-1"), "and so does an event")


def test_as_many_as_there_are_cards_and_one_card_too_few(space):
    one_card_too_few(space, NODES)


@pytest.mark.soak
def test_a_hundred_of_a_whole_card_on_ninety_nine(big_space):
    one_card_too_few(big_space, MANY_NODES)


def one_card_too_few(space: Space, nodes: int) -> None:
    cards, api = 2 * nodes, space.cluster.api
    ill = names.extended_resource_name(card_uuid(space.own_nodes[-1], 1))
    status = paths.extendedresources(ill, "status")
    api.patch(status, {"status": {"health": "Unhealthy"}})
    healthy_cards = lambda: api.get(paths.resourceclasses("nvidia.tesla-p100"))["status"]["healthyDevices"]  # noqa: E731
    space.wait(lambda: healthy_cards() == cards - 1, "the extender knows it")
    create_at_once(space, [member(f"g-{i}", "g", cards, gpu_mem=P100) for i in range(cards)])
    waits(space, "g")
    space.create_and_locate(workload("single", gpu_mem=P100))
    space.delete("single")
    space.wait_for_deletion("single")
    waits(space, "g")
    api.patch(status, {"status": {"health": "Healthy"}})
    space.wait(lambda: len(bound(space, "g-")) == cards, "all are bound")
    space.running(*(f"g-{i}" for i in range(cards)))


def test_a_job_of_parameter_servers_and_workers_as_plain_yaml(space):
    job = {"scheduling.k8s.io/group-name": "tf", "scheduling.k8s.io/group-pod-num": "6"}
    manifests = []
    for role, count, limits in (("ps", 2, {"cpu": "1"}), ("worker", 4, {"aliyun.com/gpu-mem": "8138"})):
        template = {
            "metadata": {"labels": {"app": role}, "annotations": job},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "tf", "image": "cardwise.local/busybox:1", "resources": {"limits": limits}}],
            },
        }
        spec = {"replicas": count, "selector": {"matchLabels": {"app": role}}, "template": template}
        manifests.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": role}, "spec": spec})
    space.apply(*manifests)
    space.wait(lambda: len(bound(space)) == 6, "all are bound")
    space.wait(lambda: groups(space).get("tf", {}).get("bound") == 6, "the PodGroup counts them")
    # A member that is made anew while the gang runs is placed alone.
    name = next(iter(bound(space, "worker")))
    space.delete(name)
    space.wait(lambda: name not in bound(space) and len(bound(space)) == 6, "another one has its place")


def test_a_podgroup_says_how_many_and_more_follow(space):
    spec = {"minMember": 3, "timeoutSeconds": 10, "priority": 5}
    group = {"apiVersion": names.API_VERSION, "kind": "PodGroup", "metadata": {"name": "g"}, "spec": spec}
    space.kubectl_json("create", stdin=group)
    for i in range(2):
        space.create(member(f"g-{i}", "g", None, gpu_mem=1000))
    space.wait(lambda: groups(space)["g"].get("members") == 2, "two are there")
    space.wait(lambda: "waiting for 1 of 3 members" in space.reasons("g-0"), "the extender has looked at them")
    space.create_and_locate(workload("fits", gpu_mem=1))
    assert phase(space, "g") == "Pending"
    assert bound(space, "g-") == {}
    space.delete("fits")
    for i in range(2, 5):
        space.create(member(f"g-{i}", "g", None, gpu_mem=1000))
    space.wait(lambda: len(bound(space, "g-")) == 5, "all five are bound")
    podgroup_status = lambda: [groups(space)["g"].get(key) for key in ("phase", "members", "bound")]  # noqa: E731
    space.wait(lambda: podgroup_status() == ["Running", 5, 5], "its status says so")
    heads, row = (line.split()[:5] for line in space.kubectl("get", "gang").splitlines())
    assert heads == ["NAME", "PHASE", "MIN-MEMBER", "MEMBERS", "BOUND"]
    assert row == ["g", "Running", "3", "5", "5"]
    space.kubectl_json("delete", "gang", "g")


def test_a_member_that_cannot_be_scheduled_lets_nothing_be_held_for_long(cluster, space):
    """And a scheduler that goes away while others wait in bind ends the hold at once."""
    space.create(member("g-0", "g", 3, gpu_mem=P100))
    space.create(member("g-1", "g", 3, gpu_mem=P100))
    space.create(member("g-2", "g", 3, gpu_mem=P100, node="nowhere"))
    space.wait(lambda: phase(space, "g") == "Reserved", "it is held, since nobody knows where g-2 may go")
    space.wait(lambda: groups(space)["g"]["waitingFor"] == ["g-2"], "two wait in bind")
    space.wait(lambda: "gang g fits, waiting for g-2" in space.reasons("g-0"), "and are told")
    scheduler = cluster.process("kube-scheduler")
    scheduler.kill()
    try:
        space.wait(lambda: phase(space, "g") == "Waiting" and not groups(space)["g"]["reserved"], "nothing is held")
        assert bound(space) == {}
    finally:
        scheduler.restart()
    waits(space, "g")
    space.delete("g-2")
    space.create(member("g-3", "g", 3, gpu_mem=P100))
    space.wait(lambda: len(bound(space)) == 3, "with another member it is bound")


@pytest.mark.parametrize(
    "failure", ["kill", pytest.param("stop", marks=pytest.mark.soak), pytest.param("freeze", marks=pytest.mark.soak)]
)
def test_an_extender_that_dies_between_the_first_and_the_last_bind(cluster, space, failure):
    """A part of the gang is bound then: one member's Binding is refused until then. The rest follows."""
    size, withheld = 20, "g-7"
    extender = cluster.process("extender")
    die = {"kill": lambda: kill9(extender), "stop": extender.stop, "freeze": extender.pause}[failure]
    with no_binding(space, withheld):
        with Witness(space, "g", die) as witness:
            create_at_once(space, [member(f"g-{i}", "g", size, gpu_mem=500) for i in range(size)])
            assert witness.died.wait(PATIENCE), witness.failed
        at_death = bound(space, "g")
        print(f"{len(at_death)} of {size} were bound when it died")
        assert at_death
        assert withheld not in at_death
    if failure == "freeze":
        outlive_lease(cluster)
        extender.resume()
    else:
        extender.restart()
    cluster.parts.wait_ready("extender")
    space.wait(lambda: len(bound(space, "g")) == size, f"the rest is bound; {len(at_death)} were when it died")
    space.wait(lambda: phase(space, "g") == "Running", "the PodGroup says so")


@contextmanager
def no_binding(space: Space, name: str) -> Iterator[None]:
    """The API server refuses Bindings of this pod meanwhile."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}
    policy = f"withheld-{space.name}"
    spec = {
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
            "resourceRules": [rule],
        },
        "validations": [{"expression": f"object.metadata.name != '{name}'", "message": "withheld"}],
    }
    extender = space.cluster.client("cardwise-extender")

    def refused() -> bool:
        target = {"kind": "Node", "name": space.own_nodes[0]}
        manifest = {"kind": "Binding", "apiVersion": "v1", "metadata": {"name": name}, "target": target}
        try:
            extender.create(paths.pods(space.name, name, "binding"), manifest, query={"dryRun": "All"})
        except errors.KubeError as error:
            return "withheld" in str(error)
        return False

    with ExitStack() as stack:
        stack.callback(extender.close)
        bound_to = {"policyName": policy, "validationActions": ["Deny"]}
        for kind, spec_of_kind in (("policies", spec), ("policybindings", bound_to)):
            path = f"/apis/admissionregistration.k8s.io/v1/validatingadmission{kind}"
            space.cluster.api.create(path, {"metadata": {"name": policy}, "spec": spec_of_kind})
            stack.callback(space.cluster.api.delete, f"{path}/{policy}")
        space.wait(refused, "the API server knows the policy")
        yield


def test_members_without_cards_are_tried_again_when_a_node_gets_more_cpu(cluster, space):
    """kube-scheduler asks us about nobody meanwhile: it must see by itself that the pods may fit."""
    status = paths.nodes(space.own_nodes[0], "status")
    plain = [{"name": "c", "image": "cardwise.local/busybox:1", "resources": {"requests": {"cpu": "40"}}}]
    create_at_once(space, [workload(f"plain-{i}", plain, node=space.own_nodes[i]) for i in range(NODES)])
    space.wait(lambda: len(bound(space, "plain")) == NODES, "no node has the CPU")
    create_at_once(space, [member(f"g-{i}", "g", 2, cpu="30") for i in range(2)])
    space.wait(lambda: "Insufficient cpu" in space.reasons("g-0") + space.reasons("g-1"), "they are tried")
    waits(space, "g")
    before = cluster.api.get(paths.nodes(space.own_nodes[0]))["status"]["allocatable"]["cpu"]
    try:
        cluster.api.patch(status, {"status": {"allocatable": {"cpu": "128"}}})
        space.wait(lambda: len(bound(space, "g-")) == 2, "both are bound")
    finally:
        cluster.api.patch(status, {"status": {"allocatable": {"cpu": before}}})


def test_anti_affinity_may_be_what_is_short(space):
    """The planner knows nothing of it: the scheduler's offers teach it."""
    alone = {
        "labelSelector": {"matchLabels": {"apart": "yes"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}}

    def apart(name: str, gang: str, minimum: int) -> Json:
        pod = member(name, gang, minimum, gpu_mem=1000, spec={"affinity": affinity})
        pod["metadata"]["labels"] = {"apart": "yes"}
        return pod

    create_at_once(space, [apart(f"b-{i}", "b", NODES + 1) for i in range(NODES + 1)])
    space.wait(lambda: phase(space, "b") in ("Reserved", "Waiting"), "b is tried")
    for i in range(NODES + 1):
        space.refused(f"b-{i}")
    space.create_and_locate(workload("fits", gpu_mem=1000))
    assert bound(space, "b-") == {}
    space.delete(*(f"b-{i}" for i in range(NODES + 1)))
    create_at_once(space, [apart(f"a-{i}", "a", NODES) for i in range(NODES)])
    space.wait(lambda: len(set(bound(space, "a-").values())) == NODES, "one on each node")


def test_a_big_gang_does_not_keep_others_waiting(space):
    """While eighty wait in bind for the last one, a single pod is bound."""
    size = 80
    create_at_once(space, [member(f"g-{i}", "g", size, gpu_mem=500) for i in range(size - 1)])
    space.create(member("g-last", "g", size, gpu_mem=500, node="nowhere"))
    space.wait(lambda: groups(space)["g"].get("waitingFor") == ["g-last"], "all but one wait in bind")
    space.create_and_locate(workload("single", gpu_mem=500))
    assert bound(space, "g-") == {}
    space.delete("g-last")
    space.create(member("g-other", "g", size, gpu_mem=500))
    space.wait(lambda: len(bound(space, "g-")) == size, "then all are")


def test_some_gangs_while_the_extender_dies_again_and_again(space):
    many_gangs(space, cards=CARDS, gangs=6, largest=8, arrive=5, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thirty_gangs_while_the_extender_dies_again_and_again(big_space):
    for every in (10, 10, 25):
        seed = random.SystemRandom().randrange(10**6)
        many_gangs(
            big_space,
            cards=MANY_CARDS,
            gangs=30,
            largest=20,
            arrive=30,
            seed=seed,
            limit=500,
            half=15,
            every=every,
        )
        big_space.clear()
