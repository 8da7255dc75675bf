"""What `helm test` says: the causes as doctor knows them."""

import pytest

from cardwise.core.api import names
from tests.cli.worlds import Cluster, card
from tests.fakes.apiserver import Fault
from tests.helm.scripts import load

check = load("check")


def plugin(desired: int) -> dict[str, object]:
    metadata = {"namespace": names.NAMESPACE, "name": "cardwise-deviceplugin"}
    status = {"desiredNumberScheduled": desired}
    return {"metadata": metadata, "spec": {"template": {"spec": {"containers": []}}}, "status": status}


def why(api: Cluster) -> str:
    with pytest.raises(LookupError) as raised:
        check.cards(api.kube, names.NAMESPACE)
    return str(raised.value)


def test_where_no_card_is_known_it_says_which_value_is_wrong() -> None:
    nvidia = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    api = Cluster({"daemonsets": [plugin(0)], "runtimeclasses": [nvidia]})
    assert "no node has the labels that nodes.selector asks for; write nodes.selector, or: kubectl label" in why(api)
    api.replace("daemonsets", plugin(2))
    assert "runs without NVIDIA's RuntimeClass nvidia; set nodes.runtimeClass=nvidia" in why(api)
    api.replace("runtimeclasses")
    assert "no card is known; see that the device plugin runs" in why(api)


def test_without_rights_to_look_for_the_cause_it_says_that_no_card_is_known() -> None:
    api = Cluster({"daemonsets": [plugin(0)]})
    refused = Fault(status=403, message="no daemonsets for you")
    api.before(lambda request: api.fault(refused, "list"), "list")
    assert why(api).startswith("no card is known")


def test_cards_that_are_there_are_counted() -> None:
    api = Cluster({"extendedresources": [card("n1", 0)]})
    assert "are healthy" in check.cards(api.kube, names.NAMESPACE)
