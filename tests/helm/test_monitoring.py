"""What the chart has for Prometheus and Grafana: off by default, and the files that everybody else reads."""

import functools
import json
import subprocess

import pytest
import yaml

from cardwise.core.values.decoded import Json
from tests.helm.rendering import CHART, GIVEN, Objects, Render, documents, get_object, template

API = ("-a", "monitoring.coreos.com/v1")
FILES = CHART / "files"
WATCHED = (
    "monitoring.podMonitor.enabled=true",
    "monitoring.alerts.enabled=true",
    "monitoring.alerts.labels.release=stack",
    "monitoring.dashboard.enabled=true",
)


@pytest.fixture(scope="module")
def watched(helm: str) -> Render:
    """With all of it, in a cluster that has the Prometheus Operator's kinds."""

    @functools.cache
    def rendered(*sets: str) -> Objects:
        settings = [*WATCHED, *sets]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        command = [helm, "template", "cardwise", str(CHART), "-n", "cardwise-system", "--kube-version", "1.34.0"]
        done = subprocess.run([*command, *API, *GIVEN, *flags], capture_output=True, text=True, check=True)
        return documents(done.stdout)

    return rendered


def kinds(objects: Objects) -> set[str]:
    return {manifest["kind"] for manifest in objects}


def test_by_default_it_is_where_the_cluster_has_its_kinds(watched: Render) -> None:
    auto = watched("monitoring.podMonitor.enabled=auto", "monitoring.alerts.enabled=auto")
    assert kinds(auto) >= {"PodMonitor", "PrometheusRule"}
    off = watched("monitoring.podMonitor.enabled=false", "monitoring.alerts.enabled=false")
    assert not kinds(off) & {"PodMonitor", "PrometheusRule"}


def test_nothing_of_it_is_there_by_default_where_nobody_has_its_kinds(render: Render) -> None:
    objects = render()
    assert not kinds(objects) & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert not [manifest for manifest in objects if manifest["metadata"]["name"] == "cardwise-dashboard"]


def test_kinds_that_the_cluster_lacks_are_refused_with_the_value(helm: str) -> None:
    for setting in ("monitoring.podMonitor.enabled", "monitoring.alerts.enabled"):
        done = template(helm, f"{setting}=true")
        assert done.returncode != 0
        assert f"{setting}: the cluster has no monitoring.coreos.com/v1" in done.stderr


def test_the_monitor_finds_the_metrics_port_of_every_part(watched: Render) -> None:
    objects = watched()
    spec = get_object(objects, "PodMonitor", "cardwise")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("metrics", "/metrics", "30s")
    workloads = [manifest for manifest in objects if manifest["kind"] in ("Deployment", "DaemonSet")]
    scraped = [workload["spec"]["template"] for workload in workloads if _selects(spec["selector"], workload)]
    assert len(scraped) == 4
    for pod in scraped:
        ports = [port["name"] for container in pod["spec"]["containers"] for port in container["ports"]]
        assert ports.count("metrics") == 1


def _selects(selector: Json, workload: Json) -> bool:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    (several,) = selector["matchExpressions"]
    return labels.items() >= selector["matchLabels"].items() and labels[several["key"]] in several["values"]


def test_the_rules_are_those_of_the_files(watched: Render) -> None:
    objects = watched()
    rule = get_object(objects, "PrometheusRule", "cardwise")
    assert rule["metadata"]["labels"]["release"] == "stack"
    assert rule["metadata"]["labels"]["app.kubernetes.io/name"] == "cardwise"
    files = [yaml.safe_load((FILES / folder / "cardwise.yaml").read_text()) for folder in ("alerts", "rules")]
    assert rule["spec"] == {"groups": [group for file in files for group in file["groups"]]}


def test_runbooks_may_be_elsewhere(watched: Render) -> None:
    objects = watched("monitoring.alerts.runbooks=https://example.com/books")
    rules = [
        rule for group in get_object(objects, "PrometheusRule", "cardwise")["spec"]["groups"] for rule in group["rules"]
    ]
    for rule in (rule for rule in rules if "alert" in rule):
        assert rule["annotations"]["runbook_url"] == f"https://example.com/books#{rule['alert'].lower()}"


def test_the_dashboard_is_the_file_with_grafanas_label(watched: Render) -> None:
    configmap = get_object(watched(), "ConfigMap", "cardwise-dashboard")
    assert configmap["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(configmap["data"]["cardwise.json"]) == json.loads(
        (FILES / "dashboards" / "cardwise.json").read_text()
    )


def test_panels_do_not_lie_on_each_other() -> None:
    panels = json.loads((FILES / "dashboards" / "cardwise.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & occupied, panel["title"]
        occupied |= cells
