"""Faults of cards: which exist, when they end, and how they are saved."""

import json
import shutil

import pytest

from cardwise.gpus import faults, xids
from cardwise.gpus.faults import Faults, ResetIndicators
from cardwise.gpus.xids import XidEffect
from tests.fakes.clock import FakeClock
from tests.theory import theory_of

AT_THE_FAULT = ResetIndicators(
    driver_load="boot/1", recovery_action=0, pending_repairs=0, uncorrected_errors=2, energy_mj=600_000
)


class Cards:
    """The faults of a machine, across restarts of the process that keeps them."""

    def __init__(self, folder) -> None:
        self.clock = FakeClock()
        self.path = folder / "state" / "faults.json"
        self.indicators = AT_THE_FAULT
        self.restart()

    def restart(self) -> None:
        self.faults = Faults(self.path, self.clock)

    def copied_files(self) -> list[str]:
        """The copies of unreadable files."""
        return [path.read_text() for path in self.path.parent.glob("faults.json.unreadable*")]

    def probe_after(self, seconds: float = 5.0, problem: str = "", **indicators: object) -> str:
        """The reason of the card after a probe some seconds later."""
        self.clock.advance(seconds)
        self.indicators = ResetIndicators(
            **{name: getattr(self.indicators, name) for name in ResetIndicators.__struct_fields__} | indicators
        )
        self.faults.record("GPU-0", problem)
        if (fault := self.faults.persistent_fault("GPU-0")) is not None:
            self.faults.clear_if_reset("GPU-0", fault, self.indicators)
        return self.faults.reasons().get("GPU-0", "")


@pytest.fixture
def cards(tmp_path):
    return Cards(tmp_path)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 68, 69, 92, 94, 109])
def test_harmless_xids_keep_the_card_healthy(xid):
    assert xids.classify_xid(xid) is XidEffect.HARMLESS


@pytest.mark.parametrize("xid", [46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 158])
def test_xids_that_need_a_reset_are_persistent_faults(xid):
    assert xids.classify_xid(xid) is XidEffect.NEEDS_RESET


@pytest.mark.parametrize("xid", [61, 145, 154, 167, 12345])
def test_unknown_xids_are_transient_faults(xid):
    assert xids.classify_xid(xid) is XidEffect.UNKNOWN


def test_xid_reason_has_number_and_meaning():
    assert xids.describe_xid(79) == "Xid 79: GPU has fallen off the bus"
    assert xids.describe_xid(12345) == "Xid 12345: see NVIDIA's Xid catalogue"


def test_transient_fault_ends_after_a_quiet_time(cards):
    assert cards.probe_after(problem="it does not answer") == "it does not answer"
    assert cards.probe_after(29.9)
    assert cards.probe_after(0.0, problem="again")
    assert cards.probe_after(29.9) == "again"
    assert cards.probe_after(0.1) == ""


def test_a_fault_that_needs_a_reset_does_not_pass(cards):
    cards.faults.record_needs_reset("GPU-0", 48, AT_THE_FAULT)
    for hour in range(1, 100):
        reason = cards.probe_after(3600, energy_mj=600_000 + hour)
    assert reason == (
        "Xid 48: double bit ECC error (2026-01-01T00:00:00Z); it takes no pods until it is reset "
        "(nvidia-smi --gpu-reset) or its node rebooted"
    )
    assert cards.probe_after(problem="it does not answer either") == reason


def test_the_example_of_the_docstring(cards):
    theory, xid, millijoules, errors = theory_of("cardwise.gpus.faults"), 48, 600_000, 2
    assert f"Xid {xid} at {millijoules:,} mJ with {errors} uncorrected ECC errors" in theory
    at_the_fault = ResetIndicators(driver_load="boot/1", uncorrected_errors=errors, energy_mj=millijoules)
    cards.indicators = at_the_fault
    cards.faults.record_needs_reset("GPU-0", xid, at_the_fault)
    assert f"A later probe reads {millijoules + 500:,} mJ and {errors} errors: not reset" in theory
    assert cards.probe_after(energy_mj=millijoules + 500)
    assert f"The next probe reads {3} mJ and {0} errors: reset, and the fault ends" in theory
    assert cards.probe_after(energy_mj=3, uncorrected_errors=0) == ""
    uncounted = ResetIndicators(driver_load="boot/1")
    cards.indicators = uncounted
    cards.faults.record_needs_reset("GPU-0", xid, uncounted)
    assert cards.probe_after()
    assert "the fault ends with a reboot, which changes `driver_load`" in theory
    assert cards.probe_after(driver_load="later/1") == ""


RESETS = {
    "a reboot": {"driver_load": "later/1"},
    "the driver was loaded anew": {"driver_load": "boot/2"},
    "its energy is counted anew": {"energy_mj": 3},
    "its ECC errors are counted anew": {"uncorrected_errors": 0},
}


@pytest.mark.parametrize("sign", RESETS.values(), ids=RESETS)
@pytest.mark.parametrize("restarted", [False, True], ids=["seen", "while nobody looked"])
def test_a_reset_is_seen(cards, sign, restarted):
    cards.faults.record_needs_reset("GPU-0", 79, AT_THE_FAULT)
    assert cards.probe_after()
    if restarted:
        cards.restart()
        assert "Xid 79" in cards.faults.reasons()["GPU-0"]
    assert cards.probe_after(**sign) == ""
    cards.restart()
    assert cards.faults.reasons() == {}


@pytest.mark.parametrize("mark", ["recovery_action", "pending_repairs"])
def test_fewer_pending_repairs_show_a_reset(cards, mark):
    cards.faults.record_needs_reset("GPU-0", 95, AT_THE_FAULT)
    assert cards.probe_after(**{mark: 1}), "it is known a moment later"
    cards.restart()
    assert cards.probe_after()
    assert cards.probe_after(**{mark: 0}) == ""


def test_indicators_from_before_a_fault_do_not_clear_it(cards):
    cards.faults.record_needs_reset("GPU-0", 48, AT_THE_FAULT)
    before = cards.faults.persistent_fault("GPU-0")
    cards.faults.record_needs_reset("GPU-0", 48, ResetIndicators(driver_load="boot/1", uncorrected_errors=4))
    cards.faults.clear_if_reset("GPU-0", before, AT_THE_FAULT)
    assert cards.probe_after(uncorrected_errors=4)


def test_card_without_counters_waits_for_a_reboot(cards):
    unreported = dict.fromkeys(("recovery_action", "pending_repairs", "uncorrected_errors", "energy_mj"))
    cards.faults.record_needs_reset("GPU-0", 46, ResetIndicators(driver_load="boot/1"))
    cards.indicators = ResetIndicators(driver_load="boot/1")
    assert cards.probe_after()
    assert cards.probe_after(energy_mj=5, uncorrected_errors=0), "from silence to a number is no reset"
    assert cards.probe_after(**unreported)
    assert cards.probe_after(driver_load="later/1") == ""


def test_faults_of_cards_are_independent(cards):
    cards.faults.record_needs_reset("GPU-1", 48, AT_THE_FAULT)
    assert cards.probe_after() == ""
    assert cards.probe_after(driver_load="later/1") == ""
    assert set(cards.faults.reasons()) == {"GPU-1"}


def test_failed_save_is_repeated_later(cards):
    cards.path.parent.write_text("in the way")
    cards.faults.record_needs_reset("GPU-0", 48, AT_THE_FAULT)
    assert cards.probe_after(), "it is known as long as the process lives"
    cards.path.parent.unlink()
    assert cards.probe_after()
    assert json.loads(cards.path.read_text())["GPU-0"]["xid"] == 48
    shutil.rmtree(cards.path.parent)
    assert cards.probe_after()
    assert cards.path.exists(), "somebody has cleaned up"


def test_unreadable_fault_file_does_not_prevent_the_start(cards):
    cards.path.parent.mkdir()
    cards.path.write_text("{")
    cards.restart()
    assert cards.faults.reasons() == {}
    assert cards.copied_files() == ["{"], "what it said is kept for people"


def test_unreadable_fault_entry_is_copied_and_the_others_are_loaded(cards):
    """After a downgrade, all cards would otherwise count as healthy, and the next fault would overwrite the file."""
    for card in ("GPU-0", "GPU-1"):
        cards.faults.record_needs_reset(card, 48, AT_THE_FAULT)
    written = json.loads(cards.path.read_text()) | {"GPU-1": {"version": 9, "faults": [48]}}
    cards.path.write_text(json.dumps(written))
    cards.restart()
    assert set(cards.faults.reasons()) == {"GPU-0"}
    assert [json.loads(text) for text in cards.copied_files()] == [written]
    cards.restart()
    assert len(cards.copied_files()) == 1, "once for each content"


def test_faults_without_a_file_end_with_the_process(cards):
    memory_only = Faults(None, cards.clock)
    memory_only.record_needs_reset("GPU-0", 48, AT_THE_FAULT)
    assert set(memory_only.reasons()) == {"GPU-0"}
    assert faults.QUIET_SECONDS == 30
