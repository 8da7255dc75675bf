import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardDemand, CardShare, CardUse
from cardwise.core.api.request import ContainerRequest
from tests.build import shares


def test_the_five_annotations_of_gpushare():
    written = assignment.encode(Assignment({"0": shares(8138, 1)}), assume_time_ns=1)
    assert {key: amount for key, amount in written.items() if key.startswith("ALIYUN")} == {
        "ALIYUN_COM_GPU_MEM_IDX": "1",
        "ALIYUN_COM_GPU_MEM_POD": "8138",
        "ALIYUN_COM_GPU_MEM_DEV": "16276",
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1",
    }
    assert written[names.FRACTION_OF + "0"] == "0.5000"


def test_several_cards_and_containers():
    source = Assignment({"init-0": shares(100, 2), "0": shares(4000, 0, 2)})
    written = assignment.encode(source, assume_time_ns=1)
    assert written[names.IDX] == "0,2"
    assert written[names.POD_MEM] == "8100"
    assert written[names.DEVICES_OF + "0"] == "void"
    assert written[names.LIMIT_MIB_OF + "0"] == "4000"
    assert written[names.GPUSHARE_ALLOCATION] == '{"0":{"2":100},"1":{"0":4000,"2":4000}}'
    assert assignment.decode(written) == source


def test_env_annotation_lists_cards_only_without_cdi():
    source = Assignment({"init-0": shares(100, 2), "0": shares(4000, 0, 2)})
    by_env = assignment.encode(source, assume_time_ns=1, env_access=True)
    assert (by_env[names.DEVICES_OF + "0"], by_env[names.DEVICES_OF + "init-0"]) == ("GPU-n1-0,GPU-n1-2", "GPU-n1-2")
    by_cdi = assignment.encode(source, assume_time_ns=1)
    differs = {key for key in by_env if by_cdi[key] != by_env[key]}
    assert differs == {names.DEVICES_OF + "0", names.DEVICES_OF + "init-0"}
    assert "GPU-n1-0" not in "".join(by_cdi[key] for key in differs)


def test_whole_cards_have_a_sixth_element_and_other_shares_do_not():
    source = Assignment({"0": (CardShare(0, "g", 9000, 100, 10_000, whole=True), CardShare(1, "h", 5000, 0, 10_000))})
    written = assignment.encode(source, assume_time_ns=1)
    shares_of = '[[0,"g",9000,100,10000,1],[1,"h",5000,0,10000]]'
    assert written[names.ASSIGNMENT] == f'{{"v":1,"containers":{{"0":{shares_of}}}}}'
    assert assignment.decode(written) == source


def test_share_of_all_memory_is_not_read_as_a_whole_card():
    source = Assignment({"0": (CardShare(0, "g", 10_000, 100, 10_000),)})
    assert assignment.decode(assignment.encode(source, assume_time_ns=1)) == source


@pytest.mark.parametrize(
    ("fields", "whole"), [("10000,100,10000", False), ("9000,0,10000,0", False), ("9,0,10,1", True)]
)
def test_a_sixth_element_says_that_a_card_is_whole(fields, whole):
    read = assignment.decode({names.ASSIGNMENT: f'{{"v":1,"containers":{{"0":[[0,"g",{fields}]]}}}}'})
    assert [share.whole for share in read.shares()] == [whole]


def test_fractions_round_down():
    assert assignment.fraction(1, 3) == "0.3333"
    assert assignment.fraction(16276, 16276) == "1.0000"
    assert assignment.per_card_limit((CardShare(0, "a", 5, 0, 10), CardShare(1, "b", 5, 0, 20))) == (5, "0.2500")


def test_gpushare_annotations_are_decoded():
    read = assignment.decode({names.IDX: "1", names.POD_MEM: "4069", names.DEV_MEM: "16276"})
    assert read.is_gpushare
    assert [(s.index, s.mem) for s in read.shares()] == [(1, 4069)]


def test_gpushare_amounts_are_gib_if_the_card_size_is():
    read = assignment.decode({names.IDX: "1", names.POD_MEM: "8", names.DEV_MEM: "15"})
    assert [(s.index, s.mem, s.total) for s in read.shares()] == [(1, 8 * 1024, 15 * 1024)]
    framework = {names.GPUSHARE_ALLOCATION: '{"0":{"1":10,"3":7}}', names.DEV_MEM: "139"}
    assert [(s.index, s.mem) for s in assignment.decode(framework).shares()] == [(1, 10 * 1024), (3, 7 * 1024)]


def test_the_framework_version_of_gpushare():
    read = assignment.decode({names.GPUSHARE_ALLOCATION: '{"0":{"1":10},"1":{"1":5,"3":7}}'})
    assert [(s.index, s.mem) for s in read.shares()] == [(1, 15), (3, 7)]


def test_pods_without_annotations_have_no_assignment():
    assert assignment.decode({}) is None


@pytest.mark.parametrize(
    "annotations",
    [
        {names.ASSIGNMENT: "{"},
        {names.ASSIGNMENT: "[]"},
        {names.ASSIGNMENT: '{"v":2,"containers":{}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,"g",-5,0,10]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,"g",5,0]]}}'},
        {names.ASSIGNMENT: f'{{"v":1,"containers":{{"0":[[0,"g",{2**53},0,10]]}}}}'},
        {names.ASSIGNMENT: f'{{"v":1,"containers":{{"0":[[0,"g",5,0,{2**53}]]}}}}'},
        {names.GPUSHARE_ALLOCATION: f'{{"0":{{"0":{2**53}}}}}'},
        {names.IDX: "0", names.POD_MEM: str(2**53)},
        {names.IDX: "0", names.POD_MEM: "5", names.DEV_MEM: str(2**53)},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,7,5,0,10]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,"g",10,100,10,2]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,"g",10,100,10,"1"]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,"g",10,100,10,1,1]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{},"devices":{}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{},"devices":{"0":[]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{},"devices":{"0":[["rdma"]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{},"devices":{"0":[["rdma",7]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{},"devices":{"0":[["","u"]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{},"devices":[["rdma","u"]]}'},
        {names.ASSIGNMENT: '{"v":1,"devices":{"0":[["rdma","u"]]}}'},
        {names.ASSIGNMENT: '{"v":1,"containers":{"0":[[0,"g",5,0,true]]}}'},
        {names.IDX: "-1", names.POD_MEM: "1"},
        {names.IDX: "0"},
        {names.GPUSHARE_ALLOCATION: "{}"},
        {names.GPUSHARE_ALLOCATION: '{"0":3}'},
        {names.ASSIGNMENT: "[" * 5000},
        {names.GPUSHARE_ALLOCATION: "[" * 5000},
        {names.GPUSHARE_ALLOCATION: '{"0":{"0":1e999}}'},
        {names.GPUSHARE_ALLOCATION: f'{{"0":{{"{2**31}":5}}}}'},
        {names.IDX: str(2**31), names.POD_MEM: "5"},
        {names.ASSIGNMENT: f'{{"v":1,"containers":{{"0":[[{2**31},"g",5,0,10]]}}}}'},
        {names.ASSIGNMENT: f'{{"v":1,"containers":{{"0":[[0,"g",5,{2**31},10]]}}}}'},
        {names.ASSIGNMENT: r'{"v":1,"containers":{"0":[[0,"g\ud800",5,0,10]]}}'},
        {names.ASSIGNMENT: r'{"v":1,"containers":{"\udfff":[[0,"g",5,0,10]]}}'},
        {names.ASSIGNMENT: r'{"v":1,"containers":{},"devices":{"0":[["\ud800","u"]]}}'},
        {names.ASSIGNMENT: r'{"v":1,"containers":{},"devices":{"0":[["rdma","\ud800"]]}}'},
        {names.ASSIGNMENT: r'{"v":1,"containers":{},"devices":{"\ud800":[["rdma","u"]]}}'},
        {names.ASSIGNMENT: r'{"v":"\ud800","containers":{"0":[[0,"g",5,0,10]]}}'},
    ],
)
def test_unreadable_annotations_raise_invalid_assignment(annotations):
    with pytest.raises(assignment.InvalidAssignment) as caught:
        assignment.decode(annotations)
    assert str(caught.value).encode()


def test_non_ascii_text_is_decoded():
    text = '{"v":1,"containers":{"0":[[0,"g\\ud83d\\ude00é",5,0,10]]}}'
    assert assignment.decode({names.ASSIGNMENT: text}).uuids() == {"g\U0001f600é"}


RDMA = {
    "0": (AssignedDevice("rdma", "rdma-1"), AssignedDevice("nic", "pci-n1-0000-3b-00.0")),
    "1": (AssignedDevice("rdma", "b"),),
}


def test_devices_are_encoded_next_to_cards():
    source = Assignment({"0": shares(100, 1)}, RDMA)
    written = assignment.encode(source, assume_time_ns=1)
    assert json.loads(written[names.ASSIGNMENT])["devices"] == {
        "0": [["rdma", "rdma-1"], ["nic", "pci-n1-0000-3b-00.0"]],
        "1": [["rdma", "b"]],
    }
    assert assignment.decode(written) == source
    assert [share.uuid for share in source.non_gpu_devices()] == ["rdma-1", "pci-n1-0000-3b-00.0", "b"]
    assert source.mem == 100


def test_pod_with_only_devices_has_no_gpushare_annotations():
    source = Assignment({}, RDMA)
    written = assignment.encode(source, assume_time_ns=1)
    assert written.keys() == {names.ASSIGNMENT}
    assert assignment.decode(written) == source


def test_assignment_without_devices_has_no_devices_key():
    written = assignment.encode(Assignment({"0": shares(100, 1)}), assume_time_ns=1)
    assert written[names.ASSIGNMENT] == '{"v":1,"containers":{"0":[[1,"GPU-n1-1",100,0,16276]]}}'
    assert assignment.decode(written).devices == {}


@pytest.mark.parametrize(
    ("mine", "theirs", "excess"),
    [
        ({"0": shares(4096, 0)}, {"0": shares(4096, 0)}, {}),
        ({"0": shares(4096, 0)}, {"0": shares(4096, 1)}, {"0": shares(4096, 0)}),
        # The example of the docstring: the containers have changed places.
        (
            {"0": shares(4096, 0), "1": shares(8192, 1)},
            {"0": shares(8192, 0), "1": shares(4096, 1)},
            {"1": shares(4096, 1)},
        ),
        ({"0": shares(4096, 0), "1": shares(8192, 1)}, {"0": shares(8192, 1), "1": shares(4096, 0)}, {}),
        ({"0": shares(100, 0), "1": shares(200, 0)}, {"0": shares(50, 0)}, {"0": shares(250, 0)}),
        ({"0": shares(100, 0), "1": shares(100, 0)}, {"0": shares(200, 0)}, {"0": shares(0, 0)}),
        ({"0": shares(100, 0)}, {"0": shares(50, 0), "1": shares(50, 0)}, {}),
        ({"0": shares(100, 0)}, {"pod": (CardShare(0, "", 100, 0, 16276),)}, {"0": shares(100, 0)}),
    ],
)
def test_excess_of_one_binding_over_another_is_computed_per_card(mine, theirs, excess):
    remaining = Assignment(mine).excess_over(Assignment(theirs))
    assert (remaining.containers if remaining is not None else {}) == excess


def test_excess_includes_sm_percent_and_is_never_a_whole_card():
    whole = CardShare(0, "GPU-n1-0", 16276, 100, 16276, whole=True)
    part = CardShare(0, "GPU-n1-0", 16276, 30, 16276)
    assert Assignment({"0": (whole,)}).excess_over(Assignment({"0": (part,)})) == Assignment(
        {"0": (CardShare(0, "GPU-n1-0", 0, 70, 16276),)}
    )


def test_excess_of_devices_is_computed_by_uuid():
    first = Assignment({}, {"0": (AssignedDevice("rdma", "rdma-0"), AssignedDevice("rdma", "rdma-1"))})
    second = Assignment({}, {"1": (AssignedDevice("fast", "rdma-0"),)})
    assert first.excess_over(second) == Assignment({}, {"0": (AssignedDevice("rdma", "rdma-1"),)})
    assert second.excess_over(first) is None


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 50)), max_size=6),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 50)), max_size=6),
)
def test_assignment_plus_excess_is_the_maximum_on_each_card(mine, theirs):
    def build(entries):
        return Assignment(
            {str(n): (CardShare(i, f"GPU-{i}", mem, core, 100),) for n, (i, mem, core) in enumerate(entries)}
        )

    def used(assignment, card):
        here = [share for share in assignment.shares() if share.index == card]
        return sum(share.mem for share in here), sum(share.core for share in here), len(here)

    excess = build(mine).excess_over(build(theirs)) or Assignment({})
    for card in range(3):
        larger = map(max, used(build(mine), card), used(build(theirs), card))
        total = map(sum, zip(used(build(theirs), card), used(excess, card), strict=True))
        assert list(total)[:2] == list(larger)[:2]
        assert used(build(theirs), card)[2] + used(excess, card)[2] >= used(build(mine), card)[2]


def test_card_uses_sum_the_shares_of_each_card():
    container = CardShare(0, "GPU-0", 100, 10, 16276), CardShare(1, "GPU-1", 100, 10, 16276)
    whole = CardShare(2, "GPU-2", 16276, 100, 16276, whole=True)
    assigned = Assignment({f"c{i}": container for i in range(48)} | {"w": (whole,)})
    assert set(assigned.card_uses()) == {
        CardUse(0, "GPU-0", 4800, 480, 48),
        CardUse(1, "GPU-1", 4800, 480, 48),
        CardUse(2, "GPU-2", 16276, 100, 1, whole=1),
    }
    assert assigned.card_uses() is assigned.card_uses(), "computed again for each count of the ledger"


def test_card_uses_of_gpushare_are_by_index():
    first, second = CardShare(0, "", 100, 0, 16276), CardShare(1, "", 50, 0, 16276)
    assert Assignment({"pod": (first, second)}).card_uses() == (CardUse(0, "", 100, 0), CardUse(1, "", 50, 0))


_some_shares = st.builds(
    lambda i, legacy, whole: CardShare(i, "" if legacy else f"GPU-{i}", 10, 0, 100, whole),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)


@given(
    st.lists(
        st.tuples(st.lists(_some_shares, min_size=1, max_size=3), st.sampled_from(["", "a", "b"])),
        min_size=1,
        max_size=4,
    )
)
def test_the_demands_on_a_card_are_those_of_each_container_and_computed_once(of_containers):
    containers = {f"c{k}": tuple(of_container) for k, (of_container, _) in enumerate(of_containers)}
    requests = [
        tuple(ContainerRequest(key=f"c{k}", name="", cards=1, resource_class=name) for k, (_, name) in enumerate(of))
        for of in (of_containers, [(of_container, "other") for of_container, _ in of_containers])
    ]
    granted = Assignment(containers)
    for container_requests in (*requests, *requests, requests[1]):
        expected = {
            CardDemand(
                share.uuid or share.index, requested.resource_class, len(containers[requested.key]) > 1, share.whole
            )
            for requested in container_requests
            for share in containers[requested.key]
        }
        demands = granted.card_demands(container_requests)
        assert demands == expected
        if len(containers) > 1:
            assert granted.card_demands(container_requests) is demands
