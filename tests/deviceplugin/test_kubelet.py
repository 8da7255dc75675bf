"""What is read of the kubelet, when to register with it again, and the slots that it is offered."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.core import names
from deviceplugin import slots
from deviceplugin.kubelet import KnownContainer, KubeletSilent, Shared, parse_checkpoint
from deviceplugin.registration import Sight, why_again

KUBELET = (1, 2, 3)


def test_the_checkpoint_is_read_by_resource():
    entries = [
        {"PodUID": "u", "ContainerName": "c", "ResourceName": names.SHARE, "DeviceIDs": {"-1": ["s1"], "0": ["s2"]}},
        {"PodUID": "u", "ContainerName": "c", "ResourceName": "other.com/x", "DeviceIDs": {"-1": ["s1"]}},
        {"PodUID": "v", "ContainerName": "c", "ResourceName": names.SHARE, "DeviceIDs": None},
    ]
    known = parse_checkpoint(json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 7}).encode())
    assert known == {"s1": [KnownContainer("u", "c")], "s2": [KnownContainer("u", "c")]}
    assert parse_checkpoint(b'{"Data":{"PodDeviceEntries":null}}') == {}
    with pytest.raises(KubeletSilent):
        parse_checkpoint(b'{"Data":')


def test_a_shared_answer_began_after_every_question():
    counter, lock = iter(range(10**6)), threading.Lock()
    began: list[float] = []

    def call() -> float:
        with lock:
            next(counter)
        at = time.monotonic()
        began.append(at)
        time.sleep(0.002)
        return at

    shared = Shared(call)

    def ask(_: int) -> bool:
        asked = time.monotonic()
        return shared.get() >= asked

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(ask, range(600)))
    assert len(began) < 300


def test_a_shared_failure_reaches_everyone_and_is_not_kept():
    answers = iter([KubeletSilent("no"), 1])

    def call() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = Shared(call)
    with pytest.raises(KubeletSilent):
        shared.get()
    assert shared.get() == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kubelet": None}, ""),
        ({"registered_with": None}, "not registered"),
        ({"kubelet": (1, 2, 4)}, "another one"),
        ({"own_socket": False}, "removed"),
        ({"without_stream": 1.0}, ""),
        ({"without_stream": 3.0}, "stream"),
        ({"showing_zero": 29.0}, ""),
        ({"showing_zero": 30.0}, "showing no cardwise.dev/share"),
    ],
)
def test_when_to_register_again(changes, why):
    fine = {"kubelet": KUBELET, "registered_with": KUBELET, "own_socket": True}
    sight = Sight(**{"without_stream": None, "showing_zero": None} | fine | changes)
    assert why in why_again(sight)
    assert bool(why_again(sight)) == bool(why)


def test_slots_are_few_and_short():
    assert slots.slot_ids(2) == ("s001", "s002")
    assert slots.slot_ids(1000)[-1] == "s1000"
    assert len(slots.listing(slots.slot_ids(100_000)).SerializeToString()) < 3 * 1024 * 1024
    with pytest.raises(slots.TooManySlots, match="write at most"):
        slots.slot_ids(200_000)
    with pytest.raises(ValueError, match="at least 1"):
        slots.slot_ids(0)
