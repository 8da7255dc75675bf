"""Moves pods by the plan of `cardwise defrag`, one after another, and stops at the first deviation from the plan."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import click

from cardwise.cli import console
from cardwise.cli.cluster import cordons, movables, workloads
from cardwise.clock import Clock
from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.defrag.moving import Move
from cardwise.core.placement.holding import Holding
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.extendedresources import Cordon, ExtendedResource
from cardwise.kube.pods import eviction

_POLL_SECONDS: Final = 1.0  # pause between two reads of the pods, and after a cordon until the extender observes it
_EVICTION_RETRY_SECONDS: Final = (
    5.0  # pause between two requests to evict a pod that a disruption budget protects, as in kubectl drain
)


@dataclass(slots=True)
class MoveRun:
    """One run of `cardwise defrag --evict`.

    timeout: seconds to wait until the eviction of a pod is allowed, and again until its replacement is ready.
    """

    client: KubeClient
    timeout: float
    clock: Clock
    _written_cordons: dict[str, Cordon] = field(
        default_factory=dict
    )  # card name -> the last cordon that this run wrote

    def cordon_cards(self, holding: Holding, stack: ExitStack) -> None:
        """Cordon the cards of a pod until the run ends, in any way. Cards that were cordoned before stay cordoned.

        A cordon of another defrag is replaced, since that defrag was killed. A card whose cordon has changed since the
        plan was made is left as it is.

        Raises `ClickException` and `KubeError`.
        """
        for share in holding.assignment.shares():
            # Find the card by its UUID: after a failure of a card and a reboot, the index may belong to another card.
            card = cordons.find_card(self.client, share.uuid or f"{holding.node}/{share.index}")
            written_cordon = self._written_cordons.get(card.metadata.name)

            def may_replace(current: ExtendedResource, written_cordon: Cordon | None = written_cordon) -> bool:
                return not current.spec.unschedulable or (
                    current.spec.cordon != written_cordon and cordons.is_cordoned_by_defrag(current)
                )

            if not may_replace(card):
                continue
            cordon = self._written_cordons[card.metadata.name] = cordons.new_defrag_cordon(self.client)
            stack.callback(self.restore_card, card, cordon)  # before the write, since its response may be lost
            try:
                if not cordons.write_cordon(self.client, card, cordon, may_replace):
                    continue
            except errors.Forbidden as error:
                raise self._stop_error(
                    f"{cordons.describe_card(card)} cannot be cordoned with your rights ({error.message}): it needs "
                    "the ClusterRole cardwise-drain; or use --no-cordon"
                ) from error
            console.print_text(f"{cordons.describe_card(card)} cordoned", err=True)
            self.clock.sleep(_POLL_SECONDS)

    def restore_card(self, card: ExtendedResource, cordon: Cordon) -> None:
        """Remove this run's cordon, unless a user or another defrag has replaced it.

        If the removal fails, or a second Ctrl-C interrupts it, the command that uncordons the card is printed.
        """
        failure = "interrupted"
        try:
            if cordons.remove_cordon(self.client, card, cordon):
                console.print_text(f"{cordons.describe_card(card)} uncordoned", err=True)
            failure = ""
        except errors.KubeError as error:
            failure = str(error)
        finally:
            if failure:
                uncordon_hint = cordons.uncordon_command(card)
                console.print_text(
                    f"{cordons.describe_card(card)} is still cordoned ({failure}); uncordon it with: {uncordon_hint}",
                    err=True,
                )

    def move_pod(self, move: Move, pod: Json, progress: str) -> None:
        """Evict the pod and wait for its replacement.

        progress: the number of the move, such as "1/3", for messages.

        Raises `ClickException` at any deviation from the plan, and `KubeError`.
        """
        name = f"{move.before.namespace}/{move.before.name}"
        owner_uid = workloads.controller_of(pod)["uid"]
        uids_before = self._evict(move, pod, name, progress)
        deadline = self.clock.now() + self.timeout
        while (replacement := self._find_ready_replacement(move, owner_uid, uids_before, name)) is None:
            if self.clock.now() >= deadline:
                raise self._stop_error(f"no replacement for pod {name} is ready after {self.timeout:g} s")
            self.clock.sleep(_POLL_SECONDS)
        cards = ",".join(map(str, move.after.assignment.indices()))
        console.print_text(f"{progress} {replacement} runs on {move.after.node} {cards}", err=True)

    def _evict(self, move: Move, pod: Json, name: str, progress: str) -> set[str]:
        """Evict the pod as soon as disruption budgets allow it.

        Returns the UIDs of the controller's pods just before the eviction.

        Raises `ClickException` and `KubeError`.
        """
        owner_uid = workloads.controller_of(pod)["uid"]
        deadline = self.clock.now() + self.timeout
        last_message = ""
        while True:
            self._check_unchanged(move, name)
            self._check_job(move, pod, name)
            uids_before = {other_pod["metadata"]["uid"] for other_pod in self._pods_of_controller(owner_uid, move)}
            try:
                eviction.evict(self.client, move.before.namespace, move.before.name, move.before.uid)
            except errors.TooManyRequests as error:
                if self.clock.now() >= deadline:
                    raise self._stop_error(
                        f"{name} could not be evicted within {self.timeout:g} s: {error.message}"
                    ) from error
                if error.message != last_message:
                    last_message = error.message
                    retry_note = f"trying again every {_EVICTION_RETRY_SECONDS:g} s"
                    console.print_text(
                        f"{progress} {name} cannot be evicted yet: {last_message}; {retry_note}", err=True
                    )
                self.clock.sleep(max(0.0, min(_EVICTION_RETRY_SECONDS, deadline - self.clock.now())))
            except (errors.NotFound, errors.Conflict) as error:
                raise self._stop_error(f"{name} ended by itself") from error
            else:
                console.print_text(f"{progress} evicted {name}", err=True)
                return uids_before

    def _check_unchanged(self, move: Move, name: str) -> None:
        """Check that the pod still exists and is not being deleted. Raises `ClickException` and `KubeError`."""
        try:
            pod = self.client.get(paths.pods(move.before.namespace, move.before.name))
        except errors.NotFound:
            raise self._stop_error(f"{name} ended by itself") from None
        metadata = pod["metadata"]
        if metadata["uid"] != move.before.uid or metadata.get("deletionTimestamp"):
            raise self._stop_error(f"{name} ended by itself")

    def _check_job(self, move: Move, pod: Json, name: str) -> None:
        """Check that the eviction would not fail the pod's Job, whose pods may have failed since the plan was made."""
        if not movables.is_job_pod(pod):
            return
        owner = workloads.controller_of(pod)
        # A list request, since the ClusterRole cardwise-defrag has no other verb for Jobs.
        name_query = paths.field_query("metadata.name", owner["name"])
        jobs = self.client.list_objects(paths.jobs(move.before.namespace), name_query)
        job = next((job for job in jobs if job["metadata"]["uid"] == owner["uid"]), None)
        if movables.count_remaining_failures(job) == 0:
            raise self._stop_error(f"{name} belongs to a Job that would fail because of the eviction ({owner['name']})")

    def _find_ready_replacement(self, move: Move, owner_uid: str, uids_before: set[str], name: str) -> str | None:
        """Find the ready replacement of the pod, once the pod is deleted.

        Returns the replacement's name; None until the replacement is ready.

        A running replacement is not enough: until the replacement is ready, a PodDisruptionBudget counts it as missing.
        """
        pods = self._pods_of_controller(owner_uid, move)
        new_pods = [pod for pod in pods if pod["metadata"]["uid"] not in uids_before]
        placed_pods = [
            (pod, pod_assignment) for pod in new_pods if (pod_assignment := _decode_bound_assignment(pod)) is not None
        ]
        for pod, pod_assignment in placed_pods:
            if (pod["spec"]["nodeName"], _card_uuids(pod_assignment)) == (
                move.after.node,
                _card_uuids(move.after.assignment),
            ):
                phase = (pod.get("status") or {}).get("phase")
                if phase in names.FINISHED_PHASES:
                    raise self._stop_error(
                        f"{pod['metadata']['name']}, the replacement for {name}, has ended already ({phase})"
                    )
                is_present = any(listed["metadata"]["uid"] == move.before.uid for listed in pods)
                return pod["metadata"]["name"] if _is_ready(pod) and not is_present else None
        if placed_pods:
            pod, pod_assignment = placed_pods[0]
            actual = f"{pod['spec']['nodeName']} {','.join(map(str, pod_assignment.indices()))}"
            planned = f"{move.after.node} {','.join(map(str, move.after.assignment.indices()))}"
            raise self._stop_error(
                f"{pod['metadata']['name']}, the replacement for {name}, is on {actual} instead of {planned}"
            )
        return None

    def _pods_of_controller(self, owner_uid: str, move: Move) -> list[Json]:
        """The pods of the controller."""
        pods = self.client.list_objects(paths.pods(move.before.namespace))
        return [pod for pod in pods if workloads.controller_of(pod).get("uid") == owner_uid]

    def _stop_error(self, reason: str) -> click.ClickException:
        return click.ClickException(f"stopped: {reason}; check the cluster, then run cardwise defrag again")


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


def _decode_bound_assignment(pod: Json) -> Assignment | None:
    """The assignment of a bound pod; None if the pod is pending, or its assignment is missing or invalid."""
    if not (pod.get("spec") or {}).get("nodeName"):
        return None
    try:
        return assignment.decode(annotations_of(pod))
    except assignment.InvalidAssignment:
        return None


def _card_uuids(pod_assignment: Assignment) -> set[str]:
    return {share.uuid for share in pod_assignment.shares()}
