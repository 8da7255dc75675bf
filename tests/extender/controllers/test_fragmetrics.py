"""The metrics of the cards' memory."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from cardwise.core.placement.scored.engine import Engine
from extender.controllers.fragmetrics import FragMetrics
from extender.records.nodeinfo import NodeRecord
from tests.build import P100, asking, resource_class
from tests.extender.placing.test_scoredpolicies import PRICED, call_filter
from tests.extender.states import ENDED, as_class, as_pod, bound, make_state, with_cards
from tests.fakes.clock import FakeClock


class Scraped:
    """The metrics of a state, counted again at each scrape."""

    def __init__(self, of):
        self.clock = FakeClock()
        self.metrics = FragMetrics(of, self.clock)
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(self.metrics)

    def scrape(self):
        list(self.registry.collect())
        self.clock.advance(100)
        self.metrics.step()

    def of_all(self, amount):
        return self.registry.get_sample_value("cardwise_cluster_memory_mib", {"amount": amount})

    def of_class(self, name, amount):
        return self.registry.get_sample_value("cardwise_class_memory_mib", {"class": name, "amount": amount})

    @property
    def learned(self):
        return self.registry.get_sample_value("cardwise_workload_learned")


def world():
    """A card of which a pod holds a quarter, and a card that is half full."""
    state = with_cards(make_state(), n1=2)
    state.set_node("n1", NodeRecord())
    state.set_pod(as_pod(bound("a", P100 // 4, 0)))
    state.set_pod(as_pod(bound("b", P100 // 2, 1)))
    return state


def test_the_memory_of_all_cards_and_what_of_it_is_of_no_use():
    state = world()
    state.set_pod(as_pod(bound("c", P100 // 2 - 1000, 1)))
    scraped = Scraped(state)
    scraped.scrape()
    used = P100 // 4 + P100 - 1000
    assert (scraped.of_all("total"), scraped.of_all("used")) == (2 * P100, used)
    assert scraped.of_all("free") == 2 * P100 - used
    assert scraped.learned == 0  # so by the three pods that hold cards, and none of them has room in the 1000
    assert scraped.of_all("fragmented") == pytest.approx(1000)


def test_what_changes_is_seen():
    state = world()
    scraped = Scraped(state)
    scraped.scrape()
    state.set_pod(as_pod(bound("d", 100, 0)))
    state.set_pod(as_pod(bound("b", P100 // 2, 1, phase="Succeeded", containers=ENDED)))
    scraped.scrape()
    assert scraped.of_all("used") == P100 // 4 + 100
    state.remove_node("n1")
    scraped.scrape()
    assert scraped.of_all("total") == 0


def test_by_class_as_classes_come_and_go():
    state = world()
    scraped = Scraped(state)
    scraped.scrape()
    assert scraped.of_class("all-cards", "total") is None
    state.set_class(as_class(resource_class("all-cards", model="P100")))
    scraped.scrape()
    assert scraped.of_class("all-cards", "total") == 2 * P100
    assert scraped.of_class("all-cards", "free") == scraped.of_all("free")
    state.remove_class("all-cards")
    scraped.scrape()
    assert scraped.of_class("all-cards", "total") is None


def test_what_a_policy_has_learned_is_what_counts():
    state = world()
    state.policies.start_engine(Engine)
    call_filter(state, asking("whole", whole_gpu=1), PRICED, ["n1"])
    scraped = Scraped(state)
    scraped.scrape()
    assert scraped.learned == 1
    assert scraped.of_all("fragmented") == pytest.approx(scraped.of_all("free"))  # no card is whole


def test_without_scrapes_nothing_is_counted(clock):
    state = world()
    metrics = FragMetrics(state, clock)
    CollectorRegistry(auto_describe=True).register(metrics)
    metrics.step()
    assert list(metrics.collect()) == []
    metrics.step()
    assert list(metrics.collect())
    clock.advance(1000)
    state.set_pod(as_pod(bound("d", 100, 0)))
    metrics.step()
    (memory,) = [metric for metric in metrics.collect() if metric.name == "cardwise_cluster_memory_mib"]
    assert {metric.labels["amount"]: metric.value for metric in memory.samples}["used"] == P100 // 4 + P100 // 2


def test_without_scrapes_numpy_is_not_imported():
    code = "import extender.process, sys; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
