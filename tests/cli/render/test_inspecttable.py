"""The screens as golden output, beside what gpushare's own program prints for the same cluster."""

from dataclasses import replace

from cardwise.cli.render import inspecttable
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import IMAGE_USER, mps_client, reported_only_client
from cardwise.core.api.sharing import Tenant
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.kube.objects.extendedresources import IsolationStatus
from tests.build import cards, holding, ledger_with_free, shares

ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2"}


def test_summary():
    ledger = ledger_with_free(n1=[15252, 16276], n2=[16276, 16276])
    assert inspecttable.summary(ledger, ADDRESSES) == (
        "NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(MiB)\n"
        "n1    10.0.0.1   1024/16276             0/16276                1024/32552\n"
        "n2    10.0.0.2   0/16276                0/16276                0/32552\n"
        "------------------------------------------------------------------------------\n"
        "Allocated/Total GPU Memory In Cluster:\n"
        "1024/65104 (1%)\n"
    )


def test_a_node_with_fewer_cards_shows_none_and_a_node_without_address_is_unknown():
    ledger = Ledger()
    ledger.set_cards("a", cards(100, 200, node="a"))
    ledger.set_cards("b", cards(300, node="b"))
    rows = inspecttable.summary(ledger, {}).splitlines()
    assert rows[1].split() == ["a", "unknown", "0/100", "0/200", "0/300"]
    assert rows[2].split() == ["b", "unknown", "0/300", "0/0", "0/300"]


def test_a_card_stands_under_its_own_index():
    ledger = Ledger()
    ledger.set_cards("a", cards(100, 200)[1:])
    assert inspecttable.summary(ledger, {}).splitlines()[1].split() == ["a", "unknown", "0/0", "0/200", "0/200"]


def test_details_name_the_pods():
    ledger = ledger_with_free(n1=[16276, 16276])
    ledger.set_holding(holding("web", 8138, 1))
    text = inspecttable.details(ledger, ADDRESSES, "n1")
    assert "NAME  NAMESPACE  GPU0(Allocated)  GPU1(Allocated)\nweb   default    0                8138\n" in text
    assert "Allocated :  8138 (25%)\nTotal :      32552\n" in text
    assert text.endswith("Allocated/Total GPU Memory In Cluster:  8138/32552 (25%)\n")


def test_pods_of_the_former_name_of_a_node_are_shown_at_its_card():
    ledger = ledger_with_free(n1=[16276])
    ledger.set_holding(Holding("old", "default", "old", "former", holding("old", 8138, 0).assignment))
    text = inspecttable.details(ledger, ADDRESSES, "n1")
    assert "old (of node former)  default    8138\n" in text
    (node,) = inspecttable.as_json(ledger, ADDRESSES, {}, "n1")["nodes"]
    assert [pod["name"] for pod in node["gpus"][0]["pods"]] == ["old"]


def test_an_empty_cluster_has_a_table_too():
    assert "0/0 (0%)" in inspecttable.summary(Ledger(), {})


def test_details_show_the_models_once_where_they_are_alike():
    ledger = Ledger()
    ledger.set_cards("a", [Card(index=i, uuid=f"u{i}", mem=100, model="Tesla K80") for i in range(2)])
    ledger.set_cards("b", [Card(index=i, uuid=f"v{i}", mem=100, model=m) for i, m in enumerate(("Tesla K80", "A100"))])
    text = inspecttable.details(ledger, {})
    assert "NAME:       a\nIPADDRESS:  unknown\nMODEL:      Tesla K80\n\n" in text
    assert "NAME:       b\nIPADDRESS:  unknown\nGPU0:       Tesla K80\nGPU1:       A100\n\n" in text
    assert "Tesla" not in inspecttable.summary(ledger, {})


def test_sick_cards_are_marked():
    ledger = Ledger()
    ledger.set_cards("a", [Card(index=i, uuid=f"u{i}", mem=100, healthy=i == 0) for i in range(3)])
    ledger.set_cards("b", cards(100, node="b"))
    assert inspecttable.summary(ledger, {}).endswith("\nUnhealthy, so they get no new shares: a GPU1, a GPU2\n")
    text = inspecttable.details(ledger, {})
    assert text.count("UNHEALTHY:") == 1
    assert "UNHEALTHY:  GPU1, GPU2\n" in text


def test_cards_that_pods_of_one_namespace_share_are_marked_with_it():
    """Not whole ones, nor those of a deleted pod, whose demand is unknown."""
    ledger = ledger_with_free(n1=[16276] * 4)
    apart = mps_client(Isolation.ADVISORY, IMAGE_USER, Tenant("team-a", exclusive=True))
    (all_of_it,) = shares(16276, 2)
    whole = Assignment({"0": (replace(all_of_it, whole=True),)})
    for pod in (holding("apart", 100, 1), replace(holding("all", 16276, 2), assignment=whole)):
        ledger.set_holding(replace(pod, namespace="team-a", mps_client=apart))
    gone = reported_only_client("team-b")
    ledger.set_holding(replace(holding("gone", 100, 3), phase_name=REPORTED_PHASE, mps_client=gone))
    assert inspecttable.summary(ledger, {}).endswith("\nShared within one namespace only: n1 GPU1 (team-a)\n")
    assert "ONLY-NAMESPACE:  GPU1 (team-a)\n" in inspecttable.details(ledger, {})
    (node,) = inspecttable.as_json(ledger, {}, {})["nodes"]
    assert [gpu["onlyNamespace"] for gpu in node["gpus"]] == [None, "team-a", None, None]


def test_details_and_json_say_what_limits_the_shares_of_a_card():
    ledger = ledger_with_free(n1=[16276, 16276])
    tiers = IsolationStatus(memory="mps", memory_reason="the driver is older than 615", compute="mps")
    isolation = {"GPU-n1-1": tiers}
    assert "ISOLATION:  GPU1 memory mps, SMs mps\n" in inspecttable.details(ledger, {}, isolation=isolation)
    (node,) = inspecttable.as_json(ledger, {}, {}, isolation=isolation)["nodes"]
    first, second = (gpu["isolation"] for gpu in node["gpus"])
    assert first is None
    assert (second["memory"], second["memoryReason"]) == ("mps", "the driver is older than 615")
    assert "ISOLATION" not in inspecttable.details(ledger, {})


def test_cordoned_cards_are_marked_beside_sick_ones():
    ledger = Ledger()
    cards = [Card(index=i, uuid=f"u{i}", mem=100, healthy=i > 0, cordoned=i < 2) for i in range(3)]
    ledger.set_cards("a", cards)
    assert inspecttable.summary(ledger, {}).endswith(
        "\nUnhealthy, so they get no new shares: a GPU0\nCordoned, so they get no new shares: a GPU0, a GPU1\n"
    )
    assert "UNHEALTHY:  GPU0\nCORDONED:   GPU0, GPU1\n" in inspecttable.details(ledger, {})
