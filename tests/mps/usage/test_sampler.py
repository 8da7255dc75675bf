"""What containers use of GPUs, as metrics and as the history of the last hours have it."""

import os
from collections.abc import Callable, Iterator

import pytest

from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.quantity import MiB
from cardwise.gpus import usagereport
from cardwise.gpus.usagereport import ContainerUsage
from cardwise.kube import paths
from mps.host.cgroups import CgroupMembership
from mps.host.processes import SERVER_PROGRAM
from mps.usage import usemetrics
from mps.usage.history import History
from tests.mps.mpsnode import CID, NODE, P100, Node, uuid_of

MIB = 1024 * 1024
GRANTED, USED, PEAK, BUSY = (
    f"cardwise_container_gpu_{name}"
    for name in ("memory_granted_bytes", "memory_used_bytes", "memory_peak_bytes", "sm_busy_seconds_total")
)


@pytest.fixture
def sample(node) -> Callable[..., None]:
    def take_samples(seconds: int = 1) -> None:
        for _ in range(seconds):
            node.clock.advance(1.0)
            node.manager._sampler.sample_once()

    return take_samples


def exported(node: Node, name: str) -> dict[str, float]:
    """The samples of a metric by pod."""
    usemetrics.USES.read_uses = node.manager._sampler.exported_uses
    samples = [sample for family in usemetrics.USES.collect() for sample in family.samples if sample.name == name]
    return {sample.labels["pod"]: sample.value for sample in samples}


def usage_of(node: Node, pod: str) -> ContainerUsage:
    report = usagereport.decode_report(node.manager.usage_report())
    return next(usage for usage in report.containers if usage.pod == pod)


def test_each_container_with_a_share_has_granted_and_used_memory(node, sample):
    node.bind("busy", 0, 4000)
    node.bind("idle", 0, 3000, without_mps=True)
    node.publication.tiers = {uuid_of(0): "mps"}
    node.use(0, 300, "busy")
    node.use(0, 200, "busy")
    node.use(0, 900)  # of no pod
    node.start()
    sample()
    assert exported(node, GRANTED) == {"busy": 4000 * MIB, "idle": 3000 * MIB}
    assert exported(node, USED) == {"busy": 500 * MIB, "idle": 0}
    labels = [sample.labels for family in usemetrics.USES.collect() for sample in family.samples]
    busy = {"namespace": "default", "pod": "busy", "container": "main", "workload": "Pod/busy", "UUID": uuid_of(0)}
    assert busy | {"class": "", "tier": "mps"} in labels
    assert {entry["tier"] for entry in labels if entry["pod"] == "idle"} == {"advisory"}


def test_series_end_with_the_pod(node, sample):
    node.bind("short", 0, 4000)
    node.use(0, 300, "short")
    node.start()
    sample()
    node.end_clients()
    node.end("short")
    sample()
    assert exported(node, USED) == {}
    assert not usage_of(node, "short").running
    assert usage_of(node, "short").peaks_mib == {300: 1}, "remembered after its end"


def test_what_the_driver_does_not_report_is_unknown(node, sample):
    node.bind("silent", 0, 4000)
    process = node.use(0, 300, "silent")
    node.set_use(0, process.pid, None)
    node.start()
    sample()
    assert exported(node, USED) == exported(node, PEAK) == exported(node, BUSY) == {}
    assert exported(node, GRANTED) == {"silent": 4000 * MIB}
    assert usage_of(node, "silent") == ContainerUsage(
        namespace="default", pod="silent", container="main", workload="Pod/silent", gpu=uuid_of(0), granted_mib=4000
    )


def test_use_of_a_card_that_does_not_answer_is_unknown(node, sample):
    node.bind("pod", 0, 4000)
    node.start()
    sample()
    assert exported(node, USED) == {"pod": 0}
    node.lost.add(uuid_of(0))
    sample()
    assert exported(node, USED) == {}


def test_time_of_computing_is_counted_by_the_second(node, sample):
    node.bind("busy", 0, 4000)
    process = node.use(0, 300, "busy")
    node.set_use(0, process.pid, 300, smPercent=50)
    node.start()
    sample(4)
    assert exported(node, BUSY)["busy"] == pytest.approx(2.0, abs=0.6)
    node.set_use(0, process.pid, 300, smPercent=0)
    sample(30)
    assert usage_of(node, "busy").idle_seconds == pytest.approx(30.0)
    assert not usage_of(node, "busy").idle_is_minimum


def test_time_without_knowledge_is_no_idle_time(node, sample):
    node.bind("pod", 0, 4000)
    node.start()
    sample()
    assert exported(node, BUSY) == {"pod": 0}, "it has no process"
    process = node.use(0, 300, "pod")
    sample(5)
    assert exported(node, BUSY) == {}
    assert (usage_of(node, "pod").busy_percent, usage_of(node, "pod").idle_seconds) == (None, None)
    node.set_use(0, process.pid, 300, smPercent=0)
    sample(3)
    assert usage_of(node, "pod").idle_seconds == pytest.approx(2.0)
    assert usage_of(node, "pod").idle_is_minimum, "it may not have computed while that was unknown"


def test_use_that_the_driver_reports_for_the_server_is_unknown_of_its_clients(node, sample):
    node.bind("client", 0, 4000)
    process = node.use(0, 300, "client")
    node.set_use(0, process.pid, 300, smPercent=0)
    server = node.use(0, 30, name=SERVER_PROGRAM)
    node.set_use(0, server.pid, 30, smPercent=80)
    node.start()
    sample()
    assert exported(node, BUSY) == {}
    assert exported(node, USED) == {"client": 300 * MIB}


def test_processes_of_the_managers_pod_belong_to_no_container(node, sample):
    node.bind("manager", 0, 4000)
    node.host.processes[os.getpid()] = node.host.add("cardwise-mps", {}, CgroupMembership("uid-manager", CID))
    node.use(0, 300, "manager")
    node.start()
    sample()
    assert exported(node, USED) == {"manager": 0}


def test_history_has_the_peak_of_each_minute(node, sample):
    node.bind("pod", 0, 4000)
    process = node.use(0, 300, "pod")
    node.start()
    sample(60)
    node.set_use(0, process.pid, 2000)
    sample()
    node.set_use(0, process.pid, 400)
    sample(119)
    peaks = usage_of(node, "pod").peaks_mib
    assert sum(peaks.values()) in (3, 4), "the minutes are those of the clock"
    assert peaks[2000] == 1
    assert exported(node, PEAK)["pod"] == 400 * MIB, "of the last two minutes"
    report = usagereport.decode_report(node.manager.usage_report())
    assert (report.node, report.observed_seconds) == (NODE, pytest.approx(180, abs=5))


def test_a_peak_between_two_samples_comes_from_the_driver_once(node, sample):
    node.bind("pod", 0, 4000)
    process = node.use(0, 300, "pod")
    node.set_use(0, process.pid, 300, peakMiB=300)
    node.start()
    sample()
    node.set_use(0, process.pid, 300, peakMiB=3500)
    sample()
    assert exported(node, PEAK) == {"pod": 3500 * MIB}
    sample(180)
    assert exported(node, PEAK) == {"pod": 300 * MIB}
    assert usage_of(node, "pod").peaks_mib[3500] == 1


def test_use_is_forgotten_after_the_window(node, sample):
    node.bind("pod", 0, 4000)
    node.start()
    sample()
    node.end("pod")
    node.clock.advance(usagereport.WINDOW_SECONDS + 61)
    sample()
    assert usagereport.decode_report(node.manager.usage_report()).containers == []


def test_containers_of_pods_that_gpushare_placed_are_unknown(node, sample):
    share = CardShare(0, "", MiB(4000), 0, MiB(P100))
    node.bind("old", 0, 4000)
    annotations = {
        name: text
        for name, text in codec.encode(Assignment({"pod": (share,)}), assume_time_ns=1).items()
        if name.startswith("ALIYUN")
    }
    node.api.edit(paths.pods("default", "old"), metadata={"annotations": None})
    node.api.edit(paths.pods("default", "old"), metadata={"annotations": annotations})
    node.use(0, 500, "old")
    node.start()
    sample()
    usage = usage_of(node, "old")
    assert (usage.container, usage.granted_mib, usage.peaks_mib) == ("", 4000, {500: 1})


def test_changes_of_a_pods_metadata_are_no_new_series_and_no_new_containers(node, sample):
    node.bind("pod", 0, 4000)
    node.start()
    sample()
    labels = [sample.labels for family in usemetrics.USES.collect() for sample in family.samples]
    for i in range(5):
        owner = {"apiVersion": "x/v1", "kind": f"Foo{i}", "name": f"a{i}", "uid": "u", "controller": True}
        node.api.edit(
            paths.pods("default", "pod"),
            metadata={"ownerReferences": [owner], "annotations": {names.CLASS: f"class-{i}"}},
        )
        sample()
        assert [sample.labels for family in usemetrics.USES.collect() for sample in family.samples] == labels
    (usage,) = usagereport.decode_report(node.manager.usage_report()).containers
    assert usage.workload == "Pod/pod"


def test_an_owner_of_any_length_is_no_label(node, sample):
    node.bind("pod", 0, 4000)
    owner = {"apiVersion": "x/v1", "kind": "Foo", "name": "a\u2028" * 400_000, "uid": "u", "controller": True}
    node.api.edit(paths.pods("default", "pod"), metadata={"ownerReferences": [owner]})
    node.start()
    sample()
    assert len(node.manager.usage_report()) < 1000
    assert {sample.labels["workload"] for family in usemetrics.USES.collect() for sample in family.samples} == {
        "Pod/pod"
    }


def test_the_sampler_does_not_wait_while_a_report_is_made(node, sample, monkeypatch):
    node.bind("pod", 0, 4000)
    node.start()
    sample()
    make_usages = History.containers

    def containers(history: History, now: float) -> Iterator[ContainerUsage]:
        sample()
        return make_usages(history, now)

    monkeypatch.setattr(History, "containers", containers)
    (usage,) = usagereport.decode_report(node.manager.usage_report()).containers
    assert usage.peaks_mib == {0: 1}
