"""Which file a worker of pytest-xdist takes next, by the clusters that it and the others have."""

import pytest

from tests.integration.scheduling import NONE, choose, group


def queue(**files: int) -> list[str]:
    """So many files of each kind, in this order."""
    return [group(kind, str(number)) for kind, count in files.items() for number in range(count)]


@pytest.mark.parametrize(
    ("waiting", "mine", "others", "chosen"),
    [
        ({"chart": 1, "bare": 4, "sim": 9}, "", [], "chart"),
        ({"bare": 4, "sim": 9, NONE: 9}, "sim", ["bare"], "sim"),
        ({"bare": 4, "nodes": 9, "sim": 9, NONE: 9}, "chart", ["bare"], "nodes"),
        ({"bare": 4, "sim": 12, NONE: 9}, "chart", ["bare", "sim"], "sim"),
        ({"bare": 4, "sim": 11, NONE: 9}, "chart", ["bare", "sim"], NONE),
        ({"sim": 17, NONE: 9}, "chart", ["sim", "sim"], NONE),
        ({"sim": 11, NONE: 9}, NONE, ["sim", "sim"], NONE),
        ({"bare": 2, "sim": 6}, NONE, ["sim", "bare"], "sim"),
    ],
)
def test_the_own_kind_then_one_that_nobody_has_then_one_of_many_files_then_none(waiting, mine, others, chosen):
    assert choose(queue(**waiting), mine, others) == group(chosen, "0")


def test_a_few_files_are_left_to_who_has_the_cluster():
    assert choose(queue(bare=5, sim=5), NONE, ["sim", "bare"]) == ""
    assert choose(queue(sim=1), "bare", []) == group("sim", "0"), "he has gone"
