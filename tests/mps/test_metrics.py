"""What the manager counts while a daemon comes up, dies and heals."""

from prometheus_client import REGISTRY

from cardwise.core.api.mps import MpsState
from mps import metrics
from tests.mps.mpsnode import uuid_of


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"gpu": uuid_of(0)} | labels) or 0.0


def states() -> dict[str, float]:
    return {state_: value("cardwise_mps_state", state=state_) for state_ in MpsState}


def only(state: MpsState) -> dict[str, float]:
    return {state_: float(state_ is state) for state_ in MpsState}


def test_a_state_is_one_of_all():
    metrics.set_state("some-card", MpsState.DRAINING)
    samples = {
        state_: REGISTRY.get_sample_value("cardwise_mps_state", {"gpu": "some-card", "state": state_})
        for state_ in MpsState
    }
    assert samples == only(MpsState.DRAINING)
    assert REGISTRY.get_sample_value("cardwise_mps_up", {"gpu": "some-card"}) == 0
    metrics.set_state("some-card", MpsState.READY)
    assert REGISTRY.get_sample_value("cardwise_mps_up", {"gpu": "some-card"}) == 1
    assert REGISTRY.get_sample_value("cardwise_mps_state", {"gpu": "some-card", "state": MpsState.DRAINING}) == 0


def test_a_daemon_that_was_killed_and_replaced_has_healed_once(node):
    before = {name: value(f"cardwise_mps_{name}_total") for name in ("recoveries", "daemon_failures", "daemon_starts")}
    probes = REGISTRY.get_sample_value("cardwise_mps_probe_seconds_count", {"outcome": "ok"}) or 0.0
    node.start()
    node.wait_ready()
    assert states() == only(MpsState.READY)
    assert value("cardwise_mps_recoveries_total") == before["recoveries"], "the first start is no recovery"
    node.daemon().kill()
    node.until(lambda: value("cardwise_mps_up") == 0)
    node.wait_ready()
    assert value("cardwise_mps_recoveries_total") == before["recoveries"] + 1
    assert value("cardwise_mps_daemon_failures_total") == before["daemon_failures"] + 1
    assert value("cardwise_mps_daemon_starts_total") == before["daemon_starts"] + 2
    assert states() == only(MpsState.READY)
    assert value("cardwise_mps_ceiling_bytes") == 512 * 1024**2
    node.pass_time(10.0)
    assert REGISTRY.get_sample_value("cardwise_mps_probe_seconds_count", {"outcome": "ok"}) > probes
