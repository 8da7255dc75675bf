"""Checks the rules of the architecture in a world of `blackbox`, by its API server and the running containers."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths

if TYPE_CHECKING:
    from tests.property.blackbox import Card, World


SETTLED_SECONDS = 60.0  # the same, where nothing is wrong
HEARD_SECONDS = 180.0  # after which each extender acts by what nodes and administrators have said


class Share(NamedTuple):
    """The part of a card that a pod holds."""

    index: int
    uuid: str
    mem: int
    core: int
    whole: bool


class Given(NamedTuple):
    """A pod that was bound."""

    pod: str
    node: str
    shares: tuple[Share, ...]


class User(NamedTuple):
    """A pod on a card: the isolation that it demands, its namespace, and whether it shares cards there only."""

    isolation: str
    namespace: str
    exclusive: bool

    def may_be_beside(self, others: Sequence["User"]) -> bool:
        return all(other.namespace == self.namespace or not (other.exclusive or self.exclusive) for other in others)


class Judge:
    """Sees only the API server, and the containers on the nodes."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._fresh = world.api.follow(paths.pods(), lags=False)
        self._requests_seen = 0  # requests that it has seen
        self.bound_pods: dict[str, Given] = {}  # by UID, all that were ever bound
        self._holding: dict[str, Given] = {}  # pods that are there
        self._epoch = -1
        self._pods: dict[str, Json] = {}  # by UID, all that there ever were, as they were last
        self._there: set[str] = set()  # UIDs of those that are
        self._quotas = {namespace: [(-math.inf, hard)] for namespace, hard in world.quotas.items()}  # and since when
        self._changed: dict[str, float] = {}  # when cards of a node changed
        self.minimums: dict[tuple[str, str], int] = {}  # of gangs, as their PodGroups say

    def quota(self, namespace: str, hard: Json) -> None:
        self._quotas.setdefault(namespace, []).append((self._world.clock.now(), hard))

    def cards_change(self, node: str) -> None:
        self._changed[node] = self._world.clock.now()

    def check(self) -> None:
        world = self._world
        assert not world.errors, world.errors
        assert not world.clock.failed, world.clock.failed
        for event in self._fresh():
            self._hear(event["type"], event["object"])
        self._cards()
        self._untouched()

    def _hear(self, kind: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        self._pods[uid] = pod
        if kind == "DELETED":
            self._there.discard(uid)
        else:
            self._there.add(uid)
        if kind == "DELETED" or is_over(pod) or not node_of(pod):
            self._holding.pop(uid, None)
            return
        new = uid not in self.bound_pods
        if new:
            self._bound(pod)
        self._holding[uid] = self.bound_pods[uid]
        if new:
            self._cards()
            self._within_quota(pod["metadata"]["namespace"])

    def _bound(self, pod: Json) -> None:
        """Check a Binding: it has the requested amounts on cards of its node, is not of an ended epoch, and binds the
        whole gang.
        """
        binding = read_binding(pod)
        self.bound_pods[pod["metadata"]["uid"]] = binding
        cards = self._world.machines[binding.node].cards
        for share in binding.shares:
            assert share.uuid == f"GPU-{binding.node}-{share.index}", (binding, "a card of another node")
            assert share.index < len(cards), (binding, "no such card")
            assert self._is_asked(pod, cards[share.index]), (binding, "a card of another class, or without MPS")
            if self._is_settled(binding.node):
                assert cards[share.index].usable, (binding, "a card that takes nothing new")
        limits = limits_of(pod)
        if names.WHOLE_GPU in limits:
            assert len(binding.shares) == limits[names.WHOLE_GPU], binding
            assert all(share.whole for share in binding.shares), binding
        elif names.GPU_MEM in limits:
            count = split_of(pod)
            assert sorted(share.mem for share in binding.shares) == [limits[names.GPU_MEM] // count] * count, binding
        assert len({share.index for share in binding.shares}) == len(binding.shares), binding
        self._check_epoch(pod, binding)
        if gang := gang_of(pod):
            assert len(self._came(gang)) >= self._minimum(pod), (binding, "its gang has never been complete")

    def _check_epoch(self, pod: Json, binding: Given) -> None:
        epoch = int(pod["metadata"]["annotations"].get(names.LEADER_EPOCH, "///-1").split("/")[3])
        assert epoch >= self._epoch, (binding, f"bound in epoch {epoch}, after one of epoch {self._epoch}")
        self._epoch = epoch

    def _is_settled(self, node: str) -> bool:
        """Whether all changes of the node's cards must have reached the extenders, and earlier decisions have ended."""
        since = max(self._world.troubled, self._changed.get(node, -math.inf))
        return self._world.clock.now() > since + SETTLED_SECONDS

    def _is_asked(self, pod: Json, card: "Card") -> bool:
        """Whether the pod may use a card of this class."""
        wanted = class_of(pod)
        if wanted and card.model not in self._world.classes[wanted]:
            return False
        if names.WHOLE_GPU in limits_of(pod):
            return True  # a whole card meets each demand, and runs without MPS
        isolation = isolation_of(pod)
        if isolation == "mps" and not card.mps:
            return False
        return isolation == "none" or not card.mps or split_of(pod) == 1

    def _came(self, gang: tuple[str, str]) -> list[Json]:
        """The members that have reached bind, where all members that do not run yet wait for each other."""
        return [pod for pod in self._members(gang) if pod["metadata"]["name"] in self._world.calls]

    def _minimum(self, pod: Json) -> int:
        """The minimum of members of the gang."""
        minimum = self.minimums.get(gang_of(pod) or ("", ""))
        return minimum or int(pod["metadata"]["annotations"][names.GROUP_NUM])

    def _members(self, gang: tuple[str, str]) -> list[Json]:
        """All members that ever existed."""
        return [pod for pod in self._pods.values() if gang_of(pod) == gang]

    def _cards(self) -> None:
        users = self._users()
        for (node, index), shares in self._used().items():
            card = self._world.machines[node].cards[index]
            mem, modes = card.mem, {user.isolation == "none" for user in users[node, index]}
            assert sum(share.mem for share in shares) <= mem, ("over-full", node, index, shares)
            assert sum(share.core for share in shares) <= 100, ("over-full", node, index, shares)
            assert len(shares) == 1 or not any(share.whole for share in shares), ("not whole", node, index, shares)
            assert not card.mps or len(modes) == 1, ("with MPS beside one without", node, index, shares)
            apart = all(user.may_be_beside(users[node, index]) for user in users[node, index])
            assert apart, ("beside a pod of another namespace", node, index, users[node, index])

    def _users(self) -> dict[tuple[str, int], list[User]]:
        """By card, its pods."""
        users: dict[tuple[str, int], list[User]] = {}
        for uid, binding in self._holders().items():
            for share in binding.shares:
                users.setdefault((binding.node, share.index), []).append(user_of(self._pods[uid]))
        return users

    def _used(self) -> dict[tuple[str, int], list[Share]]:
        used: dict[tuple[str, int], list[Share]] = {}
        for binding in self._holders().values():
            for share in binding.shares:
                used.setdefault((binding.node, share.index), []).append(share)
        return used

    def _holders(self) -> dict[str, Given]:
        return {uid: binding for uid, (_, binding) in self._world.running.items()} | self._holding

    def _within_quota(self, namespace: str) -> None:
        """Check a namespace by the limits that an extender may have read, on cards that it has surely read."""
        since = self._world.clock.now() - HEARD_SECONDS
        versions = self._quotas.get(namespace, [])
        known = [hard for i, (_, hard) in enumerate(versions) if i + 1 == len(versions) or versions[i + 1][0] > since]
        used = [self._charged(namespace, hard, since) for hard in known]
        within = any(map(_fits, used, known))
        assert not known or within, ("above the quota", namespace, used, known)

    def _charged(self, namespace: str, hard: Json, since: float | None = None) -> Json:
        """The amounts that the namespace holds on cards of the entry.

        since: leaves out cards that are not reported, and cards of nodes that have changed since then: an extender may
            not have read them.
        """
        shares = []
        for uid, binding in self._holders().items():
            machine = self._world.machines[binding.node]
            for share in binding.shares:
                card = machine.cards[share.index]
                sure = since is None or (
                    machine.known and card.there and self._changed.get(binding.node, -math.inf) < since
                )
                if self._pods[uid]["metadata"]["namespace"] == namespace and sure and self._covers(hard, card):
                    shares.append(share)
        return _charge([(share.mem, share.whole) for share in shares])

    def _covers(self, hard: Json, card: "Card") -> bool:
        wanted = hard.get("class")
        return not wanted or card.model in self._world.classes[wanted]

    def _untouched(self) -> None:
        """Check that pods without a GPU request are not delayed."""
        for call in self._world.api.requests[self._requests_seen :]:
            if call.verb in ("create", "update", "patch", "delete") and call.headers["User-Agent"] != "user":
                assert "/plain" not in call.path, (call.verb, call.path)
        self._requests_seen = len(self._world.api.requests)

    # Checks without faults.

    def room(self) -> list[int]:
        """The free MiB of cards, the largest first."""
        used = self._used()
        return sorted(
            (
                card.mem - sum(share.mem for share in used.get((node, index), []))
                for node, machine in self._world.machines.items()
                for index, card in enumerate(machine.cards)
                if machine.known and not machine.cordoned and card.usable
            ),
            reverse=True,
        )

    def unplaced_pods(self) -> list[str]:
        """Pods that fit and are pending, and gangs that are bound in part."""
        there = [self._pods[uid] for uid in sorted(self._there)]
        waiting = [pod for pod in there if not node_of(pod) and not pod["metadata"].get("deletionTimestamp")]
        alone = [pod["metadata"]["name"] for pod in waiting if asks(pod) and not gang_of(pod) and self.fit([pod])]
        gangs = sorted({gang_of(pod) for pod in there} - {None})
        return alone + [self._gang_left(gang, waiting) for gang in gangs if self._gang_left(gang, waiting)]

    def _gang_left(self, gang: tuple[str, str], waiting: Sequence[Json]) -> str:
        members = self._members(gang)
        bound = [pod for pod in members if pod["metadata"]["uid"] in self.bound_pods]
        there = [pod for pod in bound if pod["metadata"]["uid"] in self._holding]
        minimum = self._minimum(members[0])
        if there and len(bound) < minimum:
            return f"{len(bound)} of the gang {gang}"
        mine = [pod for pod in waiting if gang_of(pod) == gang]
        if mine and len(mine) + len(there) >= minimum and self.fit(mine):
            return f"the gang {gang}"
        return ""

    def fit(self, pods: Sequence[Json]) -> bool:
        """Whether all these pods surely fit: each takes the first cards on which it fits."""
        used, users = self._used(), self._users()
        namespace = pods[0]["metadata"]["namespace"]
        versions = self._quotas.get(namespace)
        hard = versions[-1][1] if versions else {}
        held = self._charged(namespace, hard)
        for pod in pods:
            limits, split = limits_of(pod), split_of(pod)
            if not asks(pod):
                continue
            first = self._first(pod, used, users)
            if first is None:
                return False
            node, indices = first
            whole = names.WHOLE_GPU in limits
            for index in indices:
                card = self._world.machines[node].cards[index]
                mem = card.mem if whole else limits[names.GPU_MEM] // split
                share = Share(index, "", mem, limits.get(names.GPU_CORE, 0), whole=whole)
                used.setdefault((node, index), []).append(share)
                users.setdefault((node, index), []).append(user_of(pod))
                # Its class is unknown, so it counts in every entry.
                held = _sum_of(held, _charge([(mem, whole)]))
        return _fits(held, hard)

    def _first(
        self, pod: Json, used: dict[tuple[str, int], list[Share]], users: dict[tuple[str, int], list[User]]
    ) -> tuple[str, list[int]] | None:
        limits = limits_of(pod)
        whole = names.WHOLE_GPU in limits
        count = limits[names.WHOLE_GPU] if whole else split_of(pod)
        mem, core, off = (
            limits.get(names.GPU_MEM, 0) // count,
            limits.get(names.GPU_CORE, 0),
            isolation_of(pod) == "none",
        )
        for node, machine in self._world.machines.items():
            if not machine.known or machine.cordoned:
                continue
            findings = []
            for i, card in enumerate(machine.cards):
                shares = used.get((node, i), [])
                room = sum(share.mem for share in shares) + mem <= card.mem
                room &= sum(share.core for share in shares) + core <= 100
                room &= not (shares if whole else any(share.whole for share in shares))
                room &= not card.mps or all((user.isolation == "none") == off for user in users.get((node, i), []))
                room &= user_of(pod).may_be_beside(users.get((node, i), []))
                if room and card.usable and self._is_asked(pod, card):
                    findings.append(i)
            if len(findings) >= count:
                return node, findings[:count]
        return None


def read_binding(pod: Json) -> Given:
    """The assignment in the pod's annotations, parsed without Cardwise's code."""
    document = json.loads(pod["metadata"]["annotations"].get(names.ASSIGNMENT, '{"containers": {}}'))
    shares = [
        Share(index, uuid, mem, core, whole=bool(whole and whole[0]))
        for of_container in document["containers"].values()
        for index, uuid, mem, core, _, *whole in of_container
    ]
    return Given(pod["metadata"]["name"], pod["spec"]["nodeName"], tuple(shares))


def gang_of(pod: Json) -> tuple[str, str] | None:
    """Namespace and name of its gang."""
    name = labels_of(pod).get(names.GANG)
    return (pod["metadata"]["namespace"], name) if name else None


def labels_of(pod: Json | None) -> Json:
    return (pod or {}).get("metadata", {}).get("labels") or {}


def isolation_of(pod: Json) -> str:
    """The isolation that the pod demands: none, advisory or mps."""
    return pod["metadata"]["annotations"].get(names.ISOLATION, "advisory")


def user_of(pod: Json) -> User:
    metadata = pod["metadata"]
    return User(isolation_of(pod), metadata["namespace"], names.SHARE_WITH in metadata["annotations"])


def class_of(pod: Json) -> str:
    """The ResourceClass that the pod requests; "" for none."""
    return next(filter(None, map(names.class_of, limits_of(pod))), "")


def _charge(shares: Sequence[tuple[int, bool]]) -> Json:
    """The charge of these shares or whole cards, by the fields of a GPUQuota."""
    return {
        "shares": len(shares),
        "memoryMiB": sum(mem for mem, _ in shares),
        "gpus": sum(whole for _, whole in shares),
    }


def _sum_of(amounts: Json, other: Json) -> Json:
    return {name: amounts[name] + other[name] for name in amounts}


def _fits(used: Json, hard: Json) -> bool:
    return all(used[name] <= limit for name, limit in hard.items() if name in used)


def limits_of(pod: Json) -> dict[str, int]:
    return {name: int(amount) for name, amount in pod["spec"]["containers"][0]["resources"].get("limits", {}).items()}


def split_of(pod: Json) -> int:
    """The number of cards over which the pod's share is split."""
    return int(pod["metadata"]["annotations"].get(names.GPU_COUNTS, "main=1").removeprefix("main="))


def asks(pod: Json) -> bool:
    return bool({names.GPU_MEM, names.WHOLE_GPU} & limits_of(pod).keys())


def path_of(pod: Json) -> str:
    return paths.pods(pod["metadata"]["namespace"], pod["metadata"]["name"])


def node_of(pod: Json) -> str:
    return pod["spec"].get("nodeName") or ""


def is_over(pod: Json) -> bool:
    return pod["status"]["phase"] in names.FINISHED_PHASES
