"""A card is usable only while everything says so; the rules of 0005 that can be seen from within a pod."""

import pytest

from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from mps.agent import watching
from tests.mps.agent.pods import ONE, TWO

NEED = MiB(8138)


def seen(pod, uuid=ONE):
    return watching.look(pod.root, uuid, NEED, pod.clock)


def test_a_ready_card(pod, card):
    assert seen(pod) == watching.CardLook("", MpsState.READY)


@pytest.mark.parametrize("state", [state for state in MpsState if state is not MpsState.READY])
def test_no_other_state_will_do(pod, card, state):
    card.says(state=state, reason="because")
    assert seen(pod).state is state
    assert f"is {state}, not Ready: because" in seen(pod).problem


def test_a_word_that_is_stale_or_too_low_or_of_another_card(pod, card):
    card.says(checked=pod.clock.now() - 30, valid_seconds=12.0)
    assert "has not looked at card GPU-1 for over" in seen(pod).problem
    card.says(checked=pod.clock.now(), ceilings={ONE: MiB(8000)})
    assert "allows 8000 MiB, and 8138 MiB are needed" in seen(pod).problem
    card.says(uuids=(TWO,), ceilings={TWO: NEED})
    assert "does not serve card GPU-1" in seen(pod).problem


def test_a_daemon_that_died_after_the_word(pod, card):
    card.dies()
    assert "takes no connection" in seen(pod).problem
    assert seen(pod).state is MpsState.READY
    card.runs()
    assert seen(pod).problem == ""


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": 99}', b"0" * 100_000])
def test_a_damaged_file_is_no_word(pod, card, content):
    (card.home / mps.READY).write_bytes(content)
    assert seen(pod) == watching.CardLook("the MPS manager of the node does not serve card GPU-1 (yet)", None)


def test_the_daemon_of_a_whole_node(pod, card):
    card.home = card.home.rename(pod.root / mps.NODE)
    assert seen(pod).problem == ""
