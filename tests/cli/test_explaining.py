from cardwise.cli import explaining
from cardwise.core import assignment
from cardwise.core.assignment import Assignment
from cardwise.kube import survey
from cardwise.kube.survey import Survey
from tests.build import holding, ledger_with_free, pod, shares
from tests.cli.worlds import K80_CLASS, gpu_quota, lists, resource_class, waiting


def test_a_waiting_pod_hears_which_card_is_short_by_how_much():
    seen = Survey(ledger=ledger_with_free(n1=[4069, 16276], n2=[100]))
    seen.ledger.hold(holding("big", 16276, 1))
    text = explaining.explain(pod("p", gpu_mem=8138), seen)
    assert "8138 MiB (container main)" in text
    assert "n1: Insufficient GPU Memory in one device" in text
    assert "4069 of 16276 MiB free, 4069 MiB short, held by default/n1-0" in text


def test_a_pod_that_would_fit_hears_where():
    text = explaining.explain(pod("p", gpu_mem=100), Survey(ledger=ledger_with_free(n1=[4069], n2=[16276])))
    assert "free on n1, n2 (best first, binpack)" in text


def test_a_placed_pod_hears_its_card_and_its_neighbours():
    seen = Survey(ledger=ledger_with_free(n1=[4069]))
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    placed = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    placed["spec"]["nodeName"] = "n1"
    text = explaining.explain(placed, seen)
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


def typed(limits: dict[str, str], namespace: str = "team-a") -> dict[str, object]:
    return waiting(namespace, "p", limits | {"cardwise.dev/share": "1"})


def test_a_typed_pod_hears_which_cards_are_of_its_class():
    api = lists(gpuquotas=[])
    text = explaining.explain(typed({f"cardwise.dev/{K80_CLASS}": "2", "cardwise.dev/gpu": "2"}), survey.take(api))
    assert f"asks for 2 whole cards of class {K80_CLASS} (container main)" in text
    assert f"Of class {K80_CLASS}: 3 cards on n1 (1), n2 (2), 1 of them unhealthy." in text
    assert "card 1 Tesla P100: 12207 of 16276 MiB free, not of the class" in text
    assert "GPUQuota" not in text


def test_nodes_without_the_type_are_one_line():
    text = explaining.explain(typed({"cardwise.dev/big": "1", "aliyun.com/gpu-mem": "16000"}), survey.take(lists()))
    assert "  n2: The node has no GPU card of the type asked for\n" in text
    assert "Tesla K80: 0 of" not in text
    assert "3793 MiB short" in text


def test_a_class_that_is_not_there_is_named_with_those_that_are_and_a_broken_one_with_its_mistake():
    limits = {"cardwise.dev/k80": "1", "cardwise.dev/gpu": "1"}
    assert "There is no ResourceClass k80; those there are: big, nvidia.tesla.k80." in explaining.explain(
        typed(limits), survey.take(lists())
    )
    broken = lists(resourceclasses=[resource_class("k80", selector={})])
    assert "ResourceClass k80: spec.selector: an empty selector" in explaining.explain(
        typed(limits), survey.take(broken)
    )
    empty = lists(resourceclasses=[resource_class("k80", selector={"matchLabels": {"model": "none"}})])
    assert "No card is of class k80: see its selector" in explaining.explain(typed(limits), survey.take(empty))


def test_quotas_in_the_way_say_hard_used_and_asked():
    limits = {f"cardwise.dev/{K80_CLASS}": "1", "cardwise.dev/gpu": "1"}
    text = explaining.explain(typed(limits), survey.take(lists()))
    assert f"GPUQuota team closes {K80_CLASS}: 2 of 2 shares used, 1 asked, 1 of 1 whole cards used, 1 asked.\n" in text
    assert "The namespace's GPUQuota leaves no room" not in text.partition("n1:")[0]
    assert "GPUQuota" not in explaining.explain(typed(limits, "team-b"), survey.take(lists()))


def test_a_pod_that_names_no_type_is_steered_and_told_so():
    text = explaining.explain(typed({"aliyun.com/gpu-mem": "100"}), survey.take(lists()))
    assert (
        f"GPUQuota team closes {K80_CLASS}: 2 of 2 shares used, 1 asked; cards that it does not limit are open." in text
    )
    assert "Cards that fit are free on n1" in text
    everything = lists(gpuquotas=[gpu_quota("team-a", {"memoryMiB": 13500})])
    text = explaining.explain(typed({"aliyun.com/gpu-mem": "100"}), survey.take(everything))
    assert "GPUQuota team closes all cards: 13441 of 13500 MiB used, 100 asked." in text
    assert "n1: The namespace's GPUQuota leaves no room on the GPU cards that would do" in text
    assert "card 0 Tesla K80: 8441 of 11441 MiB free, closed by quota" in text
