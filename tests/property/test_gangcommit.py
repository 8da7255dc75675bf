"""What is reserved for a gang is right, whatever has changed since the gang was planned. The judge of that finds each
check that is left out of the commit; `python -m tests.property.planted commit` finds them in random histories.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.cache import commit
from tests.build import P100
from tests.examples import examples
from tests.property.gangcommit import CHANGES, NODES, problems_of

changes_of_nodes = st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from(NODES)), max_size=6)

# By check, a change that only this check finds.
FAULTS = {
    "leader epoch": "change the leader",
    "pods": "delete a member",
    "nodes": "cordon the node",
    "cpu, memory, slots": "take the cpu",
    "cards": "take the card",
    "labels": "remove the label",
    "quotas": "shrink the quota",
    "nominated pods": "nominate a pod",
    "gang reservation": "reserve for a gang",
}


@settings(max_examples=examples(60, soak=5000), deadline=None)
@given(changes=changes_of_nodes, mem=st.sampled_from([P100 // 4, P100 // 2, P100]))
def test_what_is_reserved_for_a_gang_is_right(changes, mem):
    assert problems_of(changes, mem) == []


@pytest.mark.parametrize("check", commit.CHECKS)
def test_a_check_that_is_left_out_is_found(check):
    changes = [(FAULTS[check], "n1")]
    assert problems_of(changes, P100) == []
    assert problems_of(changes, P100, without=check)
