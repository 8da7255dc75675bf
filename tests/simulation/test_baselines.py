"""The best-fit baseline follows the formula of FGD's authors."""

from cardwise.core.api.policies import CARD_POLICIES
from cardwise.simulation.baselines import BASELINES
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.fill import simulate_fill
from cardwise.simulation.workload import SimulatedPod
from tests.simulation import smalltraces


def cluster(*nodes):
    simulated = SimulatedCluster(nodes, "bestfit")
    simulated.set_workload([smalltraces.shape(500)] * 20)
    return simulated


def test_best_fit_takes_the_node_with_the_least_left():
    simulated = cluster(
        smalltraces.node("a", 1000, 1000, cpu=128_000), smalltraces.node("b", 1000, 1000, 1000, cpu=8000)
    )
    # Node a would have 126,000 millicores and 1.5 cards left, node b 6,000 and 2.5.
    assert simulated.place_pod("1", SimulatedPod("p", smalltraces.shape(500, cpu=2000))) == "b"


def test_best_fit_takes_the_fullest_card_of_the_node():
    simulated = cluster(smalltraces.node("a", 1000, 1000))
    for uid, mem in (("1", 700), ("2", 200), ("3", 400)):
        simulated.place_pod(uid, SimulatedPod("p", smalltraces.shape(mem, cpu=0)))
    shares = {uid: simulated.ledger.holding(uid).assignment.shares()[0].index for uid in ("1", "2", "3")}
    assert shares == {"1": 0, "2": 0, "3": 1}


def test_best_fit_places_pods_with_several_cards_or_none():
    simulated = cluster(smalltraces.node("a", 1000, 1000, cpu=4000), smalltraces.node("b", 1000, cpu=4000))
    assert simulated.place_pod("1", SimulatedPod("p", smalltraces.shape(0, cards=2))) == "a"
    assert simulated.place_pod("2", SimulatedPod("p", smalltraces.shape(0, cards=0))) == "a", (
        "none of its cards is left"
    )
    assert simulated.place_pod("3", SimulatedPod("p", smalltraces.shape(0, cards=2))) is None


def test_baselines_are_not_selectable_policies():
    assert set(BASELINES) - set(CARD_POLICIES) == {"bestfit"}


def test_baseline_fills_a_trace():
    pods = [smalltraces.shape(500)] * 12 + [smalltraces.shape(0)] * 4
    full = simulate_fill(smalltraces.workload([smalltraces.node("a", *[1000] * 8)], pods), "bestfit", 1, demand=1.0)
    assert full.points[-1].allocated > 90
