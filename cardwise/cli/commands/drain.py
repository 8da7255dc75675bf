"""`cardwise drain`: cordons one GPU and evicts its pods, within their PodDisruptionBudgets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import click
import msgspec

from cardwise.cli import console, options
from cardwise.cli.cluster import cordons
from cardwise.cli.options import DURATION
from cardwise.clock import Clock
from cardwise.core.api import assignment
from cardwise.core.values import wording
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.extendedresources import ExtendedResource
from cardwise.kube.objects.pods import Pod
from cardwise.kube.pods import eviction

_POLL_SECONDS = 2.0  # pause between two reads of the card
_EVICTION_RETRY_SECONDS = 5.0  # pause between two requests to evict a pod that a disruption budget protects
_MAX_LISTED = 5  # maximum number of pods named in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRules:
    """The limits that the user sets for a drain.

    timeout: in seconds; 0 for no limit.
    grace_seconds: the grace period of evicted pods; negative for the pods' own grace periods.
    """

    force: bool = False
    ignore_daemonsets: bool = False
    grace_seconds: int = -1
    timeout: float = 0.0


@click.command()
@options.cluster
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would be evicted, and what prevents it.")
@click.option("--force", is_flag=True, help="Also evict pods without a controller, which nothing recreates.")
@click.option("--ignore-daemonsets", is_flag=True, help="Leave the pods of DaemonSets on the GPU.")
@click.option(
    "--grace-period",
    type=click.IntRange(min=-1),
    default=-1,
    show_default=True,
    help="Grace period of each pod in seconds; -1: the period of the pod.",
)
@click.option("--timeout", type=DURATION, default=0.0, show_default="0s", help="Give up after this time; 0s: never.")
@click.option("--reason", default="", help="Why the GPU is cordoned; shown to other administrators.")
@cordons.card_argument
def drain(
    *,
    dry_run: bool,
    force: bool,
    ignore_daemonsets: bool,
    grace_period: int,
    timeout: float,
    reason: str,
    card: str,
) -> None:
    """Cordon a GPU, evict its pods and wait until it is empty. CARD: a UUID, a prefix of one, or NODE/INDEX.

    Disruption budgets are respected: a refused eviction is tried again until --timeout. Exits with 1 if the GPU does
    not become empty; the GPU stays cordoned.
    """
    client = options.load_client()
    rules = DrainRules(force=force, ignore_daemonsets=ignore_daemonsets, grace_seconds=grace_period, timeout=timeout)
    drain_run = Drain(client, cordons.find_card(client, card), rules, options.current_clock())
    if dry_run:
        drain_run.simulate_run(reason)
    else:
        drain_run.run(reason)


@dataclass(slots=True)
class Drain:
    """Drains one card: cordons it and evicts its pods."""

    client: KubeClient
    card: ExtendedResource
    rules: DrainRules
    clock: Clock
    _requested_at: dict[str, float] = field(default_factory=dict)  # when each pod's eviction was requested, by UID
    _evicted_names: dict[str, str] = field(default_factory=dict)  # names of the evicted pods, by UID
    _refusals: dict[str, str | None] = field(default_factory=dict)  # why a pod's eviction was refused, by UID

    def simulate_run(self, reason: str) -> None:
        """Print what `run` would do. Raises `ClickException` if `run` would raise it at once, and `KubeError`."""
        pods = self._list_pods()
        self._check_bare_pods(pods)
        cordons.cordon_card(self.client, self.card, reason, dry_run=True)
        for pod in self._select_evictable(pods):
            refusal = self._evict(pod, dry_run=True)
            if refusal is None:
                console.print_text(f"pod {pod.full_name} would be evicted")
            else:
                console.print_text(f"pod {pod.full_name} cannot be evicted yet, and would be tried again: {refusal}")
        console.print_text(f"{cordons.describe_card(self.card)} would be drained; nothing was changed")

    def run(self, reason: str) -> None:
        """Cordon, evict and wait. Raises `ClickException` if pods remain on the card, and `KubeError`."""
        self._check_bare_pods(self._list_pods())  # before anything is changed
        if cordons.cordon_card(self.client, self.card, reason):
            console.print_text(f"{cordons.describe_card(self.card)} cordoned")
        deadline = self.clock.now() + self.rules.timeout if self.rules.timeout > 0 else float("inf")
        empty_checks = 0
        while True:
            remaining, terminating = self._evict_due_pods()
            # The card must be empty twice: a pod that was being bound during the cordon appears a moment later.
            empty_checks = 0 if remaining or terminating else empty_checks + 1
            if empty_checks > 1:
                break
            if self.clock.now() >= deadline:
                raise click.ClickException(self._describe_timeout(remaining, terminating))
            self.clock.sleep(min(_POLL_SECONDS, max(0.0, deadline - self.clock.now())))
        console.print_text(f"{cordons.describe_card(self.card)} drained")

    def _evict_due_pods(self) -> tuple[list[Pod], list[str]]:
        """Request the due evictions. Returns the remaining pods, and deleted pods whose containers still run."""
        pods = self._list_pods()
        self._check_bare_pods(pods)
        remaining = self._select_evictable(pods)
        present_uids = {pod.metadata.uid for pod in pods}
        for uid in [uid for uid in self._evicted_names if uid not in present_uids]:
            console.print_text(f"pod {self._evicted_names.pop(uid)} is gone")
        for pod in remaining:
            uid = pod.metadata.uid
            if pod.terminating or uid in self._evicted_names:
                continue
            if self.clock.now() - self._requested_at.get(uid, float("-inf")) >= _EVICTION_RETRY_SECONDS:
                self._requested_at[uid] = self.clock.now()
                self._request_eviction(pod)
        return remaining, self._list_terminating_pods(present_uids)

    def _request_eviction(self, pod: Pod) -> None:
        uid, refusal = pod.metadata.uid, self._evict(pod)
        if refusal is None:
            console.print_text(f"evicting pod {pod.full_name}")
            self._evicted_names[uid] = pod.full_name
        elif self._refusals.get(uid) != refusal:
            console.print_text(
                f"pod {pod.full_name} cannot be evicted yet: {refusal}; retrying every {_EVICTION_RETRY_SECONDS:g} s",
                err=True,
            )
        self._refusals[uid] = refusal

    def _evict(self, pod: Pod, *, dry_run: bool = False) -> str | None:
        """Evict a pod. Returns why it cannot be evicted yet; None if it is being evicted.

        Raises `KubeError` if a retry would not help.
        """
        grace_seconds = self.rules.grace_seconds if self.rules.grace_seconds >= 0 else None
        meta = pod.metadata
        try:
            eviction.evict(self.client, meta.namespace, meta.name, meta.uid, dry_run=dry_run, grace=grace_seconds)
        except errors.NotFound:
            return None
        except (errors.TooManyRequests, errors.Conflict, errors.Unreachable) as error:
            # After a conflict, another pod may have this name; the next pass will read it.
            return error.message or error.reason
        return None

    def _check_bare_pods(self, pods: Sequence[Pod]) -> None:
        """Check that the user has given the options that are needed to evict each pod, or to leave it on the card.

        Raises `ClickException`.
        """
        bare_names = [pod.full_name for pod in pods if pod.metadata.controller is None and not pod.terminating]
        if bare_names and not self.rules.force:
            raise click.ClickException(
                "pods without a controller would not be recreated: "
                f"{wording.enumerate_first(bare_names, _MAX_LISTED)}; --force evicts them anyway"
            )
        daemon_names = [pod.full_name for pod in pods if _is_of_daemonset(pod)]
        if daemon_names and not self.rules.ignore_daemonsets:
            raise click.ClickException(
                f"pods of DaemonSets would be recreated at once: {wording.enumerate_first(daemon_names, _MAX_LISTED)}; "
                "--ignore-daemonsets leaves "
                "them on the GPU"
            )

    def _select_evictable(self, pods: Sequence[Pod]) -> list[Pod]:
        return [pod for pod in pods if not _is_of_daemonset(pod)]

    def _list_pods(self) -> list[Pod]:
        """List the pods that hold the card or a share of it."""
        query = paths.field_query("spec.nodeName", self.card.spec.node)
        return [pod for pod in self.client.list_as(paths.pods(), wire.ListOf[Pod], query) if self._holds_card(pod)]

    def _holds_card(self, pod: Pod) -> bool:
        if pod.finished or pod.static:
            return False
        try:
            pod_assignment = assignment.decode(pod.metadata.annotations)
        except assignment.InvalidAssignment as error:
            console.print_text(f"warning: what pod {pod.full_name} holds is unknown: {error}", err=True)
            return False
        if pod_assignment is None:
            return False
        uuid, index = self.card.spec.uuid, self.card.spec.index
        on_card = any(
            share.uuid == uuid or (not share.uuid and share.index == index) for share in pod_assignment.shares()
        )
        return on_card or any(device.uuid == uuid for device in pod_assignment.non_gpu_devices())

    def _list_terminating_pods(self, present_uids: set[str]) -> list[str]:
        """List deleted pods whose containers still run on the card."""
        try:
            resource = self.client.get(paths.extendedresources(self.card.metadata.name))
        except errors.NotFound:
            return []
        shares = msgspec.convert(resource, ExtendedResource).status.reported or ()
        return sorted({f"{share.namespace}/{share.name}" for share in shares if share.uid not in present_uids})

    def _describe_timeout(self, remaining: Sequence[Pod], terminating: Sequence[str]) -> str:
        remaining_names = [f"{pod.full_name} ({self._describe_state(pod)})" for pod in remaining]
        remaining_names += [f"{name} (its containers still run)" for name in terminating]
        summary = (
            wording.enumerate_first(remaining_names, _MAX_LISTED)
            if remaining_names
            else "none at the last check, which has to be repeated"
        )
        return (
            f"{cordons.describe_card(self.card)} is not empty after {self.rules.timeout:g} s: {summary}; it stays "
            "cordoned, and `cardwise drain` continues where it stopped"
        )

    def _describe_state(self, pod: Pod) -> str:
        if pod.terminating or pod.metadata.uid in self._evicted_names:
            return "ending"
        return self._refusals.get(pod.metadata.uid) or "not evicted yet"


def _is_of_daemonset(pod: Pod) -> bool:
    return pod.metadata.controller is not None and pod.metadata.controller.kind == "DaemonSet"
