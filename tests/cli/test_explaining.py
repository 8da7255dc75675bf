from cardwise.cli import explaining
from cardwise.core import assignment
from cardwise.core.assignment import Assignment
from cardwise.kube.survey import Survey
from tests.build import holding, ledger_with_free, pod, shares


def test_a_waiting_pod_hears_which_card_is_short_by_how_much():
    survey = Survey(ledger=ledger_with_free(n1=[4069, 16276], n2=[100]))
    survey.ledger.hold(holding("big", 16276, 1))
    text = explaining.explain(pod("p", gpu_mem=8138), survey)
    assert "8138 MiB (container main)" in text
    assert "n1: Insufficient GPU Memory in one device" in text
    assert "4069 of 16276 MiB free, 4069 MiB short, held by default/n1-0" in text


def test_a_pod_that_would_fit_hears_where():
    text = explaining.explain(pod("p", gpu_mem=100), Survey(ledger=ledger_with_free(n1=[4069], n2=[16276])))
    assert "free on n1, n2 (best first, binpack)" in text


def test_a_placed_pod_hears_its_card_and_its_neighbours():
    survey = Survey(ledger=ledger_with_free(n1=[4069]))
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    placed = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    placed["spec"]["nodeName"] = "n1"
    text = explaining.explain(placed, survey)
    assert "4069 of 16276 MiB (0.2500) of card 0 GPU-n1-0, beside default/n1-0 (12207 MiB)" in text
    assert "not granted it yet" in text


def test_pods_that_can_never_run_or_are_not_ours():
    assert "can never be placed" in explaining.explain(pod("p", gpu_mem=0), Survey())
    assert "asks for no GPU" in explaining.explain(pod("p", containers=[{"name": "x"}]), Survey())
    bound = pod("p", gpu_mem=5)
    bound["spec"]["nodeName"] = "n1"
    assert "not bound by the Cardwise extender" in explaining.explain(bound, Survey())
    assert "No node has a card" in explaining.explain(pod("p", gpu_mem=5), Survey())


def test_what_runs_is_explained_although_its_policy_was_changed_to_nonsense():
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    placed = pod("p", gpu_mem=4069, annotations=annotations | {"cardwise.dev/policy": "garbage"}, uid="u")
    placed["spec"]["nodeName"] = "n1"
    assert "pod default/p is on node n1" in explaining.explain(placed, Survey(ledger=ledger_with_free(n1=[4069])))
    gone = explaining.explain(placed, Survey(ledger=ledger_with_free(n1=[])))
    assert "this card is not on the node any more" in gone


def test_what_has_failed_says_why():
    failed = pod("p", gpu_mem=4069)
    failed["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"}
    text = explaining.explain(failed, Survey())
    assert text == "pod default/p has ended (Failed) and holds nothing.\nUnexpectedAdmissionError: no healthy devices\n"
