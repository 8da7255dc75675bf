"""What tests of tenants say over and over: who a tenant is, what he tries, and who is to refuse it with which words."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.build import container, pod
from tests.cluster import Cluster, PatientClient, pki
from tests.integration.sharing import Space, allowed, inspect

RBAC_PATH = "/apis/rbac.authorization.k8s.io/v1"
# What some clusters give to those who debug, beyond `edit` and making namespaces. Cardwise must hold against them too.
MORE = ("pods/ephemeralcontainers", "pods/resize", "pods/status", "pods/binding", "podgroups/status")


class By(StrEnum):
    """Who refuses, as the page says it."""

    RBAC = "RBAC"
    KUBERNETES = "Kubernetes"
    POD_SECURITY = "Pod Security"
    QUOTA = "ResourceQuota"
    WEBHOOK = "webhook"
    EXTENDER = "extender"
    NODE = "node"
    ANNOTATIONS = "annotations.cardwise.dev"
    BINDINGS = "bindings.cardwise.dev"
    ENVIRONMENT = "environment.cardwise.dev"
    GANGS = "gangs.cardwise.dev"
    GPU_MEM_UNIT = "gpumemunit.cardwise.dev"
    HOST_PATHS = "hostpaths.cardwise.dev"
    NAMESPACES = "namespaces.cardwise.dev"
    NODE_NAME = "nodename.cardwise.dev"
    PODGROUPS = "podgroups.cardwise.dev"
    STATUS = "status.cardwise.dev"
    RUNTIME_CLASSES = "runtimeclasses.cardwise.dev"


def told_by(by: By) -> str:
    """What a refusal says when it comes from there."""
    if by.endswith(".cardwise.dev"):
        return f"ValidatingAdmissionPolicy '{by}'"
    return {
        By.RBAC: " cannot ",
        By.POD_SECURITY: "violates PodSecurity",
        By.QUOTA: "exceeded quota",
        By.WEBHOOK: "admission webhook",
    }.get(by, "")


class Tenant:
    """A ServiceAccount with the ClusterRole `edit` in two namespaces, and one that has `MORE` and may make others.

    `guarded` is a namespace with what docs/security.md asks of the cluster's administrator: Pod Security and quotas.
    """

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self.space = Space(cluster, name)
        self.guarded = Space(cluster, f"{name}-guarded")
        rules = [
            {"apiGroups": ["", "cardwise.dev"], "resources": list(MORE), "verbs": ["create", "update", "patch", "get"]}
        ]
        roles = f"{RBAC_PATH}/namespaces/{name}/roles"
        cluster.api.create(roles, {"metadata": {"name": "more"}, "rules": rules})
        with ExitStack() as stack:
            self.edit = self._client("tenant", ("ClusterRole", "edit"))
            stack.callback(self.edit.close)
            self.debugger = self._client("debugger", ("ClusterRole", "edit"), ("Role", "more"))
            stack.callback(self.debugger.close)
            stack.callback(cluster.api.delete, f"{RBAC_PATH}/clusterrolebindings/{name}")
            stack.callback(cluster.api.delete, f"{RBAC_PATH}/clusterroles/{name}")
            making = [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["create"]}]
            cluster.api.create(f"{RBAC_PATH}/clusterroles", {"metadata": {"name": name}, "rules": making})
            self._bind(f"{RBAC_PATH}/clusterrolebindings", name, "debugger", "ClusterRole", name)
            for try_call in (
                lambda: self.edit.get(self.path_of("pods")),
                lambda: self.edit.get(paths.pods(self.guarded.name)),
                lambda: self.debugger.get(self.path_of("pods", "nobody", "ephemeralcontainers")),
                lambda: self.debugger.create(
                    paths.namespaces(), {"metadata": {"name": "any"}}, query={"dryRun": "All"}
                ),
            ):
                cluster.wait(lambda try_call=try_call: allowed(try_call), "the API server knows the roles")
            self._clients = stack.pop_all()

    def close(self) -> None:
        self._clients.close()

    def path_of(self, kind: str, name: str = "", sub: str = "", base: str = "/api/v1") -> str:
        """The path of what lies in his namespace."""
        return paths.namespaced(base, kind, self.space.name, *filter(None, [name, sub]))

    def mib_by_card(self) -> dict[str, int]:
        """MiB that the extender says his pods hold, by card."""
        mine = (f"{self.space.name}/", f"{self.guarded.name}/")
        return {
            f"{node}/{index}": sum(mib for pod_name, mib in pods.items() if pod_name.startswith(mine))
            for (node, index), (_, _, pods) in inspect(self.cluster).items()
        }

    def posing(self, user: str) -> object:
        """Reads his own pods by another's name."""
        client = PatientClient.load(self._folder / "tenant")
        try:
            client.get(self.path_of("pods"))  # with a token it renews its headers at the first call
            client._headers[""]["Impersonate-User"] = user
            return client.get(self.path_of("pods"))
        finally:
            client.close()

    def _bind(self, path: str, name: str, account: str, kind: str, role: str) -> None:
        subject = {"kind": "ServiceAccount", "name": account, "namespace": self.space.name}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role}
        self.cluster.api.create(path, {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})

    def _client(self, account: str, *roles: tuple[str, str]) -> KubeClient:
        own = f"/api/v1/namespaces/{self.space.name}/serviceaccounts"
        self.cluster.api.create(own, {"metadata": {"name": account}})
        for space in (self.space, self.guarded):
            for kind, role in roles:
                if kind == "Role" and space is self.guarded:
                    continue
                self._bind(
                    f"{RBAC_PATH}/namespaces/{space.name}/rolebindings", f"{account}-{role}", account, kind, role
                )
        answer = self.cluster.api.create(f"{own}/{account}/token", {"spec": {"expirationSeconds": 3600}})
        kubeconfig = pki.kubeconfig(
            self._folder / account,
            server=self.cluster.control_plane.url,
            ca=self.cluster.state_dir / "pki" / "ca.crt",
            token=answer["status"]["token"],
        )
        return PatientClient.load(kubeconfig)


@dataclass(frozen=True, slots=True)
class Try:
    """One call of the API that must be refused: by whom, and what the refusal names."""

    act: Callable[[Tenant], object]
    by: By
    says: tuple[str, ...] = ()

    def refused(self, tenant: Tenant) -> None:
        before = tenant.mib_by_card()
        try:
            response = self.act(tenant)
        except errors.KubeError as error:
            message = str(error)
        else:
            raise AssertionError(f"was not refused: {response}")
        for text in (told_by(self.by), *self.says):
            assert text in message, f"{text!r} is not in: {message}"
        after = tenant.mib_by_card()  # less where a pod of another test has ended meanwhile
        assert all(mib <= before.get(card, 0) for card, mib in after.items()), f"{before} became {after}"


@dataclass(frozen=True, slots=True)
class Attack:
    """An attempt of a tenant, which `make docs` lists. `tries` are refused at once; what `came` of a pod that ran is
    judged later, by those in `late`. `since`: the minor of Kubernetes that has what is attacked.
    """

    id: str
    title: str
    tries: Sequence[Try] = ()
    late: Sequence[By] = ()
    since: int = 0

    @property
    def refused_by(self) -> str:
        return ", ".join(dict.fromkeys([*(attempt.by for attempt in self.tries), *self.late]))


def ours(**settings: Any) -> Json:
    """A pod that asks for a share."""
    return pod("attack", gpu_mem=settings.pop("gpu_mem", 64), **settings)


def plain(**settings: Any) -> Json:
    """A pod that asks for nothing."""
    return pod("attack", containers=[container()], **settings)


def with_spec(pod: Json, **spec: Any) -> Json:
    pod["spec"] |= spec
    return pod


def with_env(pod: Json, *, field: str = "containers", **env: Any) -> Json:
    """`env`: values, or where one is a mapping, its `valueFrom`."""
    entries = [
        {"name": name} | ({"valueFrom": source} if isinstance(source, dict) else {"value": source})
        for name, source in env.items()
    ]
    pod["spec"].setdefault(field, [container("early")])[0]["env"] = entries
    return pod


def with_host_path(pod: Json, path: str) -> Json:
    return with_spec(pod, volumes=[{"name": "host", "hostPath": {"path": path}}])


def creates(manifest: Json, by: By, *says: str, guarded: bool = False) -> Try:
    """The pod that must not be created."""

    def act(tenant: Tenant) -> object:
        namespace = (tenant.guarded if guarded else tenant.space).name
        return tenant.edit.create(
            paths.pods(namespace), manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}
        )

    return Try(act, by, says)


def patches(name: str, change: Json, by: By, *says: str, sub: str = "", as_debugger: bool = False) -> Try:
    """The change of a pod of his that must not be made."""

    def act(tenant: Tenant) -> object:
        client = tenant.debugger if as_debugger else tenant.edit
        return client.patch(tenant.path_of("pods", name, sub), change, "strategic")

    return Try(act, by, says)


def created(path: str | Callable[[Tenant], str], by: By, *says: str, **manifest: Any) -> Try:
    """What is no pod and must not be created."""
    named = {"metadata": {"name": "attack"}} | manifest
    return Try(lambda tenant: tenant.edit.create(_at(path, tenant), named), by, says)


def changed(path: str | Callable[[Tenant], str], by: By, *says: str, **change: Any) -> Try:
    """What is no pod and must not be changed."""
    return Try(lambda tenant: tenant.edit.patch(_at(path, tenant), change), by, says)


def _at(path: str | Callable[[Tenant], str], tenant: Tenant) -> str:
    return path if isinstance(path, str) else path(tenant)


def annotated(**annotations: str) -> Json:
    return {"metadata": {"annotations": dict(annotations)}}


def debugged(**fields: Any) -> Json:
    """What `kubectl debug` sends."""
    return {"spec": {"ephemeralContainers": [container("debug") | {"resources": {}} | fields]}}


def one_container(**fields: Any) -> Json:
    return with_spec(plain(), containers=[container() | fields])


def amount(text: str) -> Json:
    return ours(gpu_mem=text)


def bound(tenant: Tenant, name: str, *, as_debugger: bool, dry: bool = False, **metadata: Json) -> object:
    """A Binding by hand."""
    client = tenant.debugger if as_debugger else tenant.edit
    binding = {
        "metadata": {"name": name} | metadata,
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
    }
    return client.create(tenant.path_of("pods", name, "binding"), binding, query={"dryRun": "All"} if dry else None)


def bound_at_last(tenant: Tenant, name: str) -> object:
    """Raises what refuses it, by dry run: the API server goes on without a webhook that is late (T65)."""
    ask = functools.partial(bound, tenant, name, as_debugger=True, dry=True)
    raise tenant.space.refusal(ask, f"the Binding of {name} is refused")


def binds(name: str, key: str, text: str, field: str = "annotations") -> Try:
    """The Binding by one who debugs that must not be made, since the pod would take this over from it."""
    metadata = {field: {key: text if field == "annotations" else "1"}}
    says = (f"metadata.{field}[{key}]", "leave it out of the Binding")
    return Try(lambda tenant: bound(tenant, name, as_debugger=True, **metadata), By.BINDINGS, says)
