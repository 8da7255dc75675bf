"""scheduler.mode=claims, installed by Helm into a cluster whose kube-scheduler knows nothing of Cardwise, and whose
control plane nobody changes: the README's story with plain pods.
"""

from collections.abc import Iterator

import pytest

from cardwise.core.api import claims, classes, names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import container
from tests.cluster import Cluster
from tests.cluster.cards import DEFAULT
from tests.integration import commands
from tests.integration.conftest import SpecOf, spaces, started
from tests.integration.sharing import Space, account, assigned, binding, workload
from tests.integration.since import since

pytestmark = [pytest.mark.cluster, pytest.mark.node, since(34, "resource.k8s.io/v1")]

DRA = "/apis/resource.k8s.io/v1"
GROUP = {names.GROUP_NAME: "pair", names.GROUP_NUM: "2"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings: Json = {"webhook": {"shareAgent": "never"}, "mps": {"enabled": False}}
    yield from started(SpecOf(nodes=1, chart=True, claims=True, values=settings))


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    yield from spaces(cluster, request)


def claims_of(space: Space) -> list[Json]:
    listed: list[Json] = space.cluster.api.get(paths.namespaced(DRA, "resourceclaims", space.name))["items"]
    return listed


def test_scheduler_was_not_configured(cluster: Cluster) -> None:
    configuration = (cluster.state_dir / "kube-scheduler.yaml").read_text()
    assert "extenders: []" in configuration
    installed = cluster.api.get("/apis/apps/v1/namespaces/cardwise-system/deployments")["items"]
    assert sorted(deployment["metadata"]["name"] for deployment in installed) == [
        "cardwise-extender",
        "cardwise-webhook",
    ]


def test_plain_pod_gets_its_share_and_runs(space: Space) -> None:
    space.create(workload("train", gpu_mem=4069))
    space.running("train")
    pod = space.get("train")
    ((share,),) = assigned(pod).containers.values()
    assert share.mem == 4069
    (claim,) = claims_of(space)
    allocation = claims.decode(claim)
    assert allocation is not None
    assert (allocation.node, allocation.assignment) == (pod["spec"]["nodeName"], assigned(pod))
    space.delete("train")
    space.wait_for_deletion("train")
    space.wait(lambda: not claims_of(space), "the claim goes with its pod")


def test_shares_of_a_card_sum_to_the_card(space: Space) -> None:
    """Two cards of 16276 MiB: five pods of 8138 MiB ask, four run, and the fifth says why it waits."""
    pods = [f"p{i}" for i in range(5)]
    for name in pods:
        space.create(workload(name, gpu_mem=8138))
    space.wait(lambda: sum(_is_running(space, name) for name in pods) == 4, "four run")
    (waiting,) = [name for name in pods if not space.get(name)["spec"].get("nodeName")]
    assert [gate["name"] for gate in space.get(waiting)["spec"]["schedulingGates"]] == [names.ALLOCATION_GATE]
    first = next(name for name in pods if name != waiting)
    space.delete(first)
    space.running(waiting)


def _is_running(space: Space, name: str) -> bool:
    return bool(space.get(name)["status"].get("phase") == "Running")


def test_gang_starts_together(space: Space) -> None:
    space.create(workload("one", gpu_mem=4000, annotations=GROUP))
    space.wait(lambda: space.get("one")["spec"].get("schedulingGates"), "it waits for its gang")
    space.create(workload("two", gpu_mem=4000, annotations=GROUP))
    space.running("one", "two")


def test_quota_counts_what_pods_request(space: Space) -> None:
    hard = {f"requests.{names.GPU_MEM}": "6000"}
    space.kubectl_json("create", stdin={
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "cards"}, "spec": {"hard": hard},
    })  # fmt: skip
    space.wait(lambda: _quota(space).get("status", {}).get("hard"), "the quota is known")
    space.create(workload("one", gpu_mem=4000))
    space.running("one")
    with pytest.raises(errors.KubeError, match="exceeded quota"):
        space.create(workload("two", gpu_mem=4000))


def _quota(space: Space) -> Json:
    return dict(space.cluster.api.get(paths.namespaced("/api/v1", "resourcequotas", space.name, "cards")))


def test_pods_without_a_request_are_not_concerned(space: Space) -> None:
    space.create(workload("plain"))
    space.running("plain")
    assert "schedulingGates" not in space.get("plain")["spec"]


def test_types_whole_gpus_and_several_containers(space: Space) -> None:
    """Each container gets its own share, by one claim."""
    model = classes.name_of_model(DEFAULT[0].model)
    by_type = container("by-type", gpu_mem=1000)
    by_type["resources"]["limits"][f"{names.CLASS_PREFIX}{model}"] = "1"
    space.create(workload("several", [by_type, container("other", gpu_mem=500)]))
    space.create(workload("whole", whole_gpu=1))
    space.running("several", "whole")
    shares = assigned(space.get("several")).containers
    assert {key: [share.mem for share in shares_of] for key, shares_of in shares.items()} == {"0": [1000], "1": [500]}
    requests = {request["name"] for claim in claims_of(space) for request in claim["spec"]["devices"]["requests"]}
    assert requests == {"by-type", "other", "main"}
    ((whole,),) = assigned(space.get("whole")).containers.values()
    assert whole.mem == DEFAULT[0].memory_mib


def test_waiting_pod_says_why(space: Space) -> None:
    """By `explain`, and by an event of the extender: kube-scheduler never sees the pod."""
    space.create(workload("a", whole_gpu=2))
    space.running("a")
    space.create(workload("b", gpu_mem=1000))
    space.wait(lambda: "GPU" in _events(space, "b"), "the event says why")
    text = commands.cardwise(space.cluster, "explain", "pod", "b", "-n", space.name).stdout
    assert f"It waits behind the gate {names.ALLOCATION_GATE}" in text
    assert "kube-scheduler says" not in text


def _events(space: Space, pod: str) -> str:
    query = {"fieldSelector": f"involvedObject.name={pod}"}
    events = space.cluster.api.get(paths.events(space.name), query)["items"]
    return "\n".join(str(event.get("message")) for event in events)


def test_helm_test_and_doctor_find_nothing(cluster: Cluster) -> None:
    assert "ok    kube-scheduler" in cluster.chart.helm("test", "cardwise", "--logs")
    doctor = commands.cardwise(cluster, "doctor")
    assert doctor.returncode == 0, doctor.stdout
    assert "shares are ResourceClaims (scheduler.mode=claims)" in doctor.stdout
    assert "the probe pod was placed on a GPU of n1 by the extender" in doctor.stdout


def test_change_of_the_mode_and_back_with_a_running_pod(cluster: Cluster, space: Space) -> None:
    """Its claim and its GPU stay counted, and nothing is given twice. It is last: it upgrades the release."""
    space.create(workload("stays", whole_gpu=1))
    space.running("stays")
    (claim,) = claims_of(space)
    started_at = space.get("stays")["status"]["startTime"]
    cluster.chart.upgrade({"scheduler": {"mode": "manual"}})
    with pytest.raises(errors.Forbidden, match=r"claims\.cardwise\.dev"):
        _as_editor(space, claim["metadata"]["name"])
    cluster.chart.upgrade({"scheduler": {"mode": "claims"}})
    # A replica of the webhook that ends still serves connections of the API server, in the mode of before.
    space.wait(lambda: _is_admitted(space, workload("second", whole_gpu=1)), "the webhook runs in the new mode")
    space.running("second")
    space.create(workload("third", gpu_mem=100))
    space.wait(lambda: "GPU" in _events(space, "third"), "no GPU is left")
    assert not space.get("third")["spec"].get("nodeName")
    assert space.get("stays")["status"]["startTime"] == started_at
    assert claim["metadata"]["uid"] in {listed["metadata"]["uid"] for listed in claims_of(space)}
    used = [assigned(space.get(name)).shares()[0].uuid for name in ("stays", "second")]
    assert len(set(used)) == 2


def _is_admitted(space: Space, pod: Json) -> bool:
    """Create the pod. False while a webhook of another mode leaves it without its gate."""
    try:
        space.create(pod)
    except errors.Invalid as error:
        if "still runs in another scheduler.mode" not in str(error):
            raise
        return False
    return True


def _as_editor(space: Space, claim: str) -> None:
    """Delete the claim as a user with the role `edit`."""
    space.kubectl_json("create", stdin=account("editor"))
    role = binding("editor", "edit", account=f"{space.name}:editor", of="RoleBinding")
    space.kubectl_json("create", stdin=role)
    client = space.cluster.client("admin")
    client._headers[""]["Impersonate-User"] = f"system:serviceaccount:{space.name}:editor"
    try:
        client.delete(paths.resourceclaims(space.name, claim))
    finally:
        client.close()
