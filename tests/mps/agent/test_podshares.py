"""What a container is told, and what the agent does not start with."""

import pytest

from cardwise.core.api import shareagent
from cardwise.core.api.mps import MpsState
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.share import reading
from mps.agent import podshares
from tests.mps.agent.pods import ONE, TWO, assignment, share


def settings_of(**env):
    return podshares.parse_settings({shareagent.ASSIGNMENT_ENV: assignment(c0=[share()]), **env})


@pytest.mark.parametrize(
    ("by", "state", "waits", "cards"),
    [
        ("mps", MpsState.READY, True, 1),
        ("mps", MpsState.FAULT, True, 1),  # who runs has its limit, and cannot get past MPS
        ("mps", MpsState.DOWN, True, 1),
        ("advisory", MpsState.OFF, True, 1),
        ("", None, True, 1),
        ("advisory", None, False, 1),
        ("advisory", MpsState.READY, False, 1),
        ("advisory", MpsState.READY, True, 2),  # only the ceiling holds, which may be another's share
    ],
)
def test_what_is_said_to_be_enforced(by, state, waits, cards):
    shares = (share(ONE), share(TWO))[:cards]
    states = {} if state is None else {ONE: state, TWO: state}
    assert podshares.find_enforcement(shares, states, waits=waits) == by


@pytest.mark.parametrize("by", ["", "mps", "advisory"])
@pytest.mark.parametrize("shares", [(share(),), (share(), share(TWO, 4069))])
def test_what_is_written_is_what_programs_read(tmp_path, shares, by):
    path = tmp_path / "share.json"
    path.write_text(podshares.build_document(shares, by))
    actual_share = reading.read({"CARDWISE_SHARE_FILE": str(path)})
    assert actual_share.limit_mib == min(share_.mem for share_ in shares)
    assert actual_share.uuid == ",".join(share_.uuid for share_ in shares)
    assert actual_share.card == ",".join(str(share_.index) for share_ in shares)
    assert float(actual_share.fraction) == (0.5 if len(shares) == 1 else 0.25)
    assert (actual_share.total_mib, actual_share.enforced) == (16276, by)


def test_a_card_must_allow_the_largest_share_of_the_pod_there():
    text = assignment(c0=[share(ONE, 1000)], c1=[share(ONE, 3000), share(TWO, 3000)], init_2=[share(TWO, 100)])
    assert settings_of(**{shareagent.ASSIGNMENT_ENV: text}).min_ceilings_by_card() == {ONE: MiB(3000), TWO: MiB(3000)}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (shareagent.ASSIGNMENT_ENV, "", "unreadable"),
        (shareagent.ASSIGNMENT_ENV, "{}", "unreadable"),
        (shareagent.ASSIGNMENT_ENV, '{"v":9,"containers":{}}', "version 9"),
        (shareagent.ASSIGNMENT_ENV, '{"v":1,"containers":{},"devices":{"0":[["rdma","x"]]}}', "containers: none"),
        (shareagent.ASSIGNMENT_ENV, '{"v":1,"containers":{"../x":[[0,"GPU-1",1,0,1]]}}', "../x"),
        (shareagent.WAIT_ENV, "Off", "not a state to wait for"),
    ],
)
def test_what_it_does_not_start_with(name, text, problem):
    with pytest.raises(InvalidRequest, match=problem) as refused:
        settings_of(**{name: text})
    assert refused.value.field == name
