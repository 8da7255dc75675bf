"""A node with an MPS manager, and pods that are bound to its cards."""

import fcntl
import os

from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.quantity import MiB, Percent
from tests.deviceplugin.conftest import P100, card_uuid, refused
from tests.mps.agent.pods import Card

HALF = P100 // 2
PIPE_ENV, LIMIT_ENV, PERCENT_ENV = mps.PIPE_ENV, mps.LIMIT_ENV, mps.PERCENT_ENV
# What no container may see that goes without MPS.
OURS = {PIPE_ENV, LIMIT_ENV, PERCENT_ENV, "NVIDIA_GPU_MEMORY_LIMIT"}


class World:
    """A node with a manager: its lock, and two cards that are Ready."""

    def __init__(self, rig) -> None:
        self.rig = rig
        self.root = rig.mps_root
        self.root.mkdir()
        self.lock: int | None = None
        self.begin()
        self.cards = [Card(self.root, card_uuid(index), rig.mps_clock).runs().says() for index in range(2)]

    def begin(self) -> None:
        """The manager lives."""
        self.lock = os.open(self.root / mps.LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def end(self) -> None:
        """As with SIGKILL: its files stay as they are."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def one_for_all(self) -> None:
        """As with --scope=node."""
        first, second = self.cards
        uuids = (first.uuid, second.uuid)
        first.home = first.home.rename(self.root / mps.NODE_FOLDER)
        first.says(scope=DaemonScope.NODE, uuids=uuids, ceilings=dict.fromkeys(uuids, MiB(P100)))
        (second.home / mps.READY_FILE).unlink()

    def close(self) -> None:
        self.end()
        for card in self.cards:
            card.dies()


def bound(
    rig, name="a", *containers, isolation=None, core=0, agent=False, whole=(), percent_by="", namespace="default"
):
    """A bound pod; each container is a list of (card, MiB).

    agent: with the sidecar that the webhook puts in.
    whole: the indices of the cards that the pod has whole.
    """
    shares = {
        str(position): tuple(
            CardShare(index, card_uuid(index), MiB(mem), Percent(core), MiB(P100), index in whole)
            for index, mem in held
        )
        for position, held in enumerate(containers or ([(0, HALF)],))
    }
    annotations = {names.ISOLATION: isolation, mps.SM_PERCENT: percent_by}
    return rig.put_pod(
        name,
        Assignment(shares),
        {f"c{key}": {names.GPU_MEM: "1", names.SHARE: "1"} for key in shares},
        namespace=namespace,
        sidecars={shareagent.CONTAINER_NAME: {names.SHARE: "1"}} if agent else {},
        **{annotation: text for annotation, text in annotations.items() if text},
    )


def start(rig, pod, container="c0"):
    return rig.run(pod, container)


def refusal_message(rig, pod, container="c0"):
    """The refusal; the slot stays with the container, as the kubelet keeps it."""
    slot = rig.kubelet.admit(pod, container)
    rig.runtime.make_sandbox(pod)
    message = refused(lambda: rig.kubelet.pre_start(slot))
    assert message, "it was started"
    assert rig.spec(slot) is None, "nothing is delivered to who may not start"
    return slot, message


def pipes(rig, slot):
    """Host folders that the container gets."""
    return {mount["hostPath"]: mount["containerPath"] for mount in rig.edits(slot).get("mounts", [])}
