"""Limits and percentages: how a control daemon reads what is written."""

import pytest

from cardwise.core.api import mps
from cardwise.core.values.quantity import MiB
from mps.host.control import CommandRefused
from tests.mps.contract.programs import SECONDS

# What is written, and what the daemon makes of it.
MISREAD = {
    "3G": "3G",
    "3GB": "3G",
    "3g": "3G",
    "3072M": "3G",
    "3072MB": "3G",
    "3072": "3G",
    "512M": "512M",
    "1023M": "1023M",
    "8138M": "7G",  # told in whole GiB: ceilings are whole GiB
    "1.5G": "1M",
    "500K": "500M",
    "-1G": "17179869183G",
    "0G": "",
    "abc": "",
}


class TestSettings:
    def test_limits_are_misread_in_silence(self, running):
        for written, read in MISREAD.items():
            running.front.send("set_default_device_pinned_mem_limit 0 5G", SECONDS)
            assert running.front.send(f"set_default_device_pinned_mem_limit 0 {written}", SECONDS) == ""
            assert running.front.send("get_default_device_pinned_mem_limit 0", SECONDS) == read, written

    def test_our_ceilings_are_set_and_read_back(self, running):
        assert running.control.ceiling(0) is None
        for shares in ([], [700], [1024], [8138], [81559]):
            running.control.set_ceiling(0, mps.ceiling_of_shares([MiB(share) for share in shares]))
            assert running.control.ceiling(0) == mps.ceiling_of_shares([MiB(share) for share in shares])
        assert running.control.ceiling(1) is None, "the card's index is not checked"

    def test_a_limit_that_reads_back_as_another_is_refused(self, running):
        with pytest.raises(CommandRefused, match="set a ceiling of 8138 MiB on device 0, but MPS reports 7168"):
            running.control.set_ceiling(0, MiB(8138))

    def test_a_uuid_as_key_means_another_thing_for_each_driver(self, running):
        running.front.send("set_default_device_pinned_mem_limit GPU-1 2G", SECONDS)
        assert running.control.ceiling(0) is None, "never the card that it names"
        running.control.set_ceiling(0, MiB(3072))
        limit = running.front.send("get_default_device_pinned_mem_limit GPU-1", SECONDS)
        assert limit == ("2G" if running.driver >= 580 else "3G")

    def test_a_bad_percentage_leaves_the_old_one(self, running):
        running.control.set_percentage(50)
        for bad in ("0", "101", "abc", ""):
            assert running.front.send(f"set_default_active_thread_percentage {bad}", SECONDS) == "50.0"
        with pytest.raises(CommandRefused, match=r"set the default of 101 %, but MPS reports '50\.0'"):
            running.control.set_percentage(101)
        assert running.front.send("set_default_active_thread_percentage 25%", SECONDS) == "25.0"

    def test_a_restart_forgets_everything(self, running):
        running.control.set_percentage(50)
        running.control.set_ceiling(0, MiB(2048))
        running.kill()
        running.start()
        assert running.control.percentage() == "100.0"
        assert running.control.ceiling(0) is None
