"""What is read of the kubelet, when to register with it again, and the slots that it is offered."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core.api import names
from deviceplugin.plugin import slots
from deviceplugin.plugin.registration import RegistrationState, reregister_reason
from deviceplugin.sources.kubelet import (
    CheckpointContainer,
    Kubelet,
    KubeletUnavailable,
    PodResourcesContainer,
    SharedCall,
    parse_checkpoint,
)
from tests.deviceplugin.fakenode import PATIENCE, ServedKubelet
from tests.fakes.clock import FakeClock

KUBELET = (1, 2, 3)


def test_the_checkpoint_is_read_by_resource():
    entries = [
        {"PodUID": "u", "ContainerName": "c", "ResourceName": names.SHARE, "DeviceIDs": {"-1": ["s1"], "0": ["s2"]}},
        {"PodUID": "u", "ContainerName": "c", "ResourceName": "other.com/x", "DeviceIDs": {"-1": ["s1"]}},
        {"PodUID": "v", "ContainerName": "c", "ResourceName": names.SHARE, "DeviceIDs": None},
    ]
    known = parse_checkpoint(json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 7}).encode())
    assert known == {"s1": [CheckpointContainer("u", "c")], "s2": [CheckpointContainer("u", "c")]}
    assert parse_checkpoint(b'{"Data":{"PodDeviceEntries":null}}') == {}
    with pytest.raises(KubeletUnavailable):
        parse_checkpoint(b'{"Data":')


def test_a_shared_answer_began_after_every_question():
    moments = itertools.count()
    shared = SharedCall(lambda: next(moments))

    def is_later(_: int) -> bool:
        moment = next(moments)
        return shared.get() > moment

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(is_later, range(600)))


def test_who_asks_while_another_is_answered_shares_the_next_answer(clock):
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    calls: list[int] = []

    def call() -> int:
        calls.append(len(calls) + 1)
        begun.release()
        assert go_on.acquire(timeout=PATIENCE)
        return calls[-1]

    shared = SharedCall(call, clock)
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(shared.get)
        assert begun.acquire(timeout=PATIENCE)
        others = [threads.submit(shared.get) for _ in range(8)]
        clock.until_waiting(8)
        go_on.release(2)
        assert first.result() == 1
        assert [other.result() for other in others] == [2] * 8
    assert calls == [1, 2]


def test_a_shared_failure_reaches_everyone_and_is_not_kept():
    answers = iter([KubeletUnavailable("no"), 1])

    def call() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = SharedCall(call)
    with pytest.raises(KubeletUnavailable):
        shared.get()
    assert shared.get() == 1


class TestPodResources:
    """Over their socket."""

    @pytest.fixture
    def served(self, folder):
        kubelet = ServedKubelet(folder)
        kubelet.holders["s1"] = [("default", "a", "uid-a", "main")]
        kubelet.write_checkpoint()
        yield kubelet
        kubelet.stop()

    @pytest.fixture
    def kubelet(self, served):
        kubelet = Kubelet(served.folder, FakeClock())
        yield kubelet
        kubelet.close()

    def test_a_holder_is_known_by_both_sources(self, kubelet):
        holders = kubelet.holders()
        assert holders.pod_resources == {"s1": [PodResourcesContainer("default", "a", "main")]}
        assert holders.checkpoint == {"s1": [CheckpointContainer("uid-a", "main")]}

    def test_the_rate_limit_is_waited_out(self, served, kubelet):
        served.refuse_lists = 3
        assert kubelet.holders().pod_resources
        assert served.refuse_lists == 0

    def test_who_is_refused_for_too_long_is_told(self, served, kubelet):
        served.refuse_lists = 10_000
        with pytest.raises(KubeletUnavailable, match="RESOURCE_EXHAUSTED: rejected by rate limit"):
            kubelet.holders()

    def test_another_kubelet_behind_the_path_is_asked_at_once(self, served, kubelet):
        assert kubelet.holders().pod_resources
        served.restart()
        assert kubelet.holders().pod_resources


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kubelet": None}, None),
        ({"registered_kubelet": None}, "not registered"),
        ({"kubelet": (1, 2, 4)}, "was replaced"),
        ({"has_own_socket": False}, "removed"),
        ({"no_stream_seconds": 1.0}, None),
        ({"no_stream_seconds": 3.0}, "stream"),
        ({"zero_slots_seconds": 29.0}, None),
        ({"zero_slots_seconds": 30.0}, "reporting no cardwise.dev/share"),
    ],
)
def test_when_to_register_again(changes, reason):
    fine = {"kubelet": KUBELET, "registered_kubelet": KUBELET, "has_own_socket": True}
    sight = RegistrationState(**{"no_stream_seconds": None, "zero_slots_seconds": None} | fine | changes)
    written = reregister_reason(sight)
    assert written is None if reason is None else reason in written


def test_slots_are_few_and_short():
    assert slots.make_slot_ids(2) == ("s001", "s002")
    assert slots.make_slot_ids(1000)[-1] == "s1000"
    assert len(slots.build_device_list(slots.SLOT_IDS).SerializeToString()) < 64 * 1024, "the kubelet takes 4 MiB"
