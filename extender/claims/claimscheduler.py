"""Plays kube-scheduler's part for pods whose shares are allocated by ResourceClaim.

One thread takes the pods in the order of kube-scheduler's queue, finds the nodes that kube-scheduler would accept, and
asks the verbs of the extender as kube-scheduler does: filter chooses the node and reserves the GPUs, the permit waits
for the other members of a gang. Then threads publish the decisions (`claimwriter`), a gang's as a whole: all claims are
allocated before the first gate opens.

The nodes are those that are open, admit the pod by selector, required affinity and taints, and have the cpu, memory and
pods for it. Nodes that the pod's preferred node affinity prefers come first. What else kube-scheduler checks (ports,
volumes, other pods, spreading), the extender learns from its refusals (`cache.claimed`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import policies
from cardwise.core.values.decoded import Json
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.wording import pluralize
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.pods.nodeconstraints import MAX_AFFINITY_CONDITIONS, NodePreferences, count_affinity_conditions
from extender.api import verbs
from extender.api.verbs import AnswerSettings, NotifyFullQuota
from extender.binding import claimwriter
from extender.binding.claimwriter import ClaimFailed, ClaimGrant, ClaimWriter, PodChanged, PreparedGrant
from extender.cache.claimed import in_parts
from extender.cache.reservations import KnownBinding, Phase
from extender.claims import protection
from extender.claims.takeback import ClaimTakeBack
from extender.gangs.gangtypes import BindNow, BindRefused, Permit
from extender.leadership.fence import run_in_parallel
from extender.leadership.leadership import Leadership
from extender.queue.searchpauses import SearchPauses
from extender.records.claim import PendingByClaim
from extender.records.podref import PodRef
from extender.records.wire import FilterArgs, FilterResult
from extender.state import State

_log = structlog.get_logger(__name__)

_MAX_THREADS: Final = 16  # threads that publish
_PARALLEL_IN_GANG: Final = 16
_MAX_PODS_PER_STEP: Final = 64  # pods that are planned in one step, so that other work of the thread goes on
_MAX_PUBLISHING: Final = 64  # pods whose decisions are being published: more would only wait
_PASS_SECONDS: Final = 1.0  # seconds after which all pods are tried again, although no event says that one may fit
_PUBLISH_SECONDS: Final = 20.0  # seconds in which a decision must be published
_REFUSED_SECONDS: Final = 15.0  # back-off after an answer that the same write would get again, such as of a quota
_UNPROTECTED_SECONDS: Final = 1.0  # seconds between two checks of the policies that protect claims
# Maximum number of conditions of a pod that is planned. The webhook allows a third; then it adds some of its own, and a
# pod that is bound to the node of its first plan has one more in each term. A pod with an open gate may be changed.
_MAX_CONDITIONS: Final = 3 * MAX_AFFINITY_CONDITIONS
_MAX_REPORTED: Final = 4096  # pods whose last event is remembered
_PINNED_TEXT: Final = "the pod's affinity names the node of its first plan; delete the pod to have it placed elsewhere"


class _Arrived(NamedTuple):
    """A member of a gang that waits for the others, as it would in bind."""

    pod: PendingByClaim
    node: str
    permit: Permit


class _NodeSearches:
    """The nodes for the pods of one pass. To compare thousands of nodes takes 10 ms, and many pods are equal."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._nodes: dict[object, dict[str, int]] = {}  # by the fields of pods that decide
        self._planned: set[str] = set()

    def find_nodes(self, pod: PendingByClaim, manifest: Json) -> dict[str, int]:
        """As `Nominator.search_nodes`."""
        waiting, preferences = pod.waiting, NodePreferences.parse(manifest["spec"])
        key = waiting.constraints, waiting.load, preferences
        nodes = self._nodes.get(key)
        if nodes is None:
            nodes = self._nodes[key] = self._state.nominator.search_nodes(waiting, preferences)
        for node in self._planned & nodes.keys():
            if not self._state.nominator.has_free_load(waiting, node):
                del nodes[node]
        return nodes

    def mark_planned(self, node: str) -> None:
        """Record that a pod of this pass is planned on the node."""
        self._planned.add(node)


class ClaimScheduler:
    """Schedules pods by claim. `step` belongs to one thread.

    active: returns whether this extender leads and all lists are complete.
    notice: called if only a quota keeps a pod pending.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        events: Recorder,
        *,
        leadership: Leadership,
        preferences: AnswerSettings,
        active: Callable[[], bool],
        notice: NotifyFullQuota | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.on_outcome: Callable[[str], None] = lambda _: None  # called for metrics with the outcome of each claim
        self._client = client
        self._state = state
        self._events = events
        self._leadership = leadership
        self._preferences = preferences
        self._active = active
        self._notice = notice
        self._clock = clock
        self._writer = ClaimWriter(client, leadership, state.lowest_priority, clock)
        self._take_back = ClaimTakeBack(
            client,
            state,
            self._writer,
            self._thread_pool,
            on_refused=self._on_refused,
            on_given_twice=self._on_given_twice,
            clock=clock,
        )
        self._pool: ThreadPoolExecutor | None = None
        self._arrived: dict[str, _Arrived] = {}  # by UID
        self._publishing: set[str] = set()  # the pods whose decisions are being published
        self._epoch: int | None = None  # the epoch of the last step
        self._tried_at: object = None  # `State.may_fit_generation` before the last complete pass
        self._next_pass = float("-inf")
        self._search_pauses = SearchPauses(clock)  # of namespaces, after long searches for nodes
        self._reported: dict[str, str] = {}  # by UID, the text of the pod's last event

    def fence_claims(self, still_leads: Callable[[], bool]) -> bool:
        """Wait until claims are protected, and delete the unfinished claims of a former leader.

        Returns False if `still_leads` returned False before. See `ClaimTakeBack.fence_claims`.
        """
        return self._wait_until_protected(still_leads) and self._take_back.fence_claims(still_leads)

    def step(self) -> None:
        """Continue the gangs that are complete, take claims back, and plan the next pods."""
        epoch = self._leadership.epoch()
        if epoch is None or not self._active():
            self._arrived.clear()
            return
        if epoch != self._epoch:
            self._epoch, self._tried_at = epoch, None
            self._arrived.clear()
        self._take_back.step(epoch)
        self._publish_gangs(epoch)
        self._plan_pods(epoch)

    def stop(self) -> None:
        """Drop the work that has not begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _wait_until_protected(self, still_leads: Callable[[], bool]) -> bool:
        reported: str | None = None
        while still_leads():
            try:
                problem = protection.find_problem(self._client)
            except errors.KubeError as error:
                problem = f"the policies that protect claims cannot be read: {error}"
            if problem is None:
                return True
            if problem != reported:
                _log.warning("claims are not protected; this extender does not serve", problem=problem)
                reported = problem
            self._clock.sleep(_UNPROTECTED_SECONDS)
        return False

    # Planning.

    def _plan_pods(self, epoch: int) -> None:
        now, generation = self._clock.now(), self._state.may_fit_generation()
        if generation == self._tried_at and now < self._next_pass:
            return
        with self._state.claimed_pods() as claimed:
            queue, next_due = claimed.queue(), claimed.next_due()
        refused, search = set[object](), _NodeSearches(self._state)
        planned = 0
        for pod in self._due_pods(queue):
            if not self._active() or planned >= _MAX_PODS_PER_STEP or len(self._publishing) >= _MAX_PUBLISHING:
                return  # the next step continues
            if pod.ref.uid in self._arrived or pod.ref.uid in self._publishing or pod.shape in refused:
                continue
            if self._search_pauses.is_paused(pod.ref.namespace):
                continue
            manifest = pod.read_manifest()
            if self._has_too_many_conditions(pod.ref, manifest):
                continue
            if self._plan_pod(pod, manifest, search, epoch):
                planned += 1
            elif pod.gang is None:
                refused.add(pod.shape)
        self._tried_at, self._next_pass = generation, min(now + _PASS_SECONDS, next_due)

    def _due_pods(self, queue: Sequence[tuple[int, str, str]]) -> Iterator[PendingByClaim]:
        for part in in_parts([uid for _, _, uid in queue]):
            with self._state.claimed_pods() as claimed:
                pods = claimed.due_pods(part)
            yield from pods

    def _has_too_many_conditions(self, pod: PodRef, manifest: Json) -> bool:
        """Whether the search for nodes would hold up other pods; an event says so."""
        conditions = count_affinity_conditions(manifest["spec"])
        if conditions <= _MAX_CONDITIONS:
            return False
        text = f"spec.affinity.nodeAffinity: {conditions} conditions are too many to search nodes for the pod"
        self._report(pod, f"{text}; write at most {MAX_AFFINITY_CONDITIONS}")
        return True

    def _plan_pod(self, pending: PendingByClaim, manifest: Json, search: _NodeSearches, epoch: int) -> bool:
        """Choose the pod's node and begin to publish it. Returns False if the pod fits no node now."""
        pod = pending.waiting
        with self._state.claimed_pods() as claimed:
            avoided = claimed.avoided_nodes(pod.uid)
        start_cpu = self._clock.cpu()
        weights = search.find_nodes(pending, manifest)
        self._search_pauses.charge_search(pending.ref.namespace, self._clock.cpu() - start_cpu)
        offered = {node: weight for node, weight in weights.items() if node not in avoided}
        # Nodes with a higher weight come first, as far as GPUs are free there. Members of a gang are planned together.
        groups: list[Collection[str]] = [offered.keys()]
        if pending.gang is None and len(set(offered.values())) > 1:
            by_weight = sorted(set(offered.values()), reverse=True)
            groups = [{node for node in offered if offered[node] == weight} for weight in by_weight]
        answers = list[FilterResult]()
        for group in groups:
            args = FilterArgs(pod=manifest, node_names=sorted(group))
            answers.append(verbs.filter_nodes(self._state, self._preferences, args, self._notice, by_claim=True))
            if answers[-1].node_names:
                break
        answer = answers[-1]
        if not answer.node_names:
            text = _refusal_text(answers, avoided & weights.keys())
            is_pinned = not pending.gated and claimwriter.is_pinned(manifest["spec"])
            self._report(pending.ref, f"{text}; {_PINNED_TEXT}" if is_pinned else text)
            return False
        node = answer.node_names[0]
        search.mark_planned(node)
        self._begin_bind(pending, node, epoch)
        return True

    def _begin_bind(self, pod: PendingByClaim, node: str, epoch: int) -> None:
        match self._state.gangs.request_permit(pod.ref.uid, node):
            case Permit() as permit:
                self._arrived[pod.ref.uid] = _Arrived(pod, node, permit)
            case BindRefused(reason):
                _log.debug("a member of a gang is tried again", pod=pod.ref.pod, uid=pod.ref.uid, reason=reason)
            case BindNow():
                self._submit([(pod, node)], epoch)

    def _publish_gangs(self, epoch: int) -> None:
        """Publish the gangs whose last member has arrived, and forget those whose plan has ended."""
        complete: dict[str, list[tuple[PendingByClaim, str]]] = {}
        for uid, arrived in list(self._arrived.items()):
            with self._state.claimed_pods() as claimed:
                is_pending = claimed.get(uid) is not None
            if not arrived.permit.done.is_set() and is_pending:
                continue
            del self._arrived[uid]
            if arrived.permit.done.is_set() and arrived.permit.allowed:
                complete.setdefault(arrived.permit.key, []).append((arrived.pod, arrived.node))
        for members in complete.values():
            self._submit(members, epoch)

    # Publishing.

    def _submit(self, members: Sequence[tuple[PendingByClaim, str]], epoch: int) -> None:
        self._publishing.update(pod.ref.uid for pod, _ in members)
        self._thread_pool().submit(self._run, members, epoch)

    def _run(self, members: Sequence[tuple[PendingByClaim, str]], epoch: int) -> None:
        try:
            self._publish(members, epoch)
        except Exception:  # noqa: BLE001 - the outermost frame of a thread's work
            pod = members[0][0].ref
            _log.exception("failed to publish a decision", pod=pod.pod, uid=pod.uid)
        finally:
            self._publishing.difference_update(pod.ref.uid for pod, _ in members)

    def _publish(self, members: Sequence[tuple[PendingByClaim, str]], epoch: int) -> None:
        """Publish the decision for a pod, or for all members of a gang; none is bindable before all are ready."""
        deadline = self._clock.now() + _PUBLISH_SECONDS
        grants = [grant for pod, node in members if (grant := self._assume(pod, node, epoch)) is not None]
        if len(grants) < len(members):
            for grant in grants:
                self._state.record_binding_outcome(grant.pod.uid, None)  # nothing was written
            return
        outcomes: dict[str, Phase] = {grant.pod.uid: Phase.UNCONFIRMED for grant in grants}
        try:
            prepared = [
                done
                for done in run_in_parallel(partial(self._prepare, deadline), grants, _PARALLEL_IN_GANG)
                if done is not None
            ]
            if len(prepared) == len(grants):
                committed = run_in_parallel(partial(self._commit, deadline), prepared, _PARALLEL_IN_GANG)
                outcomes |= {
                    grant.pod.uid: Phase.ALLOCATED for grant, is_done in zip(grants, committed, strict=True) if is_done
                }
        finally:
            for uid, phase in outcomes.items():
                self._state.record_binding_outcome(uid, phase)
                self.on_outcome("allocated" if phase is Phase.ALLOCATED else "failed")

    def _assume(self, pod: PendingByClaim, node: str, epoch: int) -> ClaimGrant | None:
        """Reserve the cards until the outcome is recorded. None if the pod cannot be placed on the node any more."""
        request = pod.waiting.request if pod.claim is not None else None
        policy = policies.card_policy(pod.waiting.request.policy, self._preferences.policy)
        assumed = self._state.assume(pod.ref, request, node, policy, epoch=epoch, by_claim=True)
        if isinstance(assumed, KnownBinding):
            return None
        if isinstance(assumed, Refusal):
            self._report(pod.ref, f"node {node}: {assumed.text}")
            return None
        return ClaimGrant(
            pod=pod.ref,
            claim=pod.claim,
            gated=pod.gated,
            node=node,
            assignment=assumed.assignment,
            env_access=assumed.env_access,
            epoch=epoch,
        )

    def _prepare(self, deadline: float, grant: ClaimGrant) -> PreparedGrant | None:
        """Returns None if a write has failed."""
        try:
            return self._writer.prepare(grant, deadline)
        except ClaimFailed as error:
            self._on_write_failed(grant, error)
            return None

    def _commit(self, deadline: float, prepared: PreparedGrant) -> bool:
        """Returns whether the last write has succeeded."""
        try:
            self._writer.commit(prepared, deadline)
        except ClaimFailed as error:
            self._on_write_failed(prepared.grant, error)
            return False
        return True

    def _on_write_failed(self, grant: ClaimGrant, error: ClaimFailed) -> None:
        if isinstance(error, PodChanged):
            return  # the watch shows the change
        if error.is_refusal:
            self._take_back.set_backoff(grant.pod.uid, _REFUSED_SECONDS)
            self._report(grant.pod, str(error))
        _log.info("failed to publish a claim", pod=grant.pod.pod, uid=grant.pod.uid, error=str(error))

    # Events and metrics.

    def _on_refused(self, pod: PodRef, node: str, reason: str) -> None:
        self.on_outcome("refused")
        self._report(pod, f"node {node}: {reason}")

    def _on_given_twice(self, pod: PodRef, node: str) -> None:
        problem = f"the pod was bound to node {node} without its ResourceClaim, and another pod has its GPU"
        self._report(pod, f"{problem}; one of them is evicted before it starts")

    def _report(self, pod: PodRef, text: str) -> None:
        """Record why the pod waits, if the reason has changed."""
        if self._reported.pop(pod.uid, None) != text:
            self._events.record(pod.about, "FailedScheduling", text, "Warning")
        self._reported[pod.uid] = text
        if len(self._reported) > _MAX_REPORTED:
            del self._reported[next(iter(self._reported))]

    def _thread_pool(self) -> ThreadPoolExecutor:
        # Created late, because threads do not survive the fork: a child of the process that created this object serves.
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="claims")
        return self._pool


def _refusal_text(answers: Sequence[FilterResult], avoided: Collection[str]) -> str:
    """Why the pod has no node, as kube-scheduler says it."""
    if answers[-1].error:
        return answers[-1].error
    counts = Counter[str]()
    for answer in answers:
        counts.update(answer.failed_nodes.values())
        counts.update(answer.failed_and_unresolvable_nodes.values())
    reasons = [f"{count} {text}" for text, count in counts.most_common()]
    if avoided:
        reasons.append(f"{len(avoided)} kube-scheduler refused the node")
    if not reasons:
        return "no open node admits the pod and has the cpu and memory for it"
    total = counts.total() + len(avoided)
    return f"0/{pluralize(total, 'node')} with cpu and memory fit: {', '.join(reasons)}"
