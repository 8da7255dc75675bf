"""The MPS contract between the parts: folders, state file, and limits that MPS does not misread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope, MpsState, Status
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB

REAL = "GPU-8dc8a2a1-ed6e-0c5b-9d0f-5d1d3c2b1a00"


def test_folder_names_are_short_readable_and_unique():
    assert str(mps.card_daemon_folder("/run/cardwise/mps", REAL)).startswith("/run/cardwise/mps/gpu-8dc8a2a1-")
    assert mps.folder_name(REAL) == mps.folder_name(REAL.upper()), "UUIDs differ in nothing but case"
    assert mps.folder_name(REAL) != mps.folder_name(REAL[:-1] + "1")
    assert len(mps.folder_name("GPU-" + "x" * 200)) <= 21


@given(st.text(alphabet=st.characters(codec="ascii", min_codepoint=33), min_size=1))
def test_folder_of_any_uuid_is_below_the_root(uuid):
    folder = mps.card_daemon_folder("/r", uuid)
    assert str(folder.parent) == "/r"
    assert folder.name not in (".", "..", mps.NODE_FOLDER)


def test_too_long_root_is_refused_with_the_remedy():
    length = mps.MAX_PIPE_LENGTH - len(str(mps.card_daemon_folder("/", REAL) / mps.PIPE_FOLDER)) - 1
    fits = "/" + "r" * length
    mps.check_root(fits, [REAL], DaemonScope.CARD)
    with pytest.raises(InvalidRequest, match=r"88 bytes.*1 bytes shorter"):
        mps.check_root(fits + "r", [REAL], DaemonScope.CARD)
    mps.check_root(fits + "r", [REAL], DaemonScope.NODE)
    with pytest.raises(InvalidRequest, match="not an absolute path"):
        mps.check_root("run/mps", [REAL], DaemonScope.CARD)


@pytest.mark.parametrize(
    ("shares", "ceiling"),
    [([], 512), ([100], 512), ([700, 600], 700), ([1023], 1023), ([1024], 1024), ([1025], 2048), ([8138, 300], 8192)],
)
def test_ceiling_allows_the_largest_share_and_is_read_back(shares, ceiling):
    assert mps.ceiling_of_shares([MiB(share) for share in shares]) == ceiling


@given(st.integers(1, 200_000))
def test_limits_are_read_by_mps_as_written(mib):
    text = mps.limits_value([MiB(mib), MiB(1)])
    assert text == f"0={mib}M,1=1M"
    mps.check_limits(text)


@pytest.mark.parametrize(
    "text",
    [
        "GPU-1=5M",
        "0=5M ",
        "0=5m",
        "0=abc",
        "all=5M",
        "0=5M,",
        "",
        "0=1.5G",
        "0=500K",
        "0=0M",
        "0=-1M",
        "1=5M",
        "0=5M,0=5M",
        "0=5M,2=5M",
        "5M",
    ],
)
def test_limits_that_mps_misreads_are_refused(text):
    with pytest.raises(InvalidRequest, match="write <ordinal>=<whole number>M"):
        mps.check_limits(text)


@pytest.mark.parametrize("text", ["0=3G", "0=3g", "0=3GB", "0=3072", "0=3072MB", "0=1G,1=512M"])
def test_limits_that_mps_reads_correctly_are_accepted(text):
    mps.check_limits(text)


def test_environment_has_no_limits_for_several_cards():
    assert mps.container_environment([MiB(8138)], 25) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/cardwise/mps/pipe",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8138M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert set(mps.container_environment([MiB(1), MiB(2)])) == {"CUDA_MPS_PIPE_DIRECTORY"}
    with pytest.raises(InvalidRequest, match="would lift the limit"):
        mps.container_environment([MiB(0)])
    with pytest.raises(InvalidRequest, match="1 to 100"):
        mps.container_environment([MiB(1)], 0)


statuses = st.builds(
    Status,
    uuids=st.lists(st.text(), max_size=3).map(tuple),
    scope=st.sampled_from(DaemonScope),
    state=st.sampled_from(MpsState),
    reason=st.text(),
    since=st.floats(0, 1e10),
    checked=st.floats(0, 1e10),
    valid_seconds=st.floats(0, 100),
    driver=st.text(),
    multi_user=st.booleans(),
    enforced=st.booleans(),
    ceilings=st.dictionaries(st.text(), st.integers(0, 10**6).map(MiB)),
    daemon_pid=st.integers(0, 2**22),
    manager_pid=st.integers(0, 2**22),
    max_clients=st.integers(0, 60),
)


_OFF = mps.encode(Status(uuids=(), scope=DaemonScope.CARD, state=MpsState.OFF))


@given(statuses)
def test_state_file_round_trips(status):
    assert mps.decode(mps.encode(status)) == status


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"version": 2}',
        _OFF[:-9],
        _OFF.replace('"managerPid": 0', '"managerPid": 1e999'),
        "[" * 100_000,
    ],
)
def test_truncated_state_file_is_unreadable(text):
    with pytest.raises(mps.UnreadableState):
        mps.decode(text)


def test_container_starts_only_in_the_required_state():
    status = Status(
        uuids=("a",),
        scope=DaemonScope.CARD,
        state=MpsState.READY,
        checked=100.0,
        valid_seconds=10.0,
        ceilings={"a": MiB(1024)},
    )
    assert mps.start_problem(status, "a", now=110.0, required_mib=MiB(1024)) is None
    assert "has not checked GPU a for over 10 s" in mps.start_problem(status, "a", now=111.0)
    assert "allows 1024 MiB, and 1025 MiB are needed" in mps.start_problem(
        status, "a", now=100.0, required_mib=MiB(1025)
    )
    assert "not b" in mps.start_problem(status, "b", now=100.0)
    assert "is Ready, not Off" in mps.start_problem(status, "a", now=100.0, required_state=MpsState.OFF)
