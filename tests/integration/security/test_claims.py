"""Attacks on the claims of scheduler.mode=claims, as the real API server and the stock kube-scheduler judge them.

The extender is stopped, and the tests write what it writes, with its account, so a claim stays as a test wrote it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cardwise.core.api import assignment as codec
from cardwise.core.api import claims, names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.claims import ClaimingPod
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.build import container
from tests.cluster import Cluster, PatientClient, pki
from tests.cluster.cards import DEFAULT
from tests.integration.admission.injector import LABELS, Injector
from tests.integration.conftest import SpecOf, spaces, started
from tests.integration.sharing import Space, account, allowed, binding, workload
from tests.integration.since import since

pytestmark = [pytest.mark.cluster, since(34, "resource.k8s.io/v1")]

DRA = "/apis/resource.k8s.io/v1"
UUID = "GPU-3f1c"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    for cluster in started(SpecOf(claims=True)):
        cluster.process("extender").kill()
        yield cluster


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        cluster.simulate({f"{space.name}-00": DEFAULT})
        space.own_nodes.append(f"{space.name}-00")
        yield space


@dataclass(frozen=True)
class Accounts:
    """extender: Cardwise's. tenant: has the role `edit` in the namespace. driver: writes statuses of all claims."""

    extender: KubeClient
    tenant: KubeClient
    driver: KubeClient


@pytest.fixture
def accounts(cluster: Cluster, space: Space, tmp_path: Path) -> Iterator[Accounts]:
    with ExitStack() as stack:

        def load(file: Path) -> KubeClient:
            client = PatientClient.load(file)
            stack.callback(client.close)
            return client

        driver = f"{space.name}-driver"
        resources = ["resourceclaims", "resourceclaims/status", "resourceclaims/binding"]
        verbs = ["get", "list", "update", "patch"]
        rules = [{"apiGroups": ["resource.k8s.io"], "resources": resources, "verbs": verbs}]
        cluster.api.create(f"{RBAC}/clusterroles", {"metadata": {"name": driver}, "rules": rules})
        stack.callback(cluster.api.delete, f"{RBAC}/clusterroles/{driver}")
        cluster.api.create(f"{RBAC}/clusterrolebindings", binding(driver, driver, account=f"{space.name}:driver"))
        stack.callback(cluster.api.delete, f"{RBAC}/clusterrolebindings/{driver}")
        tenant = load(space.editor("tenant", tmp_path))
        space.kubectl_json("create", stdin=account("driver"))
        token = cluster.api.create(f"{paths.namespaces(space.name)}/serviceaccounts/driver/token", {"spec": {}})
        file = tmp_path / "driver"
        authority = cluster.state_dir / "pki" / "ca.crt"
        pki.kubeconfig(file, server=cluster.control_plane.url, ca=authority, token=token["status"]["token"])
        clients = Accounts(load(cluster.control_plane.kubeconfig("cardwise-extender")), tenant, load(file))
        for client in (clients.tenant, clients.driver):
            cluster.wait(
                lambda client=client: allowed(lambda: client.get(claims_path(space))), "the API server knows the role"
            )
        yield clients


def claims_path(space: Space, name: str = "", sub: str = "", kind: str = "resourceclaims") -> str:
    """The path of claims of the namespace."""
    return paths.namespaced(DRA, kind, space.name, *filter(None, [name, sub]))


def pod_path(space: Space, name: str = "", sub: str = "") -> str:
    return paths.namespaced("/api/v1", "pods", space.name, *filter(None, [name, sub]))


@contextmanager
def refused(by: str, text: str) -> Iterator[None]:
    """`by`: the policy, or the words of another authority."""
    with pytest.raises(errors.KubeError) as caught:
        yield
    message = str(caught.value)
    assert (by if " " in by else f"'{by}.cardwise.dev'") in message, message
    assert text in message, message


def gated(space: Space, name: str, **settings: object) -> Json:
    """A pod as the webhook leaves it."""
    space.create(workload(name, **({"gpu_mem": 900} | settings)))
    return space.get(name)


def read(pod: Json) -> ClaimingPod:
    claiming = claims.read_pod(pod)
    assert claiming is not None
    return claiming


def share() -> Assignment:
    card = CardShare(index=0, uuid=UUID, mem=MiB(900), core=Percent(0), total=MiB(16276))
    return Assignment({"0": (card,)})


def token(space: Space, *, epochs: int = 0) -> str:
    """The fencing token of the epoch that is so many after the Lease's."""
    lease = space.cluster.api.get(paths.leases(names.NAMESPACE, names.LEASE))
    spec, metadata = lease["spec"], lease["metadata"]
    epoch = int(spec.get("leaseTransitions", 0)) + epochs
    return f"{names.NAMESPACE}/{names.LEASE}/{metadata['uid']}/{epoch}/{spec.get('holderIdentity', '')}/x"


def allocate(space: Space, extender: KubeClient, pod: Json) -> str:
    """Create and allocate the pod's claim, as the extender does. Returns its name."""
    node = space.own_nodes[0]
    claim = claims.new_claim(read(pod), share(), token(space))
    extender.create(claims_path(space), claim)
    name = claim["metadata"]["name"]
    status = claims.new_status(read(pod), share(), node, extender.server_time().strftime("%Y-%m-%dT%H:%M:%SZ"))
    extender.patch(claims_path(space, name, "status"), {"status": status}, "merge")
    return str(name)


def open_gate(space: Space, extender: KubeClient, pod: Json, fencing_token: str = "") -> Json:
    annotations = codec.encode(share(), assume_time_ns=1)
    annotations[names.LEADER_EPOCH] = fencing_token or token(space)
    gates = [{"name": names.ALLOCATION_GATE, "$patch": "delete"}]
    change = {"metadata": {"annotations": annotations}, "spec": {"schedulingGates": gates}}
    return dict(extender.patch(pod_path(space, pod["metadata"]["name"]), change, "strategic"))


@pytest.fixture
def victim(space: Space, accounts: Accounts) -> str:
    """A claim with a share of a pod that is bound."""
    pod = gated(space, "victim")
    name = allocate(space, accounts.extender, pod)
    open_gate(space, accounts.extender, pod)
    space.wait(lambda: space.get("victim")["spec"].get("nodeName"), "the scheduler has obeyed", timeout=30)
    assert space.get("victim")["spec"]["nodeName"] == space.own_nodes[0]
    return name


def test_stock_scheduler_obeys_and_the_claim_goes_with_its_pod(space: Space, victim: str) -> None:
    """And the annotations, by which gpushare's tools and ours read the pod, came with the gate."""
    pod = space.get("victim")
    assert codec.decode(pod["metadata"]["annotations"]) == share()
    space.delete("victim", grace=0)
    space.wait(lambda: not space.cluster.api.get(claims_path(space))["items"], "the claim is gone", timeout=60)


def thief(name: str, claim: str, **settings: object) -> Json:
    pod = workload(name)
    pod["spec"] |= {"resourceClaims": [{"name": "mine", "resourceClaimName": claim}]} | settings
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "mine"}]}
    return pod


def test_second_pod_that_names_the_claim(space: Space, accounts: Accounts, victim: str) -> None:
    """Through the scheduler, and past it by the name of a node."""
    for settings in ({}, {"nodeName": space.own_nodes[0]}):
        with refused("admission webhook", f"'{victim}' is a claim of Cardwise, which serves only the pod"):
            accounts.tenant.create(pod_path(space), thief("thief", victim, **settings))


def test_second_pod_that_is_there_already_gets_no_reservation(space: Space, accounts: Accounts) -> None:
    """The name is random, so nobody can write it before; where it is known, the policies hold the claim's status."""
    pod = gated(space, "victim")
    name = claims.claim_name(pod)
    assert name
    claim = allocate(space, accounts.extender, pod)
    other = gated(space, "other")["metadata"]
    reserved = [
        {"resource": "pods", "name": "victim", "uid": pod["metadata"]["uid"]},
        {"resource": "pods", "name": "other", "uid": other["uid"]},
    ]
    text = "status.reservedFor: a claim of the class cardwise.dev serves only the pod that owns it"
    for client in (accounts.driver, accounts.extender):
        with refused("claimstatus", text):
            client.patch(claims_path(space, claim, "status"), {"status": {"reservedFor": reserved}}, "merge")


def test_forged_claims(space: Space, accounts: Accounts, victim: str) -> None:
    """By whoever may write the status of every claim, such as the driver of another device."""
    api, forger = space.cluster.api, accounts.driver
    pod = gated(space, "p")
    claim = claims.new_claim(read(pod), share(), token(space))
    accounts.extender.create(claims_path(space), claim)
    name = claim["metadata"]["name"]
    status = claims.new_status(read(pod), share(), space.own_nodes[0], "2026-11-28T01:03:53Z")
    with refused("claimstatus", "status.allocation: only Cardwise allocates claims of the class cardwise.dev"):
        forger.patch(claims_path(space, name, "status"), {"status": status}, "merge")
    with refused(
        "claimstatus", "status: only Cardwise, schedulers (bindings.allowedUsers) and Kubernetes' controllers"
    ):
        forger.patch(
            claims_path(space, victim, "status"), {"status": {"allocation": None, "reservedFor": None}}, "merge"
        )
    # A claim of another class that names our driver.
    api.create(f"{DRA}/deviceclasses", {"metadata": {"name": space.name}, "spec": {}})
    try:
        foreign = {"devices": {"requests": [{"name": "main", "exactly": {"deviceClassName": space.name}}]}}
        accounts.tenant.create(claims_path(space), {"metadata": {"name": "mine"}, "spec": foreign})
        with refused("claimstatus", "status.allocation: the driver cardwise.dev serves only claims of the class"):
            forger.patch(claims_path(space, "mine", "status"), {"status": status}, "merge")
        # Others of that class are none of our business.
        theirs = {"allocation": {"devices": {"results": [
            {"request": "main", "driver": "other.dev", "pool": "n", "device": "d"}]}}}  # fmt: skip
        forger.patch(claims_path(space, "mine", "status"), {"status": theirs}, "merge")
    finally:
        api.delete(f"{DRA}/deviceclasses/{space.name}")


OF_OUR_CLASS = {"devices": {"requests": [{"name": "main", "exactly": {"deviceClassName": names.DRIVER}}]}}
AS_ALTERNATIVE = {
    "devices": {"requests": [{"name": "main", "firstAvailable": [{"name": "a", "deviceClassName": names.DRIVER}]}]}
}


@pytest.mark.parametrize("spec", [OF_OUR_CLASS, AS_ALTERNATIVE])
def test_claims_and_templates_that_users_write(space: Space, accounts: Accounts, spec: Json) -> None:
    text = "of the class cardwise.dev; request a share in the pod instead, with limits aliyun.com/gpu-mem"
    with refused("claims", f"only Cardwise may create a claim {text}"):
        accounts.tenant.create(claims_path(space), {"metadata": {"name": "mine"}, "spec": spec})
    template = {"metadata": {"name": "mine"}, "spec": {"spec": spec}}
    with refused("claims", f"only Cardwise may create a template {text}"):
        accounts.tenant.create(claims_path(space, kind="resourceclaimtemplates"), template)


def test_name_of_a_claim_that_a_pod_waits_for(space: Space, accounts: Accounts) -> None:
    """A claim of a user with this name would be in the way of the pod's own."""
    name = claims.claim_name(gated(space, "p"))
    spec = {"devices": {"requests": [{"name": "main", "exactly": {"deviceClassName": "other"}}]}}
    with refused("claims", "metadata.name: only Cardwise gives such names to claims; choose another name"):
        accounts.tenant.create(claims_path(space), {"metadata": {"name": name}, "spec": spec})
    accounts.tenant.create(claims_path(space), {"metadata": {"name": "cardwise-team"}, "spec": spec})
    accounts.tenant.create(pod_path(space), thief("theirs", "cardwise-team"))


def test_edits_and_deletion_by_users(space: Space, accounts: Accounts, victim: str) -> None:
    """Also of the owner: the garbage collector would delete the claim with another object."""
    deleted = "a claim of the class cardwise.dev is deleted with its pod; delete the pod instead"
    with refused("claims", deleted):
        accounts.tenant.delete(claims_path(space, victim))
    with refused("claims", deleted):
        accounts.tenant.delete(claims_path(space))  # all of them
    pod = gated(space, "other")["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "other", "uid": pod["uid"]}
    for change in ({"ownerReferences": [owner]}, {"labels": {"a": "b"}}, {"finalizers": ["example.com/mine"]}):
        with refused("claims", "only Cardwise may change a claim of the class cardwise.dev; leave it unchanged"):
            accounts.tenant.patch(claims_path(space, victim), {"metadata": change}, "merge")
    space.cluster.api.delete(claims_path(space, victim))  # administrators may remove what is left


def test_claim_of_another_namespace(space: Space, accounts: Accounts, victim: str) -> None:
    """A pod can name claims of its own namespace only, so the name leads nowhere there; it is refused all the same."""
    text = "is a claim of Cardwise, which serves only the pod"
    with Space(space.cluster, f"{space.name}-b") as other, refused("admission webhook", text):
        other.cluster.api.create(pod_path(other), thief("thief", victim))


def test_gate_is_opened_by_the_extender_alone(space: Space, accounts: Accounts) -> None:
    gated(space, "p")
    with refused("allocation", "only the Cardwise extender removes this gate, once the pod has its GPUs"):
        accounts.tenant.patch(pod_path(space, "p"), {"spec": {"schedulingGates": None}}, "merge")


def test_gate_of_a_pod_without_a_request(space: Space, accounts: Accounts) -> None:
    pod = workload("p", spec={"schedulingGates": [{"name": names.ALLOCATION_GATE}]})
    with refused("admission webhook", "the pod requests no GPU, so Cardwise would never remove the gate"):
        accounts.tenant.create(pod_path(space), pod)


@pytest.mark.parametrize("namespace", ["kube-system"])
def test_pod_in_a_namespace_that_is_exempt_from_the_webhook(space: Space, namespace: str) -> None:
    """kube-scheduler would place it, and it would run without a GPU."""
    path = paths.namespaced("/api/v1", "pods", namespace)
    with refused("allocation", "create it in another namespace: kube-system is exempt (webhook.exemptNamespaces)"):
        space.cluster.api.create(path, workload("p", gpu_mem=900))


def test_names_of_claims_in_a_namespace_that_is_exempt(space: Space) -> None:
    path = paths.namespaced("/api/v1", "pods", "kube-system")
    with refused("allocation", "spec.resourceClaims[mine].resourceClaimName: cardwise-0123456789abcdef is a claim of"):
        space.cluster.api.create(path, thief("p", "cardwise-0123456789abcdef"))


def test_copy_of_a_pod_waits_for_a_claim_of_its_own(space: Space, accounts: Accounts, victim: str) -> None:
    """By `kubectl get -o yaml`, of a placed pod and of one that waits."""
    gated(space, "waiting")
    for original in ("victim", "waiting"):
        copy = space.get(original)
        for field in ("uid", "resourceVersion", "creationTimestamp"):
            copy["metadata"].pop(field)
        copy["metadata"]["name"] = f"copy-of-{original}"
        accounts.tenant.create(pod_path(space), copy)
        created = space.get(f"copy-of-{original}")
        assert claims.claim_name(created) not in (None, claims.claim_name(space.get(original)))
        assert [gate["name"] for gate in created["spec"]["schedulingGates"]] == [names.ALLOCATION_GATE]


@pytest.mark.parametrize("name", ["mesh-injector", "zzz-injector"])
def test_container_that_another_webhook_adds(space: Space, tmp_path: Path, name: str) -> None:
    """It gets an entry and the name stays: by our second configuration, or as the first is called again."""

    def add_container(pod: Json) -> list[Json]:
        if any(listed["name"] == "mesh" for listed in pod["spec"]["containers"]):
            return []
        return [{"op": "add", "path": "/spec/containers/-", "value": container("mesh", gpu_mem=100)}]

    def create() -> Json:
        pod = workload("p", gpu_mem=900)
        pod["metadata"]["labels"] = LABELS
        return dict(space.cluster.api.create(pod_path(space), pod, query={"dryRun": "All"}))

    injector = Injector(tmp_path)
    try:
        with injector.registered(space.cluster, name, add_container, create):
            pod = create()
    finally:
        injector.close()
    assert [entry["name"] for entry in pod["spec"]["resourceClaims"]] == [names.POD_CLAIM]
    assert read(pod).containers == (("main", "0"), ("mesh", "1"))


# What a leader of a former epoch, or an extender that an attacker controls, may not write.


def test_writes_of_a_former_epoch(space: Space, accounts: Accounts) -> None:
    """The claim, its allocation, and the pod's gate and assignment. A token of a later epoch is that of a Lease which
    the API server does not know yet.
    """
    extender, pod = accounts.extender, gated(space, "p")
    with at_epoch(space, 2, pod):  # the first Lease has no epoch before it
        old = token(space, epochs=-1)
        over = f"the leader epoch {old.split('/')[3]} of {old.split('/')[4]} is over"
        with refused("fencing", over):
            extender.create(claims_path(space), claims.new_claim(read(pod), share(), old))
        with refused("fencing", over):
            open_gate(space, extender, pod, old)
        claim = extender.create(claims_path(space), claims.new_claim(read(pod), share(), token(space, epochs=1)))
    name = claim["metadata"]["name"]
    with pytest.raises(errors.Forbidden, match='cannot patch resource "resourceclaims"'):
        extender.patch(claims_path(space, name), {"metadata": {"annotations": {names.LEADER_EPOCH: old}}}, "merge")
    with at_epoch(space, 4, pod):
        status = claims.new_status(read(pod), share(), space.own_nodes[0], "2026-11-28T01:03:53Z")
        with refused("fencing", "is over"):
            extender.patch(claims_path(space, name, "status"), {"status": status}, "merge")
        extender.delete(claims_path(space, name))
        extender.create(claims_path(space), claims.new_claim(read(pod), share(), token(space)))
        extender.patch(claims_path(space, name, "status"), {"status": status}, "merge")
        open_gate(space, extender, pod)


def _knows_epoch(space: Space, extender: KubeClient, pod: Json) -> bool:
    """Whether the policy refuses a claim of the epoch before that of the Lease."""
    stale = claims.new_claim(read(pod), share(), token(space, epochs=-1))
    try:
        extender.create(claims_path(space), stale, query={"dryRun": "All"})
    except errors.KubeError as error:
        return "is over" in str(error)
    return False


@contextmanager
def at_epoch(space: Space, added_epochs: int, pod: Json) -> Iterator[None]:
    """Another leader has taken the Lease so many times since, and the policies know it."""
    path = paths.leases(names.NAMESPACE, names.LEASE)
    before = space.cluster.api.get(path)["spec"]
    epoch = int(before.get("leaseTransitions", 0))
    space.cluster.api.patch(
        path, {"spec": {"leaseTransitions": epoch + added_epochs, "holderIdentity": "other"}}, "merge"
    )
    extender = PatientClient.load(space.cluster.control_plane.kubeconfig("cardwise-extender"))
    try:
        space.wait(lambda: _knows_epoch(space, extender, pod), "the policy knows the new epoch", timeout=30)
        yield
    finally:
        extender.close()
        spec = {"leaseTransitions": before.get("leaseTransitions", 0), "holderIdentity": before.get("holderIdentity")}
        space.cluster.api.patch(path, {"spec": spec}, "merge")


def test_extender_writes_no_claims_but_its_own(space: Space, accounts: Accounts, victim: str) -> None:
    """And assigns GPUs only to pods that wait for a claim."""
    extender = accounts.extender
    text = "the extender may write only claims of the class cardwise.dev with a name of Cardwise"
    foreign = {"devices": {"requests": [{"name": "main", "exactly": {"deviceClassName": "other"}}]}}
    tries: list[Callable[[], object]] = [
        lambda: extender.create(claims_path(space), {"metadata": {"name": "mine"}, "spec": OF_OUR_CLASS}),
        lambda: extender.create(
            claims_path(space), {"metadata": {"name": "cardwise-0123456789abcdef"}, "spec": foreign}
        ),
    ]
    for attempt in tries:
        with refused("extender", text):
            attempt()
    changed = {names.ASSIGNMENT: "{}"}
    # Of several policies that refuse, the API server names now this one, now that one.
    with pytest.raises(errors.KubeError, match=r"'(extender|annotations)\.cardwise\.dev'"):
        extender.patch(pod_path(space, "victim"), {"metadata": {"annotations": changed}}, "merge")
    space.create(workload("plain", spec={"schedulingGates": [{"name": "example.com/mine"}]}))
    with refused("extender", "the extender may assign GPUs only to pods that wait for a claim of Cardwise"):
        extender.patch(pod_path(space, "plain"), {"metadata": {"annotations": changed}}, "merge")
    with refused("extender", "the extender may remove only Cardwise's gates"):
        extender.patch(pod_path(space, "plain"), {"spec": {"schedulingGates": None}}, "merge")
