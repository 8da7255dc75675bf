"""Classes of cards as people see them."""

import json

import pytest
import yaml

from cardwise.cli.render import classtable
from cardwise.core.placement import totals
from cardwise.core.placement.totals import CardClassView
from cardwise.kube import clusterstate
from tests.build import automatic_class
from tests.cli.clusters import K80_CLASS, Cluster, lists

K80_SELECTOR = {"matchLabels": {"model": "Tesla K80"}}


def views(api: Cluster, only: str | None = None) -> list[CardClassView]:
    seen = clusterstate.read_cluster_state(api.kube)
    return totals.classes_of_cards(seen.ledger, seen.classes, only)


def test_table():
    # The unhealthy card counts in the total and is not free.
    assert classtable.format_card_classes(views(lists())) == (
        "CLASS             GPUS  NODES  FREE-MIB  USED-MIB  TOTAL-MIB  SHARE         PRIORITY  AUTO\n"
        "big               1     1      12207     4069      16276      4069 MiB 25%  10        no\n"
        "nvidia.tesla.k80  3     2      8441      14441     34323      whole GPU     0         yes\n"
    )


def test_eighty_columns_show_what_matters():
    narrow = classtable.format_card_classes(views(lists()), 80)
    assert narrow == (
        "CLASS             GPUS  NODES  FREE-MIB  USED-MIB  TOTAL-MIB  SHARE\n"
        "big               1     1      12207     4069      16276      4069 MiB 25%\n"
        "nvidia.tesla.k80  3     2      8441      14441     34323      whole GPU\n"
    )
    heads = classtable.format_card_classes(views(lists()), 60).splitlines()[0].split()
    assert heads == ["CLASS", "GPUS", "FREE-MIB", "TOTAL-MIB", "SHARE"]
    assert classtable.format_card_classes(views(lists()), 200) == classtable.format_card_classes(views(lists()))
    assert max(map(len, classtable.format_card_class(views(lists(), "big")[0], 60).splitlines())) <= 60


def test_wide_says_who_uses_what():
    text = classtable.format_card_classes(views(lists()), wide=True)
    assert text.splitlines()[0].endswith("AUTO  HEALTHY")
    assert text.splitlines()[2].endswith("yes   2")
    assert text.partition("\n\n")[2] == (
        "CLASS             NAMESPACE  SHARES  MIB    WHOLE-GPUS\n"
        "big               team-b     1       4069   0\n"
        "nvidia.tesla.k80  team-a     2       13441  1\n"
        "nvidia.tesla.k80  team-b     1       1000   0\n"
    )


def test_one_class_with_its_users_and_one_without():
    text = classtable.format_card_class(views(lists(), K80_CLASS)[0])
    assert text.partition("\n\n")[2] == (
        "NAMESPACE  SHARES  MIB    WHOLE-GPUS\nteam-a     2       13441  1\nteam-b     1       1000   0\n"
    )
    assert "big" not in text
    assert classtable.format_card_class(views(lists(pods=[]), "big")[0]).endswith("\nNo pod uses it.\n")


@pytest.mark.parametrize(("edited", "message"), [(False, "yes"), (True, "edited")])
def test_an_automatic_class_that_a_person_has_changed_says_so(edited, message):
    resource_class_edited = automatic_class(edited=edited)
    assert (
        classtable.format_card_classes(views(lists(resourceclasses=[resource_class_edited])))
        .splitlines()[1]
        .split()[-1]
        == message
    )


def test_for_programs():
    shown = classtable.card_classes_as_json(views(lists(), "big"))
    assert yaml.safe_load(yaml.safe_dump(shown)) == json.loads(json.dumps(shown))
    assert shown == [
        {
            "name": "big",
            "devices": 1,
            "healthyDevices": 1,
            "nodes": 1,
            "memoryMiB": 16276,
            "usedMiB": 4069,
            "freeMiB": 12207,
            "share": {"memoryMiB": 4069, "corePercent": 25},
            "priority": 10,
            "auto": False,
            "edited": False,
            "users": [{"namespace": "team-b", "shares": 1, "memoryMiB": 4069, "gpus": 0}],
        }
    ]
