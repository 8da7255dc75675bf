"""The verb bind: posts the Binding, the single write that contains both the node and the annotations with the cards.

The binder handles lost responses, repeated calls, and pods that were deleted and created again with the same name.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment, names, policies
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import PodRequest
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.refusals import Refusal
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from extender.binding.permit import Connection, WaitingBinds
from extender.binding.throttle import BindThrottle
from extender.cache.reservations import Assumed, KnownBinding, Phase
from extender.gangs.gangtypes import BindNow, BindRefused, Permit
from extender.leadership.fence import Fence, PodState, run_in_parallel
from extender.leadership.leadership import Leadership
from extender.records.pod import Pod
from extender.records.podref import PodRef
from extender.records.wire import BindArgs
from extender.state import State

_log = structlog.get_logger(__name__)

_READ_SECONDS = 5.0  # seconds for one read of the pod
# Seconds after which a pass starts no further look-up: expired plans and terminating pods are handled only afterwards.
_LOOK_UP_PASS_SECONDS = 2.0
_LOOK_UP_TIMEOUT = 1.0  # seconds for one look-up
_MAX_PARALLEL_LOOK_UPS = 8  # look-ups at the same time
_POST_SECONDS = 10.0  # seconds for one attempt to post; without a response the pod is read then
_MAX_PARALLEL_POSTS = (
    16  # maximum number of parallel posts: further ones would only wait, in the API server and in this process
)
_PERMIT_FRACTION = 0.75  # the fraction of a call's time in which a gang member may wait for the other members
_BOUND_PHASES = (Phase.ACCEPTED, Phase.BOUND)
_NOT_LEADER_TEXT = "this extender no longer holds the lease; another extender serves the call"


class BindFailed(Exception):
    """The call has not bound the pod. kube-scheduler writes the text into the pod's events.

    outcome: the label for the metrics.
    unconfirmed: whether a Binding of this or an earlier call may still bind the pod.
    """

    def __init__(self, outcome: str, text: str, *, unconfirmed: bool = False) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.unconfirmed = unconfirmed


class _EpochEnded(Exception):
    """The leader epoch in which the call began is over: another extender may bind pods now."""


class _ReadOutcome(Enum):
    OURS = "ours"
    UNBOUND = "unbound"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Binding:
    """The Binding to post. Each attempt posts the same node, cards and epoch, so it does not matter which attempt
    succeeds.

    version: the pod's resourceVersion, read before the epoch was last checked. A later attempt may use a newer version.
        The API server binds the pod only if the pod still has this version, so after any change of the pod the Binding
        has no effect (`fence`).
    """

    args: BindArgs
    assignment: Assignment | None
    version: str
    annotations: dict[str, str]

    def body(self) -> dict[str, Any]:
        args = self.args
        # The UID identifies this pod, not another one that was created with its name since.
        preconditions = {"uid": args.pod_uid, "resourceVersion": self.version}
        return {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": args.pod_name, "annotations": self.annotations} | preconditions,
            "target": {"apiVersion": "v1", "kind": "Node", "name": args.node},
        }


class Binder:
    """Binds pods. Thread-safe.

    policy: the placement policy of pods that name none.
    seconds: how long after its arrival a call may post; `leadership` may allow less.
    outdated_watches: returns the interrupted watches, one line for each (`Informers.outdated_watches`); no pod is bound
        while there are any.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        *,
        policy: str,
        seconds: float,
        leadership: Leadership | None = None,
        outdated_watches: Callable[[], list[str]] = list,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._state = state
        self._outdated_watches = outdated_watches
        self._policy = policy
        self._seconds = seconds
        self._leadership = leadership or Leadership()
        self._clock = clock
        self._posting = 0
        self._post_slot = threading.Condition()  # guards `_posting`; notified when a post ends
        self.throttle = BindThrottle(clock)
        self._permits = WaitingBinds(state.gangs.cancel_permit, clock)

    def bind(
        self,
        args: BindArgs,
        *,
        arrived: float | None = None,
        connection: Connection | None = None,
        may_wait: bool = True,
    ) -> str:
        """Bind the pod, unless it is bound to this node already. Returns the outcome for metrics.

        arrived: when the call arrived, in seconds of the clock; None: now. Since then the call may have waited for a
        thread.
        connection: the connection of the call; when it closes, the wait for the gang is cancelled.
        may_wait: whether the call may wait for other members of a gang.

        Raises BindFailed.
        """
        if arrived is None:
            arrived = self._clock.now()
        epoch = self._leadership.epoch()
        if epoch is None:
            raise BindFailed("standby", _NOT_LEADER_TEXT)
        self._wait_on_permit(args, arrived, connection, may_wait=may_wait)
        with self.throttle.count_bind():
            return self._bind(args, arrived + self._seconds, epoch)

    def _wait_on_permit(self, args: BindArgs, arrived: float, connection: Connection | None, *, may_wait: bool) -> None:
        """Wait until all members of the pod's gang have reached bind. Does not wait if the gang is being bound already.

        Raises BindFailed.
        """
        if self._state.known_binding(args.pod_uid) is not None:
            return
        if not may_wait and self._state.gangs.must_wait(args.pod_uid):
            raise BindFailed(
                "gang_not_bound", "members of gangs wait in bind, so they must use the address of --bind-port-bind"
            )
        match self._state.gangs.request_permit(args.pod_uid, args.node):
            case BindNow():
                return
            case BindRefused(reason):
                raise BindFailed("gang_not_bound", reason)
            case Permit() as permit:
                seconds = arrived + self._seconds * _PERMIT_FRACTION - self._clock.now()
                self._permits.wait_for_permit(permit, args.pod_name, connection, seconds)
                if not permit.allowed:
                    raise BindFailed("gang_not_bound", f"the gang {permit.key} was not bound: {permit.reason}")
            case answer:
                assert_never(answer)

    def _bind(self, args: BindArgs, deadline: float, epoch: int) -> str:
        known_binding = self._state.known_binding(args.pod_uid)
        if known_binding is not None and known_binding.phase in _BOUND_PHASES:
            return _known_binding_outcome(known_binding, args)
        with self._state.queue() as queue:
            taken_request = queue.take_request(args.pod_uid)
        request, version = taken_request or self._read_request(args)
        if known_binding is not None and known_binding.phase is Phase.ALLOCATED and known_binding.node == args.node:
            # The pod has its claim, and kube-scheduler is configured to let the extender bind: scheduler.mode was
            # changed. The Binding says the same as the claim.
            self._post(_Binding(args, known_binding.assignment, version, {}), deadline, epoch, unconfirmed=False)
            return "bound"
        pod = PodRef(args.pod_uid, args.pod_namespace, args.pod_name)
        policy = policies.card_policy(request.policy if request is not None else None, self._policy)
        # A member of a gang may have waited for minutes since the call arrived.
        if outdated := self._outdated_watches():
            raise BindFailed("not_ready", f"not ready: {outdated[0]}")
        assumed = self._state.assume(pod, request, args.node, policy, epoch=epoch)
        if isinstance(assumed, KnownBinding):
            return _known_binding_outcome(assumed, args)
        if isinstance(assumed, Refusal):
            raise BindFailed("refused", assumed.text)
        phase: Phase | None = Phase.UNCONFIRMED  # if an unexpected exception is raised
        try:
            self._post(
                self._make_binding(args, assumed, version, epoch), deadline, epoch, unconfirmed=assumed.unconfirmed
            )
            phase = Phase.ACCEPTED
        except BindFailed as failed:
            phase = Phase.UNCONFIRMED if failed.unconfirmed else None
            raise
        finally:
            self._state.record_binding_outcome(args.pod_uid, phase)
        return "bound"

    def _read_request(self, args: BindArgs) -> tuple[PodRequest | None, str]:
        """Read a pod for which this process has not served filter; returns the pod's request and resourceVersion.

        Raises BindFailed.
        """
        try:
            pod = Pod(self._client.get(paths.pods(args.pod_namespace, args.pod_name), timeout=_READ_SECONDS))
        except errors.NotFound as error:
            raise BindFailed("deleted", "the pod no longer exists") from error
        except errors.KubeError as error:
            raise BindFailed("api_error", f"cannot read the pod: {error}") from error
        if pod.uid != args.pod_uid:
            raise BindFailed("deleted", "the pod was deleted, and another pod has its name")
        try:
            return pod.request, pod.version
        except InvalidRequest as error:
            raise BindFailed("invalid", str(error)) from error

    def _make_binding(self, args: BindArgs, assumed: Assumed, version: str, epoch: int) -> _Binding:
        chosen_cards, annotations = assumed.assignment, {}
        if chosen_cards is not None:
            now = self._clock.wall_ns()
            annotations = assignment.encode(chosen_cards, assume_time_ns=now, env_access=assumed.env_access)
        if fencing_token := self._leadership.fencing_token(epoch):
            annotations[names.LEADER_EPOCH] = fencing_token
        return _Binding(args, chosen_cards, version, annotations)

    def _post(self, binding: _Binding, deadline: float, epoch: int, *, unconfirmed: bool) -> None:
        """Post until it is certain whether the pod is bound, or until the deadline or the end of the epoch.

        unconfirmed: whether an earlier call has posted the same Binding and got no response. Then only a read of the
            pod shows whether that Binding has bound the pod.

        Raises BindFailed.
        """
        path = paths.pods(binding.args.pod_namespace, binding.args.pod_name, "binding")
        backoff, reposted = Backoff(initial=0.05, cap=2.0), False
        problem = "the deadline passed before the Binding was posted"
        while self._clock.now() < deadline:
            wait, version = None, binding.version
            try:
                if not self._post_once(path, binding.body(), deadline, epoch):
                    break
            except _EpochEnded as error:
                raise BindFailed("standby", _NOT_LEADER_TEXT, unconfirmed=unconfirmed) from error
            except errors.Conflict as error:
                pod_read = self._read_pod(binding, deadline, unconfirmed=unconfirmed)
                if pod_read is _ReadOutcome.OURS:
                    return
                # The pod has changed or is bound, perhaps by this Binding: a proxy may have sent the request twice.
                unconfirmed |= pod_read is _ReadOutcome.UNKNOWN
                problem = str(error)
                if binding.version != version and not reposted:
                    reposted = True  # the pod was changed since it was read, and is not bound
                    continue
            except errors.TooManyRequests as error:
                # This request was not carried out. But a proxy may have sent it twice, and this may be the second
                # response.
                unconfirmed = True
                problem, wait = str(error), error.retry_after
            except (errors.ServerError, errors.Unreachable) as error:
                # The API server may carry out the request, now or later; posting the same Binding again does no harm.
                unconfirmed = True
                problem = str(error)
                if self._read_pod(binding, deadline, unconfirmed=True) is _ReadOutcome.OURS:
                    return
            except errors.NotFound as error:
                # If the response to an earlier attempt was lost, the pod may have been bound, and may have run before
                # it was deleted.
                raise BindFailed("deleted", "the pod no longer exists", unconfirmed=unconfirmed) from error
            except errors.KubeError as error:
                # A proxy may have sent the request twice, and this may be the response to the second request.
                pod_read = self._read_pod(binding, deadline, unconfirmed=unconfirmed)
                if pod_read is _ReadOutcome.OURS:
                    return
                unconfirmed |= pod_read is _ReadOutcome.UNKNOWN
                raise BindFailed(
                    "api_error", f"the API server refused the binding: {error}", unconfirmed=unconfirmed
                ) from error
            else:
                return
            pause = backoff.next_delay(wait)
            if self._clock.now() + pause >= deadline:
                break
            self._clock.sleep(pause)
        raise BindFailed("api_error", f"not bound in time: {problem}", unconfirmed=unconfirmed)

    def _post_once(self, path: str, body: dict[str, Any], deadline: float, epoch: int) -> bool:
        """Post once. Returns False if the deadline passed before the post.

        Raises KubeError, and _EpochEnded if the epoch is over.
        """
        with self._post_slot:
            if not self._clock.wait_for(
                self._post_slot, lambda: self._posting < _MAX_PARALLEL_POSTS, deadline - self._clock.now()
            ):
                return False
            self._posting += 1
        try:
            with self._leadership.allow_post(epoch) as allowed_seconds:
                # Compute the remaining time immediately before the request.
                remaining = deadline - self._clock.now()
                if remaining <= 0:
                    return False
                if allowed_seconds <= 0:
                    raise _EpochEnded
                with self.throttle.measure_post():
                    self._client.request(
                        "POST", path, body=body, timeout=min(_POST_SECONDS, remaining, allowed_seconds)
                    )
        finally:
            with self._post_slot:
                self._posting -= 1
                self._post_slot.notify()
        return True

    def _read_pod(self, binding: _Binding, deadline: float, *, unconfirmed: bool) -> _ReadOutcome:
        """Read the pod, and let the next attempt bind the version that was read.

        unconfirmed: whether a Binding without a response may have bound the pod. Then the pod may have run before it
            was deleted.

        Raises BindFailed if this call cannot bind the pod.
        """
        args = binding.args
        path = paths.pods(args.pod_namespace, args.pod_name)
        try:
            manifest = self._client.get(path, timeout=max(0.5, min(_READ_SECONDS, deadline - self._clock.now())))
        except errors.NotFound as error:
            raise BindFailed("deleted", "the pod no longer exists", unconfirmed=unconfirmed) from error
        except errors.KubeError as error:
            full_name = f"{args.pod_namespace}/{args.pod_name}"
            _log.info(
                "failed to read the pod after a failed Binding", pod=full_name, uid=args.pod_uid, error=str(error)
            )
            return _ReadOutcome.UNKNOWN
        pod = Pod(manifest)
        if pod.uid != args.pod_uid:
            raise BindFailed("deleted", "the pod was deleted, and another pod has its name", unconfirmed=unconfirmed)
        if not pod.node and pod.terminating:
            # The API server binds no pod that is being deleted, so no earlier Binding can bind this pod any more.
            raise BindFailed("deleted", "the pod is being deleted")
        if not pod.node:
            binding.version = pod.version
            return _ReadOutcome.UNBOUND
        if pod.node == args.node and _read_assignment(pod) == binding.assignment:
            return _ReadOutcome.OURS
        raise BindFailed("conflict", f"another program bound the pod to node {pod.node}")


def confirm_bindings(
    due: Sequence[PodRef], fence: Fence, state: State, leadership: Leadership, *, clock: Clock = SYSTEM
) -> None:
    """Find out the outcome of Bindings that no watch event has confirmed in time, by one consistent read of each pod.

    due: the pods, from `State.overdue_bindings`. A pod whose look-up does not start within `_LOOK_UP_PASS_SECONDS` is
        looked up by a later call.

    The leader releases a reservation only after it has fenced the pod; if fencing fails, the reservation stays. A
    standby keeps all reservations, since it needs them if it becomes leader again. If another extender leads in
    between, the next epoch reads all pods anyway. If a look-up fails, it is repeated after the look-ups of all other
    pods.
    """
    until, epoch = clock.now() + _LOOK_UP_PASS_SECONDS, leadership.epoch()
    if epoch is None and leadership.is_uninterrupted():
        return

    def confirm_binding(pod: PodRef) -> None:
        if clock.now() >= until:
            return
        try:
            pod_state = fence.read_state(pod, timeout=_LOOK_UP_TIMEOUT)
            if pod_state is PodState.UNBOUND and epoch is not None:
                pod_state = fence.fence_pod(pod, leadership.fencing_token(epoch), timeout=_LOOK_UP_TIMEOUT)
        except errors.KubeError as error:
            _log.info("failed to read a bound pod", pod=pod.pod, uid=pod.uid, error=str(error))
            pod_state = PodState.UNFENCED
        if pod_state is PodState.UNFENCED:
            state.on_lookup_failed(pod.uid)
        else:
            bound = pod_state in (PodState.BOUND, PodState.BOUND_BY_OTHER)
            state.on_lookup(pod.uid, bound=bound, exists=pod_state is not PodState.DELETED)

    run_in_parallel(confirm_binding, due, _MAX_PARALLEL_LOOK_UPS)


def _known_binding_outcome(known_binding: KnownBinding, args: BindArgs) -> str:
    if known_binding.phase not in _BOUND_PHASES:
        raise BindFailed("in_progress", "another bind of this pod is in progress")
    if known_binding.node != args.node:
        raise BindFailed("conflict", f"the pod is bound to node {known_binding.node} already")
    return "already_bound"


def _read_assignment(pod: Pod) -> Assignment | None:
    try:
        return assignment.decode(pod.annotations)
    except assignment.InvalidAssignment:
        return None
