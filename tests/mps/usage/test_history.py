"""The history of use: what a pod's metadata cannot do to it, and how much it remembers."""

from cardwise.core.values.quantity import MiB
from mps.usage import history as histories
from mps.usage.containeruse import ContainerKey, ContainerUse
from mps.usage.history import History


def key(pod: str, container: str = "main", uuid: str = "GPU-0", namespace: str = "team-a") -> ContainerKey:
    return ContainerKey(namespace, pod, container, uuid, f"uid-{pod}")


def use(workload: str = "Deployment/web", mib: int = 100, resource_class: str = "") -> ContainerUse:
    return ContainerUse(
        workload=workload,
        resource_class=resource_class,
        tier="mps",
        granted=MiB(4000),
        memory=MiB(mib),
        peak_memory=None,
        sm_percent=None,
        bandwidth_percent=None,
    )


def test_a_container_keeps_the_workload_and_the_class_of_its_first_sight():
    history = History(0.0)
    for second in range(100):
        history.record({key("p"): use(f"Job/{second}", 100 + second, f"class-{second}")}, float(second), 1.0)
    (usage,) = history.containers(100.0)
    assert (usage.workload, sum(usage.peaks_mib.values()), max(usage.peaks_mib)) == ("Job/0", 2, 199)
    (present,) = history.present()
    assert (present.use.workload, present.use.resource_class, present.use.memory) == ("Job/0", "class-0", 199)


def test_a_pod_of_the_same_name_is_another_one():
    history = History(0.0)
    history.record({key("db-0"): use("StatefulSet/db")}, 1.0, 1.0)
    history.record({key("db-0")._replace(pod_uid="uid-new"): use("StatefulSet/db", 300)}, 2.0, 1.0)
    assert [(usage.running, usage.peaks_mib) for usage in history.containers(3.0)] == [
        (False, {100: 1}),
        (True, {300: 1}),
    ]


def test_one_pod_does_not_displace_the_containers_of_others(monkeypatch):
    monkeypatch.setattr(histories, "_MAX_CONTAINERS", 100)
    history = History(0.0)
    history.record({key("ended", namespace="team-b"): use("Job/ended")}, 1.0, 1.0)
    for second in range(300):
        history.record({key("p", f"c{second}"): use(f"Job/{second}")}, 2.0 + second, 1.0)
    remembered = list(history.containers(400.0))
    assert "ended" in {usage.pod for usage in remembered}
    assert len(remembered) == 1 + histories._MAX_PER_POD
    assert not list(history.present()), "a container that is not remembered has no series"


def test_ended_containers_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(histories, "_MAX_CONTAINERS", 3)
    history = History(0.0)
    for second in range(5):
        history.record({key("runs"): use(), key(f"job-{second}"): use()}, float(second), 1.0)
    assert [usage.pod for usage in history.containers(5.0)] == ["runs", "job-3", "job-4"]


def test_a_copy_does_not_change():
    history = History(0.0)
    history.record({key("p"): use()}, 1.0, 1.0)
    copy = history.copy()
    before = list(copy.containers(2.0))
    history.record({key("p"): use(mib=900), key("q"): use()}, 2.0, 1.0)
    history.record({}, 3.0, 1.0)
    assert list(copy.containers(2.0)) == before
