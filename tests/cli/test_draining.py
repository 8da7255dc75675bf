"""`cardwise drain`: who is evicted, what it waits for, and what it says where the card does not get empty."""

import click
import pytest
from click.testing import CliRunner

from cardwise.cli import cordoning, draining, main
from cardwise.kube import errors
from tests.cli.cardworlds import Cards, running, spec
from tests.cli.worlds import card, placed
from tests.fakes.clock import FakeClock

TITLE = "card 0 of node n1 (GPU-n1-0)"


def work(api: Cards, **rules) -> draining.Drain:
    rules = draining.Rules(**{"timeout": 60.0} | rules)
    return draining.Drain(api, cordoning.find(api, "n1/0"), rules, FakeClock())


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
    work(api, grace=0).run("")
    assert api.evicted[0][1]["gracePeriodSeconds"] == 0


def test_what_a_budget_holds_back_is_asked_again_and_told_once(capsys):
    api = Cards([card("n1", 0)], [running("a")])
    api.budget["a"] = 3
    work(api).run("")
    said = capsys.readouterr()
    assert said.out.endswith(f"pod team-a/a is gone\n{TITLE} drained\n")
    assert said.err.count("the disruption budget web needs 1 healthy pods") == 1


def test_a_conflict_is_asked_again(monkeypatch):
    api = Cards([card("n1", 0)], [running("a")])
    before, conflicts = api.create, [errors.Conflict(409, "Conflict", "the object has been modified")]

    def create(path, obj, timeout=None):
        if path.endswith("/eviction") and conflicts:
            raise conflicts.pop()
        return before(path, obj, timeout)

    monkeypatch.setattr(api, "create", create)
    work(api).run("")
    assert [name for name, _ in api.evicted] == ["a"]


def test_a_budget_that_never_gives_way_ends_it_with_the_reason():
    api = Cards([card("n1", 0)], [running("a"), running("b")])
    api.budget["a"] = 1000
    with pytest.raises(click.ClickException) as refused:
        work(api).run("")
    assert "is not empty after 60 s: team-a/a (the disruption budget web needs 1 healthy pods)" in str(refused.value)
    assert "it stays cordoned" in str(refused.value)
    assert spec(api, "gpu-n1-0")["unschedulable"] is True


def test_a_pod_that_does_not_end_is_named():
    api = Cards([card("n1", 0)], [running("a")])
    api.ends.clear()
    with pytest.raises(click.ClickException) as refused:
        work(api).run("")
    assert "team-a/a (ending)" in str(refused.value)
    assert len(api.evicted) == 1, "once is enough"


def test_containers_that_outlive_their_pod_are_waited_for():
    held = [{"podUID": "gone", "namespace": "team-b", "name": "gone", "memoryMiB": 5, "container": "0"}]
    smoking = card("n1", 0)
    smoking["status"]["held"] = held
    api = Cards([smoking], [])
    with pytest.raises(click.ClickException) as refused:
        work(api).run("")
    assert "team-b/gone (its containers still run)" in str(refused.value)
    smoking["status"]["held"] = []
    work(api).run("")


def test_a_pod_that_was_being_bound_meanwhile_is_evicted_too(monkeypatch):
    api = Cards([card("n1", 0)], [])
    before = api.list_pages
    looks = []

    def one_more(path, query=None):
        looks.append(path)
        if len([path for path in looks if path.endswith("pods")]) == 3:  # the check, the first look, the second
            api.objects["pods"].append(running("late"))
            api.ends.add("late")
        return before(path, query)

    monkeypatch.setattr(api, "list_pages", one_more)
    work(api).run("")
    assert [name for name, _ in api.evicted] == ["late"]


def test_bare_pods_and_those_of_daemonsets_need_a_word(capsys):
    bare = placed("team-a", "bare", "n1", 0, 10)
    api = Cards([card("n1", 0)], [bare, running("a")])
    with pytest.raises(click.ClickException, match=r"would not be made anew: team-a/bare; --force evicts them"):
        work(api).run("")
    assert "unschedulable" not in spec(api, "gpu-n1-0"), "nothing is half-done"
    work(api, force=True).run("")
    assert [name for name, _ in api.evicted] == ["bare", "a"]
    api = Cards([card("n1", 0)], [running("agent", kind="DaemonSet"), running("a")])
    with pytest.raises(click.ClickException, match=r"come back at once: team-a/agent; --ignore-daemonsets leaves"):
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
    api.budget["b"] = 1
    work(api).rehearse("")
    assert (api.evicted, api.rehearsed) == ([], ["a"])
    assert "unschedulable" not in spec(api, "gpu-n1-0")
    assert capsys.readouterr().out.splitlines() == [
        "pod team-a/a would be evicted",
        "pod team-a/b would be evicted, once it may be: the disruption budget web needs 1 healthy pods",
        f"{TITLE} would be drained; nothing was changed",
    ]


def test_a_missing_right_ends_it(monkeypatch):
    api = Cards([card("n1", 0)], [running("a")])

    def refuse(path, obj, timeout=None):
        raise errors.Forbidden(403, "Forbidden", 'User "jane" cannot create resource "pods/eviction"')

    monkeypatch.setattr(api, "create", refuse)
    with pytest.raises(errors.Forbidden):
        work(api).run("")


def test_the_command_takes_its_settings(monkeypatch):
    api = Cards([card("n1", 0)], [placed("team-a", "bare", "n1", 0, 10)])
    monkeypatch.setattr(draining.KubeClient, "load", lambda _path: api)
    args = ["drain", "n1/0", "--force", "--grace-period=3", "--timeout=1m", "--dry-run"]
    said = CliRunner().invoke(main.cli, args)
    assert (said.exit_code, api.rehearsed) == (0, ["bare"])
    said = CliRunner().invoke(main.cli, ["drain", "n1/0"])
    assert said.exit_code == 1
    assert "--force" in said.stderr
    said = CliRunner().invoke(main.cli, args[:-1], obj=FakeClock())
    assert (said.exit_code, api.evicted[0][1]["gracePeriodSeconds"]) == (0, 3)


def test_a_grace_period_of_no_meaning_is_refused():
    said = CliRunner().invoke(main.cli, ["drain", "n1/0", "--grace-period=-3"])
    assert said.exit_code == 2
    assert "-3 is not in the range x>=-1" in said.stderr
