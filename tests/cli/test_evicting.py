"""`cardwise defrag --evict`: a plan is carried out as it was told, and no further after a surprise."""

import json
import signal

import click
import pytest

from cardwise.cli.evicting import Carrying
from cardwise.core import assignment
from cardwise.core.ledger import Holding
from cardwise.core.moving import Move
from cardwise.kube import errors
from tests.build import Assignment
from tests.cli.cardworlds import Cards
from tests.cli.test_defragging import cluster, kept, run, running, spreading, three
from tests.cli.worlds import Lists, card
from tests.fakes.clock import FakeClock


class Api(Lists):
    """Lists pods, and evicts: `after` says what the cluster is like at each look that follows."""

    def __init__(self, pods: list[dict], *after: list[dict], refuse: errors.KubeError | None = None) -> None:
        super().__init__({"pods": pods})
        self.after = list(after)
        self.refuse = refuse
        self.evicted: list[str] = []

    def create(self, path, obj, **_):
        if self.refuse is not None:
            raise self.refuse
        self.evicted.append(obj["deleteOptions"]["preconditions"]["uid"])

    def passes(self) -> None:
        """Time does."""
        if self.after:
            self.objects["pods"] = self.after.pop(0)


def old() -> dict:
    return kept(running("web", "n1", 0, 3000))


def new(node: str, index: int, phase: str = "Running") -> dict:
    made = kept(running("web-2", node, index, 3000))
    made["metadata"]["ownerReferences"] = old()["metadata"]["ownerReferences"]
    made["status"]["phase"] = phase
    return made


def pending() -> dict:
    made = new("n1", 1)
    del made["spec"]["nodeName"]
    made["metadata"]["annotations"] = {}
    return made


def planned() -> Move:
    def held(pod: dict) -> Holding:
        assigned = assignment_of(pod)
        return Holding(old()["metadata"]["uid"], "team", "web", pod["spec"]["nodeName"], assigned)

    return Move(held(old()), held(new("n2", 1)))


def assignment_of(pod: dict) -> Assignment:
    found = assignment.decode(pod["metadata"]["annotations"])
    assert found is not None
    return found


class Clock(FakeClock):
    def __init__(self, api: Api) -> None:
        super().__init__()
        self._api = api

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._api.passes()


def carry(api: Api) -> None:
    Carrying(api, 20.0, Clock(api)).carry(planned(), old(), "1/1")


def test_a_pod_is_evicted_and_its_replacement_waited_for(capsys):
    api = Api([old()], [old(), pending()], [old(), new("n2", 1, "Pending")], [old(), new("n2", 1)], [new("n2", 1)])
    carry(api)
    assert api.evicted == [old()["metadata"]["uid"]]
    assert api.after == []  # to the last look: while the old one is there it holds its card
    assert capsys.readouterr().err == "1/1 evicted team/web\n1/1 web-2 runs on n2 1\n"


@pytest.mark.parametrize(
    ("api", "says"),
    [
        (Api([old()], [new("n1", 1)]), "web-2, in place of team/web, is on n1 1 and not on n2 1"),
        (Api([old()], [new("n2", 1, "Failed")]), "web-2, in place of team/web, has ended already (Failed)"),
        (Api([old()], [pending()]), "no pod runs in place of team/web after 20 s"),
        (Api([]), "team/web has gone by itself"),
        (Api([old() | {"metadata": old()["metadata"] | {"uid": "another"}}]), "team/web has gone by itself"),
        (
            Api([old()], refuse=errors.TooManyRequests(429, "TooManyRequests", "the budget allows none")),
            "team/web may not be evicted now: the budget allows none",
        ),
    ],
)
def test_a_surprise_ends_it(api, says):
    with pytest.raises(click.ClickException) as stopped:
        carry(api)
    assert stopped.value.message == f"stopped: {says}; look at the cluster, and run cardwise defrag again"


def test_evict_moves_them_and_says_what_fits_then(monkeypatch):
    """The replacement is made by the fake at the eviction."""
    pods = three()
    api = cluster(*pods)
    came = kept(running("small-2", "n1", 1, 3000))
    came["metadata"]["ownerReferences"] = pods[0]["metadata"]["ownerReferences"]
    evicted = []

    def create(path, obj, **_):
        evicted.append(obj["metadata"]["name"])
        api.objects["pods"] = [came, *pods[1:]]

    monkeypatch.setattr(api, "create", create, raising=False)
    shown = run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert shown.exit_code == 0, shown.output
    assert evicted == ["small"]
    assert shown.stderr == "1/1 evicted team/small\n1/1 small-2 runs on n1 1\ndone: there is 1 free whole card\n"


class Cordoned(Cards):
    """Of four cards, on which the three pods are; the replacement of an evicted pod comes at once."""

    def __init__(self, *then: dict) -> None:
        pods = three()
        super().__init__([card(node, index) for node in ("n1", "n2") for index in (0, 1)], pods)
        self.objects = spreading(*pods).objects | self.objects
        self.then = [*then, *pods[1:]]
        self.closed_at_eviction: list[str] = []

    def create(self, path, obj, timeout=None):
        if path.endswith("/eviction"):
            cards = self.objects["extendedresources"]
            self.closed_at_eviction = [one["metadata"]["name"] for one in cards if one["spec"].get("unschedulable")]
            self.objects["pods"] = self.then
        return super().create(path, obj, timeout)

    def closed(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.objects["extendedresources"] if "cordon" in one["spec"]]


def came(node: str, index: int) -> dict:
    made = kept(running("small-2", node, index, 3000))
    made["metadata"]["ownerReferences"] = three()[0]["metadata"]["ownerReferences"]
    return made


def test_a_card_is_cordoned_while_its_pod_moves_and_given_back(monkeypatch):
    api = Cordoned(came("n1", 1))
    before = json.dumps(api.objects["extendedresources"])
    shown = run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert shown.exit_code == 0, shown.output
    assert api.closed_at_eviction == ["gpu-n1-0"]
    assert json.dumps(api.objects["extendedresources"]) == before
    assert shown.stderr == (
        "card 0 of node n1 (GPU-n1-0) cordoned\n"
        "1/1 evicted team/small\n"
        "1/1 small-2 runs on n1 1\n"
        "card 0 of node n1 (GPU-n1-0) uncordoned\n"
        "done: there is 1 free whole card\n"
    )


def test_a_card_is_given_back_after_a_surprise(monkeypatch):
    api = Cordoned(came("n2", 1))
    shown = run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert (shown.exit_code, api.closed_at_eviction, api.closed()) == (1, ["gpu-n1-0"], [])
    assert "stopped: small-2, in place of team/small, is on n2 1 and not on n1 1" in shown.stderr


@pytest.fixture
def in_the_foreground():
    """The signals as in a program that a person has started; what a shell starts in the background ignores some."""
    meant = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {sign: signal.signal(sign, handler) for sign, handler in meant.items()}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_card_is_given_back_when_somebody_ends_it(monkeypatch, sign):
    before = signal.getsignal(sign)
    api = Cordoned()
    monkeypatch.setattr(Carrying, "carry", lambda *_: signal.raise_signal(sign))
    shown = run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert (shown.exit_code, api.closed()) == (128 + sign, [])
    assert "card 0 of node n1 (GPU-n1-0) uncordoned\n" in shown.stderr
    assert signal.getsignal(sign) is before


def test_a_card_that_a_person_cordons_meanwhile_is_left_to_them(monkeypatch):
    api = Cordoned()

    def smokes(*_args: object) -> None:
        api.card("gpu-n1-0")["spec"]["cordon"] = {"reason": "it smokes"}

    monkeypatch.setattr(Carrying, "carry", smokes)
    run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert api.card("gpu-n1-0")["spec"]["unschedulable"] is True


def test_who_may_not_cordon_is_told_what_it_takes_before_anything_happens(monkeypatch):
    api = Cordoned()

    def forbid(*_args: object, **_more: object) -> None:
        raise errors.Forbidden(403, "Forbidden", 'User "jane" cannot patch resource "extendedresources"')

    monkeypatch.setattr(api, "patch", forbid)
    shown = run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert (shown.exit_code, api.evicted) == (1, [])
    assert "card 0 of node n1 (GPU-n1-0) may not be cordoned by you" in shown.stderr
    assert "ClusterRole cardwise-drain" in shown.stderr
    assert "--no-cordon" in shown.stderr


def test_a_card_that_cannot_be_given_back_is_named_with_the_command(monkeypatch):
    api = Cordoned()

    def down(*_args: object) -> None:
        def refuse(*_args: object, **_more: object) -> None:
            raise errors.Unreachable("connection refused")

        monkeypatch.setattr(api, "patch", refuse)

    monkeypatch.setattr(Carrying, "carry", down)
    shown = run(monkeypatch, api, "--free-cards", "1", "--evict")
    assert "give it back with: cardwise uncordon n1/0" in shown.stderr
