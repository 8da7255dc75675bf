"""A real Prometheus scrapes the parts of a running cluster: what the dashboard and the alerts ask for is there."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cardwise.core.values.refusals import Refusal
from tests.build import P100
from tests.cluster import Cluster, binaries, mps, ports
from tests.cluster.parts import CHART
from tests.cluster.processes import PATIENCE, Process, wait_for
from tests.cluster.prometheus import Prometheus, programs
from tests.integration.gangpods import member
from tests.integration.sharing import Space, workload
from tests.observability.metricdocs import documented

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node]

_MIB = 1024 * 1024
ALERTS = CHART / "files" / "alerts" / "cardwise.yaml"
RULES = CHART / "files" / "rules" / "cardwise.yaml"
DASHBOARD = CHART / "files" / "dashboards" / "cardwise.json"
PROGRAM = Path(sys.executable).parent / "cardwise-mps"
MPS_NODE = "metrics-mps"  # a manager of cards that the cluster does not know: nobody else feels it

# Of these expressions a healthy cluster has nothing to tell; they must be right all the same.
QUIET = (
    "cardwise_extender_nominations_total",  # for clusters of more than a thousand nodes
    "cardwise_extender_claims_total",  # for scheduler.mode=claims
    "cardwise_prepare_claim_seconds",  # as above
    "cardwise_thread_failures_total",
    "cardwise_extender_thread_failures_total",
    "cardwise_mps_thread_failures_total",
    "cardwise_mps_daemon_failures_total",
    "cardwise_mps_server_faults_total",
    "cardwise_mps_recoveries_total",
    "cardwise_mps_settings_lost_total",
    "cardwise_mps_clients_detached_total",
    "cardwise_container_gpu_memory_granted_bytes",  # the node of this manager has no pods
    "cardwise_container_gpu_memory_used_bytes",
    "cardwise_container_gpu_memory_peak_bytes",
    "cardwise_container_gpu_sm_busy_seconds_total",
    "cardwise_container_gpu_memory_busy_seconds_total",
    "cardwise_container_gpu_use_failures_total",
    "cardwise_mps_audit_violations_total",
    "cardwise_mps_audit_evictions_total",
    "cardwise_mps_audit_failures_total",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return programs(print)
    except binaries.NoBinaries as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Iterator[Space]:
    """With a pod that runs, a gang that is bound, one that waits, and one that was refused."""
    space = Space(cluster, "metrics")
    space.create_and_locate(workload("half", gpu_mem=P100 // 2, gpu_core=50))
    space.create(member("pair-0", "pair", 2, gpu_mem=1024))
    space.create(member("pair-1", "pair", 2, gpu_mem=1024))
    space.placed("pair-0")
    space.placed("pair-1")
    space.create(workload("waits", gpu_count=2, node="n1" if space.placed("half")[0] == "n1" else "n2"))
    space.wait(lambda: "Insufficient" in space.reasons("waits"), "waits is told why it waits")
    space.rejected(workload("huge", gpu_mem=100 * P100))
    yield space
    space.clear()


@pytest.fixture(scope="module")
def manager(cluster: Cluster) -> Iterator[str]:
    """The address of an MPS manager with one card of its own."""
    home = cluster.state_dir / MPS_NODE
    home.mkdir(mode=0o711)
    mps.open_up(home, cluster.state_dir.parent)
    known = yaml.safe_load((cluster.node("n1").folder / "cards.yaml").read_text())["cards"][0]
    (home / "cards.yaml").write_text(yaml.safe_dump({"cards": [known | {"uuid": "GPU-metrics-0"}]}))
    (port,) = ports.free(1)
    address = f"127.0.0.1:{port}"
    kubeconfig = cluster.state_dir / "kubeconfig" / "cardwise-deviceplugin"
    flags = [flag for flag in mps.flags(home, MPS_NODE) if not flag.startswith("--metrics-bind")]
    process = Process(cluster.state_dir, MPS_NODE)
    process.start(
        [str(PROGRAM), f"--kubeconfig={kubeconfig}", f"--metrics-bind={address}", *flags, "--stop-daemons=always"],
        mps.environment(),
    )
    yield address
    process.stop(30)


@pytest.fixture(scope="module")
def addresses(cluster: Cluster, manager: str) -> dict[str, dict[str, dict[str, str]]]:
    """What there is to scrape: labels by address by job."""
    parts = cluster.parts
    nodes = {f"127.0.0.1:{parts.metrics_port(f'deviceplugin-{node}')}": {"node": node} for node in ("n1", "n2")}
    return {
        "cardwise-webhook": {f"127.0.0.1:{parts.ports['webhook-metrics']}": {}},
        "cardwise-extender": {f"127.0.0.1:{parts.ports['extender-metrics']}": {}},
        "cardwise-deviceplugin": nodes,
        "cardwise-mps": {manager: {"node": MPS_NODE}},
    }


@pytest.fixture(scope="module")
def prometheus(
    cluster: Cluster, folder: Path, addresses: dict[str, dict[str, dict[str, str]]], space: Space
) -> Iterator[Prometheus]:
    del space  # its pods are to be told
    prometheus = Prometheus(folder, cluster.state_dir / "prometheus", addresses)
    prometheus.start(ALERTS, RULES)
    count = sum(map(len, addresses.values()))
    try:
        assert wait_for(lambda: _up(prometheus) == count), prometheus.query("up")
        yield prometheus
    finally:
        prometheus.stop()


def _up(prometheus: Prometheus) -> int:
    return sum(sample["value"][1] == "1" for sample in prometheus.query("up"))


def _panels() -> dict[str, str]:
    """The expressions of the dashboard by panel, with its variables filled in."""
    expressions = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$node", ".*")
            assert "$" not in expression, f"{panel['title']}: a variable that nobody fills in"
            expressions[f"{panel['title']} {target['refId']}"] = expression
    return expressions


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    panels = _panels()
    assert len(panels) > 50
    empty = dict(panels)

    def all_panels_show() -> bool:
        for name, expression in list(empty.items()):
            if prometheus.query(expression):
                del empty[name]
        return not [query for query in empty.values() if not _quiet(query)]

    wait_for(all_panels_show)
    assert {name: query for name, query in empty.items() if not _quiet(query)} == {}


def _quiet(expression: str) -> bool:
    return any(name in expression for name in QUIET)


def test_the_numbers_are_those_of_the_cluster(prometheus: Prometheus, space: Space) -> None:
    node, index = space.placed("half")
    card = f'node="{node}",index="{index}"'
    ours = {(P100 // 2 + offset) * _MIB for offset in (0, 1024, 2048)}  # the gang may be on the same card
    _eventually(prometheus, f"cardwise_gpu_used_bytes{{{card}}}", lambda samples: samples <= ours)
    _eventually(prometheus, f"cardwise_gpu_granted_bytes{{{card}}}", lambda samples: min(samples) >= P100 // 2 * _MIB)
    _eventually(prometheus, f"cardwise_gpu_cores_used_ratio{{{card}}}", lambda samples: samples == {0.5})
    _eventually(prometheus, "sum(cardwise_gpu_memory_bytes)", lambda samples: samples == {4 * P100 * _MIB})
    difference = "sum(cardwise_gpu_free_bytes + cardwise_gpu_used_bytes - cardwise_gpu_memory_bytes)"
    _eventually(prometheus, difference, lambda samples: samples == {0})
    _eventually(prometheus, "sum(cardwise_extender_leader)", lambda samples: samples == {1})
    _eventually(prometheus, 'cardwise_extender_gangs{phase="Running"}', lambda samples: min(samples) >= 1)
    waiting = f'cardwise_extender_waiting_pods{{reason="{Refusal.NO_WHOLE_CARD.text}"}}'
    _eventually(prometheus, waiting, lambda samples: min(samples) >= 1)
    refused = 'sum(cardwise_webhook_refusals_total{reason="memory"})'
    _eventually(prometheus, refused, lambda samples: min(samples) >= 1)
    _eventually(prometheus, 'cardwise_mps_state{state="Ready"}', lambda samples: samples == {1})
    _eventually(prometheus, "cardwise_extender_ledger_disagreements", lambda samples: samples == {0})
    _eventually(
        prometheus, "cardwise_certificate_expiry_timestamp_seconds > bool time()", lambda samples: samples == {1}
    )


def _eventually(prometheus: Prometheus, expression: str, good: Callable[[set[float]], bool]) -> None:
    seen: set[float] = set()

    def query() -> bool:
        nonlocal seen
        seen = {float(sample["value"][1]) for sample in prometheus.query(expression)}
        return bool(seen) and good(seen)

    assert wait_for(query), f"{expression}: {seen}"


def test_every_alert_can_be_evaluated(prometheus: Prometheus) -> None:
    written = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

    def rules() -> dict[str, dict[str, Any]]:
        groups = prometheus.query_api("rules", type="alert")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    wait_for(lambda: all(rule["health"] == "ok" for rule in rules().values()))
    loaded = rules()
    assert sorted(loaded) == sorted(written)
    assert {name: rule.get("lastError", "") for name, rule in loaded.items() if rule["health"] != "ok"} == {}
    assert wait_for(lambda: rules()["CardwiseNoLeader"]["state"] == "inactive")


def _expression(alert: str) -> str:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return next(str(rule["expr"]) for group in groups for rule in group["rules"] if rule["alert"] == alert)


def test_an_alert_speaks_when_there_is_reason(prometheus: Prometheus) -> None:
    """What nobody scrapes is no leader either."""
    expression = _expression("CardwiseNoLeader")
    # Where one look at the extender takes too long, it has no leader until the next.
    assert wait_for(lambda: prometheus.query(expression) == [])
    assert prometheus.query(expression.replace("cardwise_extender_leader", "cardwise_extender_nobody"))


def test_every_part_that_is_scraped_is_one_that_may_be_down(
    prometheus: Prometheus, addresses: dict[str, dict[str, dict[str, str]]]
) -> None:
    expression = _expression("CardwisePartDown")
    assert wait_for(lambda: prometheus.query(expression) == []), prometheus.query(expression)
    every = {address for targets in addresses.values() for address in targets}
    up = expression.replace("< 0.5", ">= 0.5")
    # One more scrape that takes too long, and a part that was long in coming is below again.
    watched = lambda: {sample["metric"]["instance"] for sample in prometheus.query(up)}  # noqa: E731
    assert wait_for(lambda: watched() == every), watched()


def test_types_are_as_documented(prometheus: Prometheus) -> None:
    kinds = {name: metadata[0]["type"] for name, metadata in prometheus.query_api("metadata").items()}
    # OpenMetrics, which Prometheus asks for, names a counter's family without the suffix.
    ours = {
        f"{name}_total" if kind == "counter" else name: kind
        for name, kind in kinds.items()
        if name.startswith("cardwise_")
    }
    known = {name: row.kind for rows in documented().values() for name, row in rows.items()}
    assert {name: kind for name, kind in ours.items() if known.get(name) != kind} == {}
    assert len(ours) > 40


def test_what_the_parts_serve_is_what_promtool_takes(
    folder: Path, addresses: dict[str, dict[str, dict[str, str]]], prometheus: Prometheus
) -> None:
    del prometheus  # somebody has scraped before: some are counted only then
    rules = subprocess.run(
        [folder / "promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert rules.returncode == 0, rules.stdout + rules.stderr
    for job, targets in addresses.items():
        for address in targets:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
                text = answer.read()
            command = [folder / "promtool", "check", "metrics"]
            done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=PATIENCE)
            complaints = [line for line in done.stderr.decode().splitlines() if re.match(r"(cardwise_|error)", line)]
            assert complaints == [], f"{job}: {complaints}"
