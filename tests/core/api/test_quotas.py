import pytest

from cardwise.core.api import quotas
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.quotas import Charge, QuotaEntry
from cardwise.core.values.invalid import InvalidRequest
from tests.build import gpu_quota


def share(mem, core=0, *, whole=False):
    return CardShare(0, "GPU-1", mem, core, 16276, whole)


def test_every_field_of_a_quota_is_parsed():
    parsed = quotas.parse(
        gpu_quota(
            {"class": "big", "shares": 5}, {"model": "Tesla K80", "memoryMiB": 65536}, {"gpus": 0}, onExceed="Refuse"
        )
    )
    assert (parsed.namespace, parsed.name, parsed.refuse) == ("default", "team", True)
    assert parsed.entries == (
        QuotaEntry(resource_class="big", shares=5),
        QuotaEntry(model="Tesla K80", memory=65536),
        QuotaEntry(cards=0),
    )


def test_counts_are_limited_to_exact_json_integers():
    assert quotas.parse(gpu_quota({"shares": 2**53})).entries == (QuotaEntry(shares=2**53),)
    with pytest.raises(InvalidRequest):
        quotas.parse(gpu_quota({"shares": 2**53 + 1}))


def test_quota_without_a_name_is_parsed():
    parsed = quotas.parse({"spec": {"hard": [{"gpus": 1}]}})
    assert (parsed.namespace, parsed.name) == ("", "")


@pytest.mark.parametrize("spec", [{}, {"onExceed": "Wait"}])
def test_pods_that_do_not_fit_wait_by_default(spec):
    assert not quotas.parse(gpu_quota({"gpus": 1}, **spec)).refuse


@pytest.mark.parametrize(
    ("written", "mib"),
    [(65536, 65536), ("65536", 65536), ("64Gi", 65536), ("64GiB", 65536), ("64k", 64_000), (0, 0), ("4Pi", 2**32)],
)
def test_memory_in_mib_or_as_a_quantity(written, mib):
    assert quotas.parse(gpu_quota({"memoryMiB": written})).entries[0].memory == mib


@pytest.mark.parametrize(
    ("entry", "covers"),
    [
        (QuotaEntry(), True),
        (QuotaEntry(resource_class="big"), True),
        (QuotaEntry(resource_class="huge"), False),
        (QuotaEntry(model="Tesla K80"), True),
        (QuotaEntry(model="big"), False),
    ],
)
def test_an_entry_covers_the_cards_of_its_class_or_model(entry, covers):
    assert entry.covers(frozenset({"big", "k80"}), "Tesla K80") is covers


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (share(8138), Charge(1, 8138, 0)),
        (share(16276, core=100, whole=True), Charge(1, 16276, 1)),
        (share(16020, core=100, whole=True), Charge(1, 16020, 1)),  # with a headroom, of whatever day
        (share(16276, core=100), Charge(1, 16276, 0)),  # all that there is, but not asked as a whole card
    ],
)
def test_charge_of_a_share_on_one_card(held, expected):
    (use,) = Assignment({"c0": (held,)}).card_uses()
    assert quotas.charge_of_use(use) == expected


@pytest.mark.parametrize(
    ("entry", "used", "charge", "takes"),
    [
        (QuotaEntry(shares=5), Charge(4, 0, 0), Charge(1, 9999, 1), True),
        (QuotaEntry(shares=5), Charge(5, 0, 0), Charge(1, 1, 0), False),
        (QuotaEntry(memory=100), Charge(1, 60, 0), Charge(1, 40, 0), True),
        (QuotaEntry(memory=100), Charge(1, 60, 0), Charge(1, 41, 0), False),
        (QuotaEntry(cards=1), Charge(), Charge(1, 100, 1), True),
        (QuotaEntry(cards=1), Charge(1, 100, 1), Charge(1, 100, 1), False),
        # the limit was lowered below the use: shares continue
        (QuotaEntry(cards=1), Charge(2, 200, 2), Charge(1, 100, 0), True),
        (QuotaEntry(shares=9, memory=100, cards=0), Charge(), Charge(1, 100, 0), True),
        (QuotaEntry(shares=9, memory=100, cards=0), Charge(), Charge(1, 100, 1), False),
    ],
)
def test_headroom_fits_charges_under_each_limit(entry, used, charge, takes):
    assert quotas.headroom(entry, used).has_room_for(charge) is takes
    assert (not quotas.exceeded_limits(entry, used, charge)) is takes, "a limit is told where and only where it refuses"


def test_exceeded_limits_name_used_and_requested_amounts():
    def amounts_by_field(limits):
        return {limit.field: (limit.used, limit.hard, limit.requested) for limit in limits}

    entry, used, requested = QuotaEntry(shares=5, memory=50, cards=1), Charge(4, 40, 1), Charge(2, 9, 1)
    assert amounts_by_field(quotas.entry_limits(entry, used, requested)) == {
        "shares": (4, 5, 2),
        "memoryMiB": (40, 50, 9),
        "gpus": (1, 1, 1),
    }
    assert amounts_by_field(quotas.exceeded_limits(entry, used, requested)) == {"shares": (4, 5, 2), "gpus": (1, 1, 1)}
    assert amounts_by_field(quotas.entry_limits(QuotaEntry(cards=0), used)) == {"gpus": (1, 0, 0)}


ENTRIES = [
    QuotaEntry(resource_class="big", shares=5, cards=0),
    QuotaEntry(model="Tesla K80", memory=65536),
    QuotaEntry(cards=1),
]


def test_entry_is_encoded_with_the_fields_of_a_quota():
    hard = [quotas.entry_selection(entry) | quotas.to_fields(entry) for entry in ENTRIES]
    assert hard[0] == {"class": "big", "shares": 5, "gpus": 0}
    assert quotas.parse(gpu_quota(*hard)).entries == tuple(ENTRIES)


def test_each_entry_has_a_title_of_its_own():
    assert [quotas.entry_title(entry) for entry in ENTRIES[:2]] == ["big", "Tesla K80"]
    assert quotas.entry_title(ENTRIES[2])


def test_usage_is_read_from_the_status():
    held = [Charge(1, 2, 3), Charge(4, 5, 6), Charge()]
    lines = [
        quotas.entry_selection(entry) | {"hard": quotas.to_fields(entry)} | quotas.to_fields(used)
        for entry, used in zip(ENTRIES, held, strict=True)
    ]
    assert lines[2] == {"hard": {"gpus": 1}, "shares": 0, "memoryMiB": 0, "gpus": 0}
    assert quotas.used_by_status({"status": {"used": lines}}) == {
        ("big", ""): held[0],
        ("", "Tesla K80"): held[1],
        ("", ""): held[2],
    }


@pytest.mark.parametrize(
    ("manifest", "used"),
    [
        ({}, {}),
        ({"status": None}, {}),
        ({"status": {}}, {}),
        ({"status": {"used": {"shares": 1}}}, {}),
        ({"status": {"used": ["shares", {"shares": 1}]}}, {("", ""): Charge(1, 0, 0)}),
        ({"status": {"used": [{"class": None, "model": "", "shares": "1", "gpus": 2}]}}, {("", ""): Charge(0, 0, 2)}),
    ],
)
def test_unreadable_status_entries_count_as_zero(manifest, used):
    assert quotas.used_by_status(manifest) == used


def test_negative_headroom_is_reported():
    remaining = quotas.headroom(QuotaEntry(shares=1, memory=10), Charge(3, 30, 1))
    assert (remaining.shares, remaining.memory, remaining.cards) == (-2, -20, None)


@pytest.mark.parametrize(
    ("entry", "field", "says"),
    [
        ("k80", "", "not an entry; write class or model, and one or more of shares, memoryMiB, gpus"),
        ({}, "", "limits nothing; write one or more of shares, memoryMiB, gpus"),
        ({"class": "k80"}, "", "limits nothing; write one or more of shares, memoryMiB, gpus"),
        ({"class": "k80", "model": "Tesla K80", "gpus": 1}, ".model", "write class or model, not both"),
        ({"class": "", "gpus": 1}, ".class", "not a name; write a class, or leave it out for every GPU"),
        ({"model": 80, "gpus": 1}, ".model", "not a name; write a model"),
        ({"gpus": -1}, ".gpus", "-1 is out of range; write a whole number, 0 or more"),
        ({"gpus": "2"}, ".gpus", "write a whole number, 0 or more"),
        ({"shares": True}, ".shares", "write a whole number, 0 or more"),
        ({"shares": 1.5}, ".shares", "write a whole number, 0 or more"),
        ({"memoryMiB": -1}, ".memoryMiB", "not a whole number of MiB, 0 or more; write MiB such as 65536"),
        ({"memoryMiB": "1.5"}, ".memoryMiB", "not a whole number of MiB"),
        ({"memoryMiB": "64GB"}, ".memoryMiB", "not a quantity; write MiB such as 65536, or a quantity such as 64Gi"),
        ({"memoryMiB": True}, ".memoryMiB", "not an amount of memory"),
        ({"memory": 1}, ".memory", "not a field of an entry; write class, model, shares, memoryMiB, gpus"),
    ],
)
def test_invalid_entry_error_names_the_field(entry, field, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        quotas.parse(gpu_quota({"class": "first", "gpus": 1}, entry))
    assert refused.value.field == f"spec.hard[1]{field}"


@pytest.mark.parametrize(
    ("selects", "field", "holder"),
    [
        ({"class": "k80"}, ".class", "class k80"),
        ({"model": "Tesla K80"}, ".model", "model Tesla K80"),
        ({}, "", "every GPU"),
    ],
)
def test_two_entries_for_the_same_cards_are_refused(selects, field, holder):
    hard = [{"class": "other", "gpus": 1}, selects | {"gpus": 1}, selects | {"shares": 1}]
    with pytest.raises(InvalidRequest) as refused:
        quotas.parse(gpu_quota(*hard))
    assert refused.value.field == f"spec.hard[2]{field}"
    assert refused.value.problem == f"{holder} is already limited by spec.hard[1]"


def test_a_class_and_a_model_of_the_same_name_are_not_the_same():
    assert len(quotas.parse(gpu_quota({"class": "k80", "gpus": 1}, {"model": "k80", "gpus": 1})).entries) == 2


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        ({}, "spec"),
        ({"spec": {}}, "spec.hard"),
        ({"spec": {"hard": []}}, "spec.hard"),
        ({"spec": {"hard": {"gpus": 1}}}, "spec.hard"),
        (gpu_quota({"gpus": 1}, onExceed="refuse"), "spec.onExceed"),
        (gpu_quota({"gpus": 1}, scopes=[]), "spec.scopes"),
    ],
)
def test_invalid_quota_error_names_the_field(manifest, field):
    with pytest.raises(InvalidRequest) as refused:
        quotas.parse(manifest)
    assert refused.value.field == field
