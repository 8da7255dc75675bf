"""`cardwise advise`, `idle` and `report` with a real Prometheus that has recorded three days of simulated use."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from cardwise.core.values.decoded import Json
from cardwise.core.values.timestamps import format_timestamp, subtract_seconds
from tests.cli import clusters
from tests.cli.clusters import Cluster, placed
from tests.cluster import binaries
from tests.cluster.processes import wait_for
from tests.cluster.prometheus import Prometheus, programs
from tests.observability.metricdocs import ROOT

FILES = ROOT / "helm" / "cardwise" / "files"
RULES = FILES / "rules" / "cardwise.yaml"
HOUR, DAY = 60, 24 * 60  # minutes
RECORDED = 3 * DAY
STEP = 9  # minutes, of three days
MIB = 1024 * 1024

# For a number of minutes ago: MiB in use, and whether the pod computes; None is unknown.
Use = Callable[[int], tuple[int, bool | None] | None]


def web(minute: int) -> tuple[int, bool | None]:
    """Of five hours one and a half with 8,000 MiB; once 9,000."""
    if 50 * HOUR <= minute < 50 * HOUR + 10:
        return 9000, True
    return (8000 if minute // 30 % 10 < 3 else 2000), True


USES: dict[str, Use] = {
    "web-0": web,
    "web-1": web,
    "web-ended": lambda minute: (9500, True) if minute > 2 * DAY else None,
    "sleeper": lambda minute: (3000, minute >= 26 * HOUR),
    "never": lambda _: (100, False),
    "restarted": lambda minute: (100, minute > DAY if not HOUR <= minute <= 5 * HOUR else None),
    "silent": lambda _: (25000, None),
}
GRANTED = 20000
TOTAL = 80000  # MiB of the GPU


def workload_of(pod: str) -> str:
    return "Deployment/web" if pod.startswith("web") else f"Pod/{pod}"


def recorded(now: int) -> Iterator[str]:
    """What Prometheus has scraped each minute, as OpenMetrics."""
    names = ("memory_granted_bytes", "memory_used_bytes", "memory_peak_bytes", "sm_busy_seconds_total")
    lines: dict[str, list[str]] = {name: [] for name in names}
    for pod, use in USES.items():
        labels = f'namespace="team-a",pod="{pod}",container="main",workload="{workload_of(pod)}",UUID="GPU-n1-0"'
        busy_seconds = 0
        for minute in range(RECORDED, -1, -1):
            used = use(minute)
            if used is None:
                continue
            mib, is_busy = used
            busy_seconds += 20 * bool(is_busy)
            known = dict(zip(names, (GRANTED * MIB, mib * MIB, mib * MIB), strict=False))
            for name, number in (known | ({} if is_busy is None else {"sm_busy_seconds_total": busy_seconds})).items():
                line = f"cardwise_container_gpu_{name}{{{labels}}} {number} {now - 60 * minute}"
                lines[name].append(line)
    for name, samples in lines.items():
        family, kind = name.removesuffix("_total"), "counter" if name.endswith("_total") else "gauge"
        yield f"# TYPE cardwise_container_gpu_{family} {kind}"
        yield from samples
    yield "# TYPE cardwise_gpu_memory_bytes gauge"
    for minute in range(RECORDED, -1, -1):
        yield f'cardwise_gpu_memory_bytes{{gpu="GPU-n1-0",node="n1"}} {TOTAL * MIB} {now - 60 * minute}'
    yield "# EOF"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With that history, and the rules and alerts of the chart."""
    try:
        folder = programs(print)
    except binaries.NoBinaries as error:
        pytest.skip(str(error))
    state = tmp_path_factory.mktemp("prometheus")
    history = state / "history"
    history.write_text("\n".join(recorded(int(time.time()))) + "\n")
    # One block for all: a block for every two hours takes four times as long.
    command = [folder / "promtool", "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=162h"]
    subprocess.run([*command, history, state / "data"], check=True, capture_output=True)
    server = Prometheus(folder, state, {})
    server.start()
    try:
        record_past(folder, state, f"http://127.0.0.1:{server.port}")
        server.stop()
        server.start(RULES, FILES / "alerts" / "cardwise.yaml")
        yield server
    finally:
        server.stop()


def record_past(folder: Path, state: Path, url: str) -> None:
    """What the rules would have recorded, each five minutes, until a minute ago."""
    now = int(time.time())
    command = [
        folder / "promtool",
        "tsdb",
        "create-blocks-from",
        "--max-block-duration=162h",
        "rules",
        f"--start={now - 60 * RECORDED}",
    ]
    command += [f"--end={now - 60}", "--eval-interval=5m", f"--url={url}", f"--output-dir={state / 'data'}", RULES]
    completed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


@pytest.fixture(scope="module")
def url(prometheus: Prometheus) -> str:
    return f"http://127.0.0.1:{prometheus.port}"


@pytest.fixture
def api() -> Cluster:
    """The pods that have not ended; all started a week ago."""
    api = Cluster({})
    for pod in USES:
        if pod != "web-ended":
            manifest = placed("team-a", pod, "n1", 0, GRANTED)
            if pod.startswith("web"):
                owner = {"kind": "ReplicaSet", "name": "web-1a2b", "uid": "u", "controller": True}
                manifest["metadata"] |= {"ownerReferences": [owner], "labels": {"pod-template-hash": "1a2b"}}
            started = format_timestamp(subtract_seconds(api.clock.wall(), 7 * DAY * 60))
            api.add("pods", manifest | {"status": {"phase": "Running", "startTime": started}})
    return api


def printed(monkeypatch: pytest.MonkeyPatch, api: Cluster, *words: str) -> Json:
    completed = clusters.run(monkeypatch, api, *words, "-n", "team-a", "-o", "json")
    assert completed.exit_code == 0, completed.output
    return dict(json.loads(completed.stdout))


def quantile(peaks: Sequence[int], percent: int) -> int:
    """The smallest of the peaks that so many percent do not exceed."""
    return sorted(peaks)[-(-len(peaks) * percent // 100) - 1]


def test_advise_prints_the_numbers_of_the_recorded_use(url, monkeypatch, api):
    document = printed(monkeypatch, api, "advise", "--prometheus", url, "--since", "72h")
    containers = {container["workload"]: container for container in document["containers"]}
    pods = [pod for pod in USES if pod.startswith("web")]
    peaks = [used[0] for pod in pods for minute in range(RECORDED) if (used := USES[pod](minute)) is not None]
    web = containers["Deployment/web"]
    assert (web["p50MiB"], web["p99MiB"], web["peakMiB"]) == (quantile(peaks, 50), quantile(peaks, 99), max(peaks))
    assert web["pods"] == len(pods)
    assert web["recommendedMiB"] == -(-max(peaks) * 115 // 6400) * 64
    assert abs(web["knownMinutes"] - len(peaks)) <= STEP * len(pods)
    assert containers["Pod/sleeper"]["peakMiB"] == 3000
    assert any("use is what Prometheus has recorded: at least the last 3d" in note for note in document["notes"])


def test_idle_prints_the_numbers_of_the_recorded_use(url, monkeypatch, api):
    document = printed(monkeypatch, api, "idle", "--for", "2h", "--prometheus", url, "--since", "72h")
    idle_minutes = {pod["name"]: pod["idleSeconds"] / 60 for pod in document["pods"]}
    assert list(idle_minutes) == ["never", "sleeper"]
    # A step is not idle if it, or the minutes before it, have computing in them.
    for pod, minutes in (("never", RECORDED), ("sleeper", 26 * HOUR)):
        assert minutes - 3 * STEP <= idle_minutes[pod] <= minutes
    assert [pod["mayBeLonger"] for pod in document["pods"]] == [True, False]
    assert document["undecided"] == ["team-a/restarted"], "its use is known for an hour only"
    assert document["unknown"] == ["team-a/silent"]


def test_a_namespace_without_recorded_use_says_what_prometheus_must_scrape(url, monkeypatch, api):
    completed = clusters.run(monkeypatch, api, "advise", "-n", "team-b", "--prometheus", url)
    assert completed.exit_code == 0
    assert "Prometheus has no cardwise_container_gpu_memory_granted_bytes of namespace team-b" in completed.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--prometheus", "localhost:9090"], "this is not a URL; write, for example, http://localhost:9090"),
        (["--prometheus", "http://127.0.0.1:1"], "Prometheus at http://127.0.0.1:1 does not answer"),
        (["--since", "7d"], "--since is about Prometheus: add --prometheus URL"),
        (["--prometheus", "http://127.0.0.1:1", "--since", "5m"], "--since: write at least 1h"),
        (["--prometheus", "http://127.0.0.1:1", "--since", "2h", "--for", "2h"], "--for must be shorter than --since"),
    ],
)
def test_wrong_arguments_are_errors(monkeypatch, api, words, problem):
    completed = clusters.run(monkeypatch, api, "idle", "-n", "team-a", *words)
    assert completed.exit_code > 0
    assert problem in completed.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "a report needs Prometheus: add --prometheus URL"),
        (["--prometheus", "http://127.0.0.1:1", "--since", "5m"], "--since: write at least 1h"),
        (
            ["--prometheus", "http://127.0.0.1:1", "--by", "node"],
            "'node' is not one of 'namespace', 'class', 'workload'",
        ),
    ],
)
def test_wrong_arguments_of_report_are_errors(monkeypatch, api, words, problem):
    completed = clusters.run(monkeypatch, api, "report", *words)
    assert completed.exit_code == 2
    assert problem in completed.output


def test_another_page_than_prometheus_is_an_error(url, monkeypatch, api):
    with_password = url.replace("http://", "http://user:secret@")
    completed = clusters.run(monkeypatch, api, "idle", "-n", "team-a", "--prometheus", f"{with_password}/elsewhere")
    assert completed.exit_code == 1
    assert "/elsewhere: status 404, and not an answer of Prometheus' API: check the URL" in completed.output
    assert "secret" not in completed.output


def recorded_mib(prometheus: Prometheus, name: str) -> dict[str, float]:
    """A recorded metric in MiB by workload."""
    samples = prometheus.query(f"workload:cardwise_container_gpu_memory_{name} / {MIB}")
    return {sample["metric"]["workload"]: float(sample["value"][1]) for sample in samples}


def test_the_rules_record_the_use_by_workload(prometheus):
    pods = [pod for pod in USES if USES[pod](0) is not None]
    granted = {workload_of(pod): float(GRANTED) for pod in pods} | {"Deployment/web": 2.0 * GRANTED}
    used = {pod: min(GRANTED, use[0]) for pod in pods if (use := USES[pod](0)) is not None}
    assert wait_for(lambda: recorded_mib(prometheus, "granted_bytes:sum") == granted)
    assert wait_for(lambda: recorded_mib(prometheus, "granted_bytes:unknown"))
    assert recorded_mib(prometheus, "used_bytes:sum") == {
        workload: float(sum(used[pod] for pod in pods if workload_of(pod) == workload)) for workload in granted
    }
    idle = dict.fromkeys(("Pod/sleeper", "Pod/never", "Pod/restarted"), float(GRANTED))
    assert recorded_mib(prometheus, "granted_bytes:idle") == idle
    assert recorded_mib(prometheus, "granted_bytes:unknown") == {"Pod/silent": float(GRANTED)}
    gpus = prometheus.query("workload:cardwise_container_gpu_memory_granted_gpus:sum")
    assert sum(float(sample["value"][1]) for sample in gpus) == pytest.approx(len(pods) * GRANTED / TOTAL)


def test_panels_and_alerts_of_recorded_metrics_have_data(prometheus):
    assert wait_for(lambda: recorded_mib(prometheus, "granted_bytes:unknown"))
    panels = json.loads((FILES / "dashboards" / "cardwise.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    recorded = [expression for expression in expressions if "workload:" in expression]
    assert recorded
    assert [expression for expression in recorded if not prometheus.query(expression)] == []
    alerts = yaml.safe_load((FILES / "alerts" / "cardwise.yaml").read_text())["groups"]
    (idle,) = [rule for group in alerts for rule in group["rules"] if rule["alert"] == "CardwiseIdleShares"]
    assert prometheus.query(idle["expr"]) == [], "three of six shares are idle, which is not more than half"
    assert prometheus.query(idle["expr"].replace("0.5", "0.4"))


def simulated_hours(pod: str) -> dict[str, float]:
    """MiB-hours of a pod: granted, used, idle and unknown."""
    hours = dict.fromkeys(("granted", "used", "idle", "unknown"), 0.0)
    for minute in range(RECORDED):
        use = USES[pod](minute)
        if use is None:
            continue
        mib, is_busy = use
        hours["granted"] += GRANTED / 60
        hours["used"] += min(mib, GRANTED) / 60
        hours["idle"] += GRANTED / 60 * (is_busy is False)
        hours["unknown"] += GRANTED / 60 * (is_busy is None)
    return hours


def test_report_prints_the_totals_of_the_recorded_use(url, monkeypatch, api):
    document = printed(monkeypatch, api, "report", "--prometheus", url, "--since", "72h", "--by", "workload")
    groups = {group["workload"]: group for group in document["groups"]}
    assert groups.keys() == {workload_of(pod) for pod in USES}
    hours = {pod: simulated_hours(pod) for pod in USES}
    # A rule counts idle time from the tenth minute on, and Prometheus a series for five minutes after its end.
    exact = 0.5 * GRANTED
    for workload, group in groups.items():
        for name in ("granted", "used", "idle", "unknown"):
            simulated = sum(hours[pod][name] for pod in USES if workload_of(pod) == workload)
            assert group[f"{name}MiBHours"] == pytest.approx(simulated, abs=exact), (workload, name)
        assert group["grantedGPUHours"] == pytest.approx(group["grantedMiBHours"] / TOTAL, abs=0.02)
    assert document["capacityMiBHours"] == pytest.approx(TOTAL * RECORDED / 60, abs=exact)


def test_report_by_namespace_is_the_sum_of_its_workloads(url, monkeypatch, api):
    words = ("report", "--prometheus", url, "--since", "72h")
    groups = printed(monkeypatch, api, *words, "--by", "workload")["groups"]
    completed = clusters.run(monkeypatch, api, *words, "-o", "csv")
    head, line = completed.stdout.splitlines()
    assert head == "namespace,grantedMiBHours,grantedGPUHours,usedMiBHours,idleMiBHours,unknownMiBHours"
    namespace, granted, *_ = line.split(",")
    assert namespace == "team-a"
    assert float(granted) == pytest.approx(sum(group["grantedMiBHours"] for group in groups), rel=0.01)
    table = clusters.run(monkeypatch, api, *words, "--by", "class").stdout
    assert [row.split() for row in table.splitlines()][1][0] == "(any)"
    assert "MiB-hours granted in the last 3d" in table


def test_a_report_without_recorded_use_names_the_rules(url, monkeypatch, api):
    completed = clusters.run(monkeypatch, api, "report", "--prometheus", url, "-n", "team-b")
    assert completed.exit_code == 0
    assert completed.stdout == ""
    assert "no recorded use of namespace team-b in this time: it must load the recording rules" in completed.stderr
