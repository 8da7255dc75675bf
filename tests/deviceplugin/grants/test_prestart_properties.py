"""Rule 2 of architecture.md: whatever the kubelet has not cleaned up, a slot is its own container's or nobody's."""

from contextlib import suppress
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.grants.granting import StartRefused
from deviceplugin.grants.prestart import identify_container
from deviceplugin.sources.kubelet import CheckpointContainer, Holders, PodResourcesContainer

SLOTS = ("s1", "s2", "s3")


@dataclass(frozen=True)
class Container:
    """Of a pod. Few names, so that many are equal: replicas, and pods that were made again under their old name."""

    uid: str
    pod: str
    name: str

    @property
    def named(self) -> PodResourcesContainer:
        return PodResourcesContainer("default", self.pod, self.name)

    @property
    def known(self) -> CheckpointContainer:
        return CheckpointContainer(self.uid, self.name)


@st.composite
def kubelets(draw):
    """A container that is to start, its slots, and what the kubelet's two records say of them: the container, and of
    those that had a slot before some whom PodResources still lists, or whom the checkpoint still has. And who is known
    to the API server.
    """
    pod_and_container = st.tuples(st.sampled_from(["web-0", "web-1"]), st.sampled_from(["main", "side"]))
    everybody = [
        Container(f"uid-{i}", *names)
        for i, names in enumerate(draw(st.lists(pod_and_container, min_size=1, max_size=5)))
    ]
    starting, former = everybody[-1], everybody[:-1]
    slots = draw(st.lists(st.sampled_from(SLOTS), min_size=1, max_size=3, unique=True))
    named: dict[str, list[PodResourcesContainer]] = {}
    known: dict[str, list[CheckpointContainer]] = {}
    for slot in SLOTS:
        before = draw(st.lists(st.sampled_from(former), unique=True)) if former else []
        listed = draw(st.lists(st.sampled_from(before), unique=True)) if before else []
        named[slot] = [holder.named for holder in listed] + [starting.named] * (slot in slots)
        known[slot] = [holder.known for holder in before] + [starting.known] * (slot in slots)
    gone = draw(st.sets(st.sampled_from(everybody)))
    pods = {holder.uid: f"default/{holder.pod}" for holder in everybody if holder not in gone}
    return starting, slots, Holders(pod_resources=named, checkpoint=known), pods


@given(kubelets())
def test_nobody_is_taken_for_another(kubelet):
    starting, slots, holders, pods = kubelet
    with suppress(StartRefused):
        assert identify_container(slots, holders, pods.get) == (starting.named, starting.uid)


@given(kubelets())
def test_with_nothing_left_of_others_it_is_found(kubelet):
    starting, slots, _, pods = kubelet
    alone = Holders({slot: [starting.named] for slot in slots}, {slot: [starting.known] for slot in slots})
    assert identify_container(slots, alone, pods.get) == (starting.named, starting.uid)
