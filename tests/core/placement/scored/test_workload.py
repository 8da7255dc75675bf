"""A damaged saved workload is refused or used, and never breaks its reader."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.placement.scored.workload import (
    MAX_REQUEST_SIZES,
    NOTHING_LEARNED,
    InvalidWorkload,
    LearningInput,
    Workload,
    learn_workload,
)
from cardwise.core.values.quantity import MiB
from tests.examples import examples

HALF = RequestSize(1, 500, 0, "", 0, 0)
SIZES = {1000: 4}
ROOM = Load(64_000, 1 << 38, 100)


class Loads:
    def free_load(self, node: str) -> Load | None:
        return ROOM


def saved(*asks: object) -> str:
    return json.dumps({"version": 1, "requests": asks})


def with_count(count: str) -> str:
    return f'{{"version":1,"requests":[[1,500,0,"",0,0,{count}]]}}'


@pytest.mark.parametrize(
    "text",
    [
        *map(with_count, ("NaN", "Infinity", "1e999", "-5", "0", "1e-300", "1e300", "1" + "0" * 400, "true", "null")),
        '"1"',
        "null",
        "1" * 5000,
        "[" * 200_000,
        '{"version":1,"requests":' + "[" * 200_000,
        '{"version":true,"requests":[]}',
        '{"version":1}',
        '{"version":1,"requests":{}}',
        saved(7),
        saved("abcdefg"),
        saved([]),
        saved([True, 500, 0, "", 0, 0, 20]),
        saved([1, 500.0, 0, "", 0, 0, 20]),
        saved([1, 500, 0, None, 0, 0, 20]),
        saved([10**9, 0, 0, "", 0, 0, 20]),
        saved([10**19, 0, 0, "", 0, 0, 20]),
        saved([1, 2**31 + 1, 0, "", 0, 0, 20]),
        saved([1, 500, 101, "", 0, 0, 20]),
        saved([1, 500, 0, "", 2**62, 0, 20]),
        saved([1, 500, 0, "", 0, 10**30, 20]),
        saved([1, 500, 0, "", 0, -1, 20]),
        saved([1, 500, 0, "", 0, 0, 20], [1, -500, 0, "", 0, 0, 20]),
    ],
    ids=lambda text: text[:60],
)
def test_what_cannot_have_been_written_is_refused_and_changes_nothing(text):
    workload = Workload()
    workload.count_arrival(HALF)
    with pytest.raises(InvalidWorkload) as refused:
        workload.load(text)
    assert len(str(refused.value)) < 400  # it is shown to users
    assert workload.counts == {HALF: 1.0}


def test_only_the_commonest_are_read():
    workload = Workload()
    rare = [[1, 100, 0, "", i, 0, 1] for i in range(5000)]
    workload.load(saved(*rare, [*HALF, 20]))
    assert len(workload.counts) == MAX_REQUEST_SIZES
    assert workload.counts[HALF] == 20.0


def test_what_no_node_can_give_is_not_counted():
    workload = Workload()
    for ask in (
        HALF._replace(cards=10**9),
        HALF._replace(mem=10**30),
        HALF._replace(core=5000),
        HALF._replace(cpu=2**62),
        HALF._replace(memory=-1),
    ):
        workload.count_arrival(ask, 100.0)
    assert not workload.counts
    assert not workload.is_learning_due


def test_what_has_faded_does_not_spoil_what_is_written():
    workload = Workload()
    workload.count_arrival(HALF)
    for _ in range(150_000):
        workload.count_arrival(RequestSize(1, 300, 0, "", 0, 0))
    for _ in range(150_000):
        workload.count_arrival(RequestSize(1, 200, 0, "", 0, 0))
    assert 0 < workload.counts[HALF] < 0.001
    restored = Workload()
    restored.load(workload.dump())
    assert sorted(ask.mem for ask in restored.counts) == [200, 300]


def test_of_nothing_nothing_is_learned():
    assert learn_workload(LearningInput({}, SIZES)) == NOTHING_LEARNED
    assert learn_workload(LearningInput({HALF: 0.0}, SIZES)) == NOTHING_LEARNED


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
AMOUNT = st.sampled_from([0, 1, 8, 100, 6400, 2**31, 2**62 - 1, 10**19, -1, True, 0.5]) | st.integers(0, 2000)
COUNT = st.sampled_from([0, 0.001, 1, 16.0, 20_000, 1e300, float("nan"), float("inf"), True]) | st.floats(0.001, 100)
FAIR = st.tuples(
    st.integers(0, 6400), st.integers(0, 2**31), st.just(0), st.just(""), st.integers(0, 2**62 - 1), AMOUNT, COUNT
)
NEARLY = st.tuples(AMOUNT, AMOUNT, AMOUNT, st.sampled_from(["", "a100"]), AMOUNT, AMOUNT, COUNT)
TEXTS = (
    st.text(max_size=20)
    | st.builds(json.dumps, ANY)
    | st.lists(FAIR | NEARLY | ANY, max_size=3).map(lambda asks: saved(*asks))
)


@settings(max_examples=examples(40, soak=1000))
@given(TEXTS)
@example(saved([6400, 0, 0, "", 2**62 - 1, 2**62 - 1, 20_000], [6400, 2**31, 640_000, "", 0, 0, 0.001]))
@example(saved([0, 2**31, 0, "", 0, 0, 1]))
@example(saved())
def test_any_text_is_refused_or_can_be_decided_by(text):
    ledger = Ledger()
    for name in ("n1", "n2"):
        ledger.set_cards(name, [Card(index=i, uuid=f"{name}-{i}", mem=MiB(1000)) for i in range(2)])
    engine = Engine(ledger, Loads())
    engine.mark_changed("n1")
    engine.mark_changed("n2")
    try:
        engine.workload.load(text)
    except InvalidWorkload:
        assert not engine.workload.counts
    learned = learn_workload(engine.learning_input())
    assert sum(learned.shares.values()) == pytest.approx(1.0 if engine.workload.counts else 0.0)
    engine.use_workload(learned)
    share = PodRequest(containers=(ContainerRequest(key="0", name="main", cards=1, mem=MiB(300)),))
    assert engine.place(share, Load(1000, 1000, 1), "priced") is not None
    restored = Workload()
    restored.load(engine.workload.dump())
    assert sorted(restored.counts) == sorted(engine.workload.counts)


def test_more_different_asks_than_are_kept_are_learned_from_again_and_again():
    workload, learned = Workload(), []
    for i in range(6 * MAX_REQUEST_SIZES):
        workload.count_arrival(RequestSize(cards=1, mem=100 + i, core=0, resource_class="", cpu=1, memory=1))
        if workload.is_learning_due:
            workload.mark_learned()
            learned.append(i)
    assert learned[-1] > 5 * MAX_REQUEST_SIZES
