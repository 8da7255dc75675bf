"""The world of `blackbox` with scheduler.mode=claims: its kube-scheduler has no extender, and obeys allocated claims.

Pods come as the webhook leaves them. kube-scheduler schedules a pod whose gate is open and whose claim is allocated: it
binds the pod to the node of the allocation by a Binding that names only the UID. As the real one, it decides by what it
has read before: between its choice and the Binding it may be paused. A node may be one that it refuses.
"""

import contextlib
import math
from typing import Any

from cardwise.core.api import claims, names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.fakes.apiserver import ApiServer, Request
from tests.property.blackbox import LEASE, Refused, World
from tests.property.judge import Given, Judge, Share, asks, gang_of, is_over, node_of

CLAIMS = paths.resourceclaims()
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


class ClaimsJudge(Judge):
    """Adds what kube-scheduler may bind at any moment: pods with an open gate and an allocated claim."""

    def _bound(self, pod: Json) -> None:
        super()._bound(pod)
        if asks(pod) and self._world.allocation_of(pod) is not None:
            self.check_claim(pod)

    def check_claim(self, pod: Json) -> None:
        """Check that the bound pod has its claim, and that the claim says what the pod's annotations say."""
        name, allocation = pod["metadata"]["name"], self._world.allocation_of(pod)
        assert allocation is not None, (name, "bound without a claim")
        granted = {share.uuid: share.mem for share in self.bound_pods[pod["metadata"]["uid"]].shares}
        assert allocation.node == node_of(pod), (name, "bound elsewhere")
        assert {share.uuid: share.mem for share in allocation.assignment.shares()} == granted, (
            name,
            "pod and claim do not say the same",
        )

    def _check_epoch(self, pod: Json, binding: Given) -> None:
        """A pod that a former leader has allocated may be bound later than one of this leader."""

    def _came(self, gang: tuple[str, str]) -> list[Json]:
        """The members that can be bound: all claims are allocated before the first gate opens."""
        members = self._members(gang)
        return [pod for pod in members if not pod["spec"].get("schedulingGates") or self._world.allocation_of(pod)]

    def _holders(self) -> dict[str, Given]:
        return self._bindable() | super()._holders()

    def _bindable(self) -> dict[str, Given]:
        bindable = {}
        for uid in self._there:
            pod = self._pods[uid]
            allocation = self._world.bindable_allocation(pod)
            if allocation is not None and not node_of(pod):
                shares = tuple(
                    Share(share.index, share.uuid, share.mem, share.core, share.whole)
                    for share in allocation.assignment.shares()
                )
                bindable[uid] = Given(pod["metadata"]["name"], allocation.node, shares)
        return bindable


class ClaimsWorld(World):
    judges = ClaimsJudge

    def __post_init__(self) -> None:
        self.settings = {**self.settings, "claims": True}
        super().__post_init__()
        self.refusing: dict[str, int] = {}  # by node, how many of the next pods kube-scheduler refuses there
        self.deallocates = True  # whether it deallocates then

    def _begin(self) -> None:
        protect_claims(self.api)
        super()._begin()
        self.api.before_request(self._stand, "patch", "*/resourceclaims/*", times=math.inf)
        self.api.before_request(self._stand, "create", "*/resourceclaims", times=math.inf)
        self.api.before_request(self._stand, "patch", "*/pods/*", times=math.inf)

    def arrives(self, choice: int, behind: bool) -> None:
        """Let a delayed write arrive."""
        if self.late:
            call = self.late.pop(choice % len(self.late))
            self.behind, standing, self.standing = behind, self.standing, 0
            client = self.api.client(user_agent="late")
            with contextlib.suppress(errors.KubeError):
                if call.verb == "create":
                    client.request("POST", call.path, body=call.body)
                else:
                    content = call.headers.get("Content-Type", "application/merge-patch+json")
                    client.request("PATCH", call.path, body=call.body, content_type=content)
            self.behind, self.standing = False, standing

    def _check_fencing(self, call: Request) -> None:
        """The admission policies of the chart: they refuse what names an ended epoch."""
        if self.behind or not isinstance(call.body, dict):
            return
        if call.verb == "create" and call.path.endswith("/resourceclaims"):
            text = call.body["metadata"].get("annotations", {}).get(names.LEADER_EPOCH, "")
        elif call.verb == "patch" and "schedulingGates" in (call.body.get("spec") or {}):
            text = (call.body["metadata"].get("annotations") or {}).get(names.LEADER_EPOCH, "")
        else:
            return
        lease = self.api.get(LEASE)
        if text and lease is not None and int(text.split("/")[3]) < lease["spec"]["leaseTransitions"]:
            raise Refused(422, f"{names.LEADER_EPOCH}: the leader epoch is over")

    def is_struck(self, turns: int, extender: int, kill: bool) -> None:
        """Pause or kill an extender after some turns of the threads."""
        self.clock.take_turns(turns)
        if kill:
            self.is_killed(extender)
        else:
            self.stands_still(extender, still=True)

    # Users.

    def _asking(self, name: str, **arguments: Any) -> Json:
        pod = super()._asking(name, **arguments)
        spec = pod["spec"]
        if not (asks(pod) or gang_of(pod)):
            return pod
        spec["schedulingGates"] = [{"name": names.ALLOCATION_GATE}]
        resources = spec["containers"][0]["resources"]
        resources["limits"].pop(names.SHARE, None)
        if asks(pod):
            self.claims_made = getattr(self, "claims_made", 0) + 1
            claim = claims.format_name(self.claims_made.to_bytes(8, "big"))
            spec["resourceClaims"] = [{"name": names.POD_CLAIM, "resourceClaimName": claim}]
            resources["claims"] = [{"name": names.POD_CLAIM, "request": "main"}]
        else:
            resources["limits"] = {}
        return pod

    # kube-scheduler and the controllers of Kubernetes.

    def refuses(self, node: str, times: int, deallocates: bool) -> None:
        """Let kube-scheduler refuse the next pods on the node."""
        self.refusing[node] = times
        self.deallocates = deallocates

    def claim_of(self, pod: Json) -> Json | None:
        """The pod's claim, if it owns it."""
        name = claims.claim_name(pod)
        if name is None:
            return None
        claim = self.api.get(paths.resourceclaims(pod["metadata"]["namespace"], name))
        owners = claim["metadata"].get("ownerReferences", []) if claim is not None else []
        return claim if any(owner["uid"] == pod["metadata"]["uid"] for owner in owners) else None

    def bindable_allocation(self, pod: Json) -> claims.Allocation | None:
        """The allocation by which kube-scheduler may bind the pod now."""
        if pod["spec"].get("schedulingGates") or is_over(pod) or not asks(pod):
            return None
        return self.allocation_of(pod)

    def allocation_of(self, pod: Json) -> claims.Allocation | None:
        claim = self.claim_of(pod)
        return claims.decode(claim) if claim is not None else None

    def waits(self, pod: Json) -> bool:
        return super().waits(pod) and (not asks(pod) or self.bindable_allocation(pod) is not None)

    def _schedule(self, path: str, uid: str, to: int, *, whole: bool) -> None:
        del to, whole
        pod = self.api.get(path)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        allocation = self.bindable_allocation(pod)
        node = allocation.node if allocation is not None else pod["status"].get("nominatedNodeName")
        if node is None:
            return
        self.clock.pause()
        client = self.api.client(user_agent="kube-scheduler")
        open_nodes = {
            entry["metadata"]["name"] for entry in self.api.all(paths.nodes()) if not entry["spec"].get("unschedulable")
        }
        with contextlib.suppress(errors.KubeError):
            if node not in open_nodes or self.refusing.get(node):
                self.refusing[node] = max(0, self.refusing.get(node, 0) - 1)
                if self.deallocates and allocation is not None:
                    self._deallocate(pod, client)
                client.patch(path + "/status", {"status": {"conditions": [UNSCHEDULABLE]}}, "merge")
                return
            meta = pod["metadata"]
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            body = {"metadata": {"name": meta["name"], "uid": uid}, "target": target}
            client.create(path + "/binding", body)

    def loses_its_claim(self, choice: int) -> None:
        """Let an administrator delete the claim of a bound pod by force."""
        bound = [pod for pod in self.pods() if node_of(pod) and asks(pod) and not is_over(pod)]
        claim = self.claim_of(bound[choice % len(bound)]) if bound else None
        if claim is not None:
            self.api.remove(path_of_claim(claim))

    def _deallocate(self, pod: Json, client: Any) -> None:
        claim = self.claim_of(pod)
        if claim is None:
            return
        metadata = {key: claim["metadata"][key] for key in ("uid", "resourceVersion")}
        body = {"metadata": metadata, "status": {"allocation": None, "reservedFor": None}}
        client.patch(path_of_claim(claim) + "/status", body, "merge")

    def quiet(self) -> None:
        super().quiet()
        self.clock.run(10, stride=1.0)
        for pod in self.pods():
            if node_of(pod) and asks(pod) and not is_over(pod) and not pod["metadata"].get("deletionTimestamp"):
                self.judge.check_claim(pod)

    def _work(self) -> None:
        for pod in sorted(self.pods(), key=lambda other: -other["spec"].get("priority", 0)):
            if self.waits(pod):
                self._try(pod, 0)
                self.clock.run()
        self.ends_deleted()
        self.collects_garbage()
        self.clock.run(0.5, stride=0.25)

    def collects_garbage(self) -> None:
        """Delete the claims of pods that are gone."""
        uids = {pod["metadata"]["uid"] for pod in self.pods()}
        for claim in self.api.all(CLAIMS):
            if not any(owner["uid"] in uids for owner in claim["metadata"].get("ownerReferences", [])):
                self.api.remove(path_of_claim(claim))


def protect_claims(api: ApiServer) -> None:
    """The chart's policies and their bindings, without their expressions."""
    for name in claims.POLICIES:
        api.write_object(paths.validatingadmissionpolicies(), {"metadata": {"name": name}, "spec": {}})
        spec = {"policyName": name, "validationActions": ["Deny"]}
        api.write_object(paths.validatingadmissionpolicybindings(), {"metadata": {"name": name}, "spec": spec})


def path_of_claim(claim: Json) -> str:
    return paths.resourceclaims(claim["metadata"]["namespace"], claim["metadata"]["name"])
