"""What tests of whole clusters say over and over: make a pod, wait for it, see its card from outside and inside.

The fixture `space` is a namespace of one test: `space.nodes(4)` makes simulated nodes, `space.wait`, `space.placed`,
`space.refused` and others wait for an event. All of it ends with the test. One deadline, `PATIENCE`, decides how late a
broken test fails; there is no `time.sleep`, except for the pace of a test.

A file puts back what has no namespace; the fixture `cluster` compares at its end (`untouched`). With
`flags(cluster, "extender", "--policy=spread")` a part has more options for a while. A test that stops a part starts it
again and waits until it is ready.

What must not happen is shown by a later event: pods that must wait are refused (`space.refused`), then a later pod that
fits has its node (`space.put`).
"""

import functools
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import urllib3
import yaml

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import container
from tests.cluster import Cluster, PatientClient, simnodes
from tests.cluster.cards import DEFAULT, TestCard, write_inventory
from tests.cluster.images import IDLE
from tests.cluster.processes import PATIENCE, Process, wait_for

# A container tells which cards it sees and which it can open, also by a node of its own making; one line each, into
# the termination message, which needs no further call to read. Numbers of the node's cards are filled in.
PROBE = """
tell() { echo "$@" >> /dev/termination-log; }
for n in /dev/nvidia*; do [ -e $n ] && tell sees $n $(stat -c %%t:%%T $n); done
for card in %(cards)s; do
  i=${card%%%%=*}; n=${card#*=}; mknod /tmp/card$i c ${n%%%%:*} ${n#*:}
  if why=$( (exec 3</tmp/card$i) 2>&1 ); then tell opens $i; else tell refused $i ${why##*: }; fi
done
"""


def workload(name: str, containers: Sequence[Json] | None = None, **settings: Any) -> Json:
    """A pod; resources as keywords (`gpu_mem=8138`), and `command`, `node`, `annotations`, `init`, `grace`, `spec`."""
    special = {key: settings.pop(key, None) for key in ("command", "node", "annotations", "init", "grace", "spec")}
    spec: Json = {
        "terminationGracePeriodSeconds": special["grace"] if special["grace"] is not None else 1,
        "automountServiceAccountToken": False,
        "containers": list(containers or [container(**settings)]),
    }
    if special["command"]:
        spec["containers"][0]["command"] = ["sh", "-c", special["command"]]
    if special["node"]:
        spec["nodeSelector"] = {"kubernetes.io/hostname": special["node"]}
    if special["init"]:
        spec["initContainers"] = special["init"]
    metadata = {"name": name, "annotations": special["annotations"] or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | (special["spec"] or {})}


def deployment(name: str, replicas: int, **settings: Any) -> Json:
    """A Deployment of such pods."""
    pod = workload(name, **settings)
    template = {"metadata": {"labels": {"app": name}, "annotations": pod["metadata"]["annotations"]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}}
    spec["template"] = template | {"spec": pod["spec"]}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def account(name: str) -> Json:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}


def binding(name: str, role: str, *, account: str, of: str = "ClusterRoleBinding") -> Json:
    """Of the ClusterRole to the account "NAMESPACE:NAME"."""
    namespace, _, user = account.partition(":")
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": of, "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": user}],
    }  # fmt: skip


class Space:
    """A namespace of a cluster with what a test does in it, and its own simulated nodes where it makes some.

    As a context manager it leaves nothing behind that another test could feel.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.own_nodes: list[str] = []
        account = f"{paths.namespaces(name)}/serviceaccounts"
        for path, created_name in ((paths.namespaces(), name), (account, "default")):  # before its controller makes it
            with suppress(errors.Conflict):
                cluster.api.create(path, {"metadata": {"name": created_name}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # On nodes that go as well nobody would have to say that the containers have ended.
        self.clear(grace=0 if self.own_nodes and not self.cluster.nodes else 1)
        if self.own_nodes:
            simnodes.remove(self.cluster.api, self.own_nodes)
            self.own_nodes.clear()

    def nodes(self, count: int = 1, cards: Sequence[TestCard] = DEFAULT) -> list[str]:
        """Simulated nodes with these cards, which go with the space; the extender knows them. In a cluster of kind
        `sim` there are no others.
        """
        first = len(self.own_nodes)
        nodes = [f"{self.name}-{i:02}" for i in range(first, first + count)]
        self.own_nodes += nodes
        self.cluster.simulate(dict.fromkeys(nodes, cards))
        if self.cluster.has_parts:
            wanted = {(node, index) for node in nodes for index in range(len(cards))}
            self.wait(lambda: wanted <= inspect(self.cluster).keys(), "the extender knows the cards")
        return nodes

    def wait(self, ready: Callable[[], object], event: str, timeout: float = PATIENCE) -> None:
        try:
            self.cluster.wait(ready, event, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def kubectl(self, *args: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.name, *args, **options)

    def kubectl_json(self, *args: str, stdin: object = None) -> Json:
        return self.cluster.kubectl_object(*args, f"--namespace={self.name}", stdin=stdin)

    def apply(self, *objects: Json) -> None:
        """Server-side: what an earlier one said and these do not goes."""
        self.kubectl_json("apply", "--server-side", "--force-conflicts", stdin=objects)

    def editor(self, name: str, folder: Path) -> Path:
        """The kubeconfig of somebody with the ClusterRole `edit` in this namespace, and no other right."""
        self.kubectl_json("create", stdin=account(name))
        self.kubectl_json("create", stdin=binding(name, "edit", account=f"{self.name}:{name}", of="RoleBinding"))
        token = self.cluster.api.create(f"{paths.namespaces(self.name)}/serviceaccounts/{name}/token", {"spec": {}})
        config = yaml.safe_load((self.cluster.state_dir / "kubeconfig" / "admin").read_text())
        config["users"][0]["user"] = {"token": token["status"]["token"]}
        config["contexts"][0]["context"]["namespace"] = self.name
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(config))
        with closing(PatientClient.load(kubeconfig)) as client:
            self.wait(lambda: allowed(lambda: client.get(paths.pods(self.name))), "the API server knows the right")
        return kubeconfig

    def create(self, pod: Json) -> str:
        """Returns the UID."""
        created = self.cluster.api.create(paths.pods(self.name), pod)
        return str(created["metadata"]["uid"])

    def put_quota(self, *hard: Json, name: str = "team", **spec: object) -> None:
        """A GPUQuota, and the extender knows it."""
        quota = {"apiVersion": names.API_VERSION, "kind": "GPUQuota", "metadata": {"name": name}}
        self.apply(quota | {"spec": {"hard": list(hard)} | spec})
        self.wait(lambda: self.cluster.api.get(paths.gpuquotas(self.name, name)).get("status"), "the extender knows it")

    def delete(self, *pods: str, grace: int | None = None) -> None:
        """Without waiting for their end."""
        for name in pods:
            with suppress(errors.NotFound):
                self.cluster.api.delete(
                    paths.pods(self.name, name), None if grace is None else {"gracePeriodSeconds": grace}
                )

    def get(self, name: str) -> Json:
        return self.cluster.api.get(paths.pods(self.name, name))

    def pods(self) -> list[Json]:
        pods: list[Json] = self.cluster.api.get(paths.pods(self.name))["items"]
        return pods

    def phase(self, name: str) -> str:
        return str(self.get(name)["status"].get("phase", ""))

    def placed(self, name: str) -> tuple[str, str]:
        """Where the pod landed: node, and card indices as its annotation names them."""
        self.wait(lambda: self.get(name)["spec"].get("nodeName"), f"{name} has a node")
        return node_and_card(self.get(name))

    def running(self, *pods: str) -> None:
        """All of them run."""
        wanted = set(pods)

        def so() -> bool:
            phases = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in self.pods()}
            return all(phases.get(name) == "Running" for name in wanted)

        self.wait(so, f"{', '.join(pods)} run")

    def marked(self, name: str) -> None:
        """The device plugin has marked the pod, which it does in the background."""
        self.wait(lambda: self.get(name)["metadata"]["annotations"][names.ASSIGNED] == "true", f"{name} is marked")

    def wait_for_deletion(self, *pods: str) -> None:
        """None of them is there any more."""
        wanted = set(pods)
        self.wait(lambda: not wanted & {pod["metadata"]["name"] for pod in self.pods()}, f"{', '.join(pods)} are gone")

    def refused(self, name: str, reason: str = "") -> None:
        """kube-scheduler has tried the pod and says why it does not fit."""

        def is_refused() -> bool:
            conditions = self.get(name)["status"].get("conditions") or ()
            scheduled = [
                condition
                for condition in conditions
                if condition["type"] == "PodScheduled" and condition["status"] == "False"
            ]
            # With a gate nobody has tried it: the API server says so by itself.
            return any(
                condition["reason"] != "SchedulingGated" and reason in condition.get("message", "")
                for condition in scheduled
            )

        self.wait(is_refused, f"{name} is refused: {reason}")

    def rejected(self, pod: Json) -> str:
        """What is said to who would create the pod, once those who refuse it know why: they learn it by watches."""
        try_creation = functools.partial(self.cluster.api.create, paths.pods(self.name), pod, query={"dryRun": "All"})
        return str(self.refusal(try_creation, f"{pod['metadata']['name']} is refused"))

    def refusal(self, attempt: Callable[[], object], event: str) -> errors.KubeError:
        """The error of who asks by dry run for what is not allowed, once those who refuse it know why."""
        refusals: list[errors.KubeError] = []

        def so() -> bool:
            try:
                attempt()
            except (errors.Unreachable, errors.ServerError):
                raise  # nobody has judged it: `wait` asks again
            except errors.KubeError as error:
                refusals.append(error)
            return bool(refusals)

        self.wait(so, event)
        return refusals[0]

    def create_and_locate(self, pod: Json) -> tuple[str, str]:
        """Create and see where it lands."""
        self.create(pod)
        return self.placed(pod["metadata"]["name"])

    def inside(self, name: str, script: str, *, main: str = "main") -> str:
        return self.kubectl("exec", name, "-c", main, "--", "sh", "-c", script)

    def termination_message(self, name: str) -> list[str]:
        """The termination message of the pod's container."""
        state = self.get(name)["status"]["containerStatuses"][0]["state"]
        return str(state.get("terminated", {}).get("message", "")).splitlines()

    def reasons(self, name: str) -> str:
        """Messages of the pod's events."""
        query = {"fieldSelector": f"involvedObject.name={name}"}
        events = self.cluster.api.get(paths.events(self.name), query)["items"]
        return "\n".join(f"{event['reason']}: {event['message']}" for event in events)

    def clear(self, *, grace: int = 1) -> None:
        """Nothing left of what the test made: first who would make pods again, then the pods.

        With `grace` 0 the extender keeps the shares for a while, since no node has said that the containers have ended.
        """
        api, apps = self.cluster.api, f"/apis/apps/v1/namespaces/{self.name}"
        for path in (
            f"{apps}/deployments",
            f"{apps}/statefulsets",
            f"{apps}/daemonsets",
            f"{apps}/replicasets",
            f"/apis/batch/v1/namespaces/{self.name}/jobs",
        ):
            if api.get(path, {"limit": "1"})["items"]:
                api.delete(path, {"propagationPolicy": "Background"})

        def empty() -> bool:
            pods = self.pods()
            if any("deletionTimestamp" not in pod["metadata"] for pod in pods):
                api.delete(paths.pods(self.name), {"gracePeriodSeconds": grace}, timeout=PATIENCE)
            return not pods

        self.wait(empty, "the namespace is empty")

    def story(self) -> str:
        """Pods that have trouble, for a failed wait."""
        lines = []
        for pod in self.pods():
            name, status = pod["metadata"]["name"], pod["status"]
            lines.append(f"{name}: {status.get('phase')} at {node_and_card(pod)}; {self.reasons(name)[-600:]}")
        return "\n".join(lines)


def node_and_card(pod: Json) -> tuple[str, str]:
    annotations = pod["metadata"].get("annotations") or {}
    return str(pod["spec"].get("nodeName", "")), str(annotations.get(names.IDX, ""))


def assigned(pod: Json) -> Assignment:
    decoded = assignment.decode(pod["metadata"].get("annotations") or {})
    assert decoded is not None, f"{pod['metadata']['name']} has no assignment"
    return decoded


def device_numbers(cluster: Cluster, node: str) -> dict[str, str]:
    """ "major:minor" of each card of a real node, by index."""
    cards = yaml.safe_load((cluster.node(node).folder / "cards.yaml").read_text())["cards"]
    numbers = {}
    for card in cards:
        number = Path(card["device"]).stat().st_rdev
        numbers[str(card["index"])] = f"{os.major(number)}:{os.minor(number)}"
    return numbers


def probe(numbers: dict[str, str]) -> str:
    return PROBE % {"cards": " ".join(f"{index}={number}" for index, number in numbers.items())}


def probed(numbers: dict[str, str], index: str) -> list[str]:
    """What a container with this card must tell."""
    major, minor = (int(part) for part in numbers[index].split(":"))
    lines = [f"sees /dev/nvidia{index} {major:x}:{minor:x}"]
    return lines + [f"opens {i}" if i == index else f"refused {i} Operation not permitted" for i in numbers]


def inspect(cluster: Cluster) -> dict[tuple[str, int], tuple[int, int, dict[str, int]]]:
    """The extender's ledger as its users see it: total, used and MiB by pod, for each (node, card)."""
    pool, nodes = _extender(cluster.parts.ports["extender"], cluster.parts.tls_dir), []

    def answered() -> bool:
        try:
            answer = pool.request("GET", f"{names.EXTENDER_PREFIX}/inspect", timeout=PATIENCE, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise OSError(f"the extender does not answer: {error}") from error
        if answer.status != HTTPStatus.OK:  # it says so where a turn has taken half a second
            return False
        nodes[:] = answer.json()["nodes"]
        return True

    if not wait_for(answered):
        raise OSError("the extender does not answer")
    return {
        (node["name"], card["id"]): (
            card["totalGPU"],
            card["usedGPU"],
            {f"{pod['namespace']}/{pod['name']}": pod["usedGPU"] for pod in card["pods"]},
        )
        for node in nodes
        for card in node["devs"]
    }


@functools.cache
def _extender(port: int, tls: Path) -> urllib3.HTTPSConnectionPool:
    """It is asked many times a second, so the connections stay."""
    return urllib3.HTTPSConnectionPool("127.0.0.1", port, ssl_context=scheduler_tls(tls))


@functools.cache
def scheduler_tls(folder: Path) -> ssl.SSLContext:
    """What kube-scheduler shows the extender of a cluster; `folder`: `parts.tls_dir`."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "client.crt", folder / "client.key")
    return context


@contextmanager
def flags(cluster: Cluster, part: str, *extra: str) -> Iterator[None]:
    """`extender` or `webhook` runs with these options besides its own; those that come last count."""
    process = cluster.process(part)
    start_line = process.recorded
    assert start_line is not None
    try:
        _again(cluster, part, [*start_line.command, *extra])
        yield
    finally:
        _again(cluster, part, start_line.command)


@contextmanager
def program(cluster: Cluster, part: str, *command: str) -> Iterator[None]:
    """The part is started by this program of the tests, with the same options."""
    process = cluster.process(part)
    start_line = process.recorded
    assert start_line is not None
    try:
        _again(cluster, part, [sys.executable, "-m", *command, *start_line.command[1:]])
        yield
    finally:
        _again(cluster, part, start_line.command)


def _again(cluster: Cluster, part: str, command: Sequence[str]) -> None:
    process = cluster.process(part)
    start_line = process.recorded
    assert start_line is not None
    process.stop()
    process.start(command, start_line.environment)
    cluster.parts.wait_ready(part)


def allowed(attempt: Callable[[], object]) -> bool:
    """Not forbidden. The API server learns of roles and of what else it judges by through watches."""
    try:
        attempt()
    except errors.Forbidden:
        return False
    except errors.NotFound:
        pass
    return True


def prioritize(cluster: Cluster, classes: Mapping[str, int], *, preempts: bool = True) -> None:
    """PriorityClasses by name, which stay; `preempts`: pods of lower priority go for theirs."""
    policy = "PreemptLowerPriority" if preempts else "Never"
    for name, priority in classes.items():
        manifest = {"metadata": {"name": name}, "value": priority, "preemptionPolicy": policy}
        with suppress(errors.Conflict):
            cluster.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", manifest)
        probe = workload("probe", spec={"priorityClassName": name})
        ask = functools.partial(cluster.api.create, paths.pods("default"), probe, query={"dryRun": "All"})
        cluster.wait(functools.partial(allowed, ask), f"the API server knows {name}")


def wait_for_classes(space: Space, *classes: str) -> None:
    """Until the webhook takes a pod by these names; an automatic class comes a moment after its first card."""
    for name in classes:
        pod = workload("probe")
        pod["spec"]["containers"][0]["resources"] = {"limits": {name: 1}}

        def taken(pod: Json = pod, key: str = names.CLASS_PREFIX + name) -> bool:
            with suppress(errors.KubeError):
                stored = space.cluster.api.create(paths.pods(space.name), pod, query={"dryRun": "All"})
                return key in stored["spec"]["containers"][0]["resources"]["limits"]
            return False

        space.wait(taken, f"the webhook knows class {name}")


@contextmanager
def cards_of(cluster: Cluster, **nodes: Sequence[TestCard]) -> Iterator[None]:
    """Real nodes have these cards for a while, as when somebody plugs them in; by default two P100 each."""
    try:
        _plug_in(cluster, nodes)
        yield
    finally:
        _plug_in(cluster, dict.fromkeys(nodes, DEFAULT))


def _plug_in(cluster: Cluster, nodes: Mapping[str, Sequence[TestCard]]) -> None:
    for node, cards in nodes.items():
        write_inventory(cluster.node(node).folder, node, cards)
    wanted = {(node, index): card.memory_mib for node, cards in nodes.items() for index, card in enumerate(cards)}

    def known() -> bool:
        seen = {card: total for card, (total, _, _) in inspect(cluster).items() if card[0] in nodes}
        allocatable = {node: cluster.api.get(paths.nodes(node))["status"]["allocatable"] for node in nodes}
        return seen == wanted and all(
            allocatable[node].get(names.GPU_MEM) == str(sum(card.memory_mib for card in cards))
            for node, cards in nodes.items()
        )

    cluster.wait(known, "the nodes tell of their cards, and the extender knows them")


def cgroups(container: str) -> list[Path]:
    """The container's folders in the machine's cgroups, while those of others come and go."""
    named = {container, f"crio-{container}"}
    return [Path(root) / name for root, folders, _ in os.walk("/sys/fs/cgroup") for name in named.intersection(folders)]


def outlive_lease(cluster: Cluster) -> None:
    """Until the extender that leads, and stands still, does so no more: its lease is over."""

    def is_lease_over() -> bool:
        lease = cluster.api.get(paths.leases(names.NAMESPACE, names.LEASE))["spec"]
        since = datetime.now(UTC) - datetime.fromisoformat(lease["renewTime"])
        return since > timedelta(seconds=lease["leaseDurationSeconds"])

    cluster.wait(is_lease_over, "the lease is over")


def kill9(process: Process) -> None:
    """SIGKILL to the process and its workers, as when the machine takes a container away."""
    os.killpg(process.pid, signal.SIGKILL)  # it leads a session: see tests/cluster/processes.py
    process.kill()


__all__ = ["IDLE", "container"]
