"""`cardwise drain`: who is evicted, what it waits for, and what it says where the card does not get empty."""

import math

import click
import pytest
from click.testing import CliRunner

from cardwise.cli import main
from cardwise.cli.cluster import cordons
from cardwise.cli.commands import drain
from cardwise.kube import errors, paths
from tests.cli.clusters import card, placed, run
from tests.cli.evictioncluster import Cards, running, spec
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock

TITLE = "GPU 0 of node n1 (GPU-n1-0)"


def work(api: Cards, **rules) -> drain.Drain:
    rules = drain.DrainRules(**{"timeout": 60.0} | rules)
    return drain.Drain(api.kube, cordons.find_card(api.kube, "n1/0"), rules, FakeClock())


def test_only_the_pods_of_the_card_are_evicted_and_it_ends_when_they_are_gone(capsys):
    others = [running("beside", index=1), running("elsewhere", "n2")]
    api = Cards([card("n1", 0), card("n1", 1)], [running("a"), running("b"), *others])
    work(api).run("it smokes")
    assert [name for name, _ in api.evicted] == ["a", "b"]
    assert api.evicted[0][1] == {"preconditions": {"uid": "team-a-a"}}, "with the time that the pod asks for"
    assert spec(api, "gpu-n1-0")["cordon"]["reason"] == "it smokes"
    assert capsys.readouterr().out.splitlines() == [
        f"{TITLE} cordoned",
        "evicting pod team-a/a",
        "evicting pod team-a/b",
        "pod team-a/a is gone",
        "pod team-a/b is gone",
        f"{TITLE} drained",
    ]


def test_the_time_that_pods_get_to_end_can_be_set():
    api = Cards([card("n1", 0)], [running("a")])
    work(api, grace_seconds=0).run("")
    assert api.evicted[0][1]["gracePeriodSeconds"] == 0


def test_what_a_budget_holds_back_is_asked_again_and_told_once(capsys):
    api = Cards([card("n1", 0)], [running("a")])
    api.holds_back("a", 3)
    work(api).run("")
    captured = capsys.readouterr()
    assert captured.out.endswith(f"pod team-a/a is gone\n{TITLE} drained\n")
    assert captured.err.count("the disruption budget web needs 1 healthy pods") == 1


def test_a_conflict_is_asked_again():
    api = Cards([card("n1", 0)], [running("a")])
    api.fault(Fault(status=409), "create", "*/eviction")
    work(api).run("")
    assert [name for name, _ in api.evicted] == ["a"]


def test_a_budget_that_never_gives_way_ends_it_with_the_reason():
    api = Cards([card("n1", 0)], [running("a"), running("b")])
    api.holds_back("a", math.inf)
    with pytest.raises(click.ClickException) as refused:
        work(api).run("")
    assert "is not empty after 60 s: team-a/a (the disruption budget web needs 1 healthy pods)" in str(refused.value)
    assert "it stays cordoned" in str(refused.value)
    assert spec(api, "gpu-n1-0")["unschedulable"] is True


def test_a_pod_that_does_not_end_is_named():
    api = Cards([card("n1", 0)], [running("a")])
    api.lasting = {"a"}
    with pytest.raises(click.ClickException) as refused:
        work(api).run("")
    assert "team-a/a (ending)" in str(refused.value)
    assert len(api.evicted) == 1, "once is enough"


def test_containers_that_outlive_their_pod_are_waited_for():
    held = [{"podUID": "gone", "namespace": "team-b", "name": "gone", "memoryMiB": 5, "container": "0"}]
    smoking = card("n1", 0)
    smoking["status"]["reported"] = held
    api = Cards([smoking], [])
    with pytest.raises(click.ClickException) as refused:
        work(api).run("")
    assert "team-b/gone (its containers still run)" in str(refused.value)
    api.change("extendedresources", "gpu-n1-0", status={"reported": []})
    work(api).run("")


def test_a_pod_that_was_being_bound_meanwhile_is_evicted_too():
    api = Cards([card("n1", 0)], [])

    def bound(_: object) -> None:
        if len(api.sent("list", paths.pods())) == 3:  # the check, the first look, the second
            api.add("pods", running("late"))

    api.before_request(bound, "list", paths.pods(), times=3)
    work(api).run("")
    assert [name for name, _ in api.evicted] == ["late"]


def test_bare_pods_and_those_of_daemonsets_need_a_word(capsys):
    bare = placed("team-a", "bare", "n1", 0, 10)
    api = Cards([card("n1", 0)], [bare, running("a")])
    with pytest.raises(click.ClickException, match=r"would not be recreated: team-a/bare; --force evicts them"):
        work(api).run("")
    assert "unschedulable" not in spec(api, "gpu-n1-0"), "nothing is half-done"
    work(api, force=True).run("")
    assert [name for name, _ in api.evicted] == ["a", "bare"]
    api = Cards([card("n1", 0)], [running("agent", kind="DaemonSet"), running("a")])
    with pytest.raises(click.ClickException, match=r"recreated at once: team-a/agent; --ignore-daemonsets leaves"):
        work(api).run("")
    work(api, ignore_daemonsets=True).run("")
    assert [name for name, _ in api.evicted] == ["a"]
    assert capsys.readouterr().out.endswith("drained\n")


def test_finished_pods_hold_nothing():
    api = Cards([card("n1", 0)], [placed("team-a", "done", "n1", 0, 10) | {"status": {"phase": "Succeeded"}}])
    work(api).run("")
    assert api.evicted == []


def test_a_rehearsal_changes_nothing_and_tells_what_is_in_the_way(capsys):
    api = Cards([card("n1", 0)], [running("a"), running("b")])
    api.holds_back("b", 1)
    work(api).simulate_run("")
    assert (api.evicted, api.rehearsed) == ([], ["a"])
    assert "unschedulable" not in spec(api, "gpu-n1-0")
    assert capsys.readouterr().out.splitlines() == [
        "pod team-a/a would be evicted",
        "pod team-a/b cannot be evicted yet, and would be tried again: the disruption budget web needs 1 healthy pods",
        f"{TITLE} would be drained; nothing was changed",
    ]


def test_a_missing_right_ends_it():
    api = Cards([card("n1", 0)], [running("a")])
    api.fault(Fault(status=403), "create", "*/eviction")
    with pytest.raises(errors.Forbidden):
        work(api).run("")


def test_the_command_takes_its_settings(monkeypatch):
    api = Cards([card("n1", 0)], [placed("team-a", "bare", "n1", 0, 10)])
    args = ["drain", "n1/0", "--force", "--grace-period=3", "--timeout=1m", "--dry-run"]
    completed = run(monkeypatch, api, *args)
    assert (completed.exit_code, api.rehearsed) == (0, ["bare"])
    completed = run(monkeypatch, api, "drain", "n1/0")
    assert completed.exit_code == 1
    assert "--force" in completed.stderr
    completed = run(monkeypatch, api, *args[:-1], clock=FakeClock())
    assert (completed.exit_code, api.evicted[0][1]["gracePeriodSeconds"]) == (0, 3)


def test_a_grace_period_of_no_meaning_is_refused():
    completed = CliRunner().invoke(main.cli, ["drain", "n1/0", "--grace-period=-3"])
    assert completed.exit_code == 2
    assert "-3 is not in the range x>=-1" in completed.stderr
