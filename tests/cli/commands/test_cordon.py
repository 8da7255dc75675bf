"""`cardwise cordon` and `uncordon`: which card is meant, what is written, and what people are told."""

import pytest
from click.testing import Result

from cardwise.core.api import names
from cardwise.kube import paths
from tests.cli import clusters
from tests.cli.clusters import card, device
from tests.cli.evictioncluster import Cards, spec
from tests.fakes.clock import FakeClock


@pytest.fixture
def api() -> Cards:
    return Cards([card("n1", 0), card("n1", 1), card("n2", 0), device("n2", 0)], [])


def run(monkeypatch: pytest.MonkeyPatch, api: Cards, *args: str) -> Result:
    return clusters.run(monkeypatch, api, *args, clock=FakeClock())


@pytest.mark.parametrize("text", ["n1/1", "GPU-n1-1", "gpu-n1-1", "n1-1"])
def test_a_card_is_meant_by_its_place_or_its_uuid_or_the_beginning_of_that(monkeypatch, api, text):
    completed = run(monkeypatch, api, "cordon", text, "--reason", "it smokes")
    assert (completed.exit_code, completed.output) == (0, "GPU 1 of node n1 (GPU-n1-1) cordoned\n")
    marked = spec(api, "gpu-n1-1")
    assert marked["unschedulable"] is True
    assert (marked["cordon"]["reason"], marked["cordon"]["user"]) == ("it smokes", "jane")
    assert marked["cordon"]["time"] == "2026-01-01T00:00:00Z"
    assert [card_name for card_name in ("gpu-n1-0", "gpu-n2-0") if "unschedulable" in spec(api, card_name)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1", "'n1' matches several UUIDs: GPU 0 of node n1 (GPU-n1-0), GPU 1 of node n1 (GPU-n1-1)"),
        ("GPU-x", "no GPU has a UUID that begins with 'GPU-x'"),
        ("", "no GPU has a UUID that begins with ''"),
        ("n3/0", "node 'n3' has no GPU that Cardwise shares"),
        ("n1/2", "node 'n1' has no GPU '2'; its GPUs are 0, 1"),
        ("n1/", "node 'n1' has no GPU ''; its GPUs are 0, 1"),
    ],
)
def test_what_is_no_card_or_several_is_refused_with_those_there_are(monkeypatch, api, text, message):
    completed = run(monkeypatch, api, "cordon", text)
    assert completed.exit_code == 1
    assert message in completed.stderr
    assert [resource for resource in api.objects("extendedresources") if "unschedulable" in resource["spec"]] == []


def test_no_card_of_another_node_is_taken_for_this_nodes(monkeypatch):
    """A node can label its own card with this node's name where no policy forbids it."""
    liar = card("n9", 0, labels={names.NODE_LABEL: "n1"})
    api = Cards([card("n1", 0), liar], [])
    assert run(monkeypatch, api, "cordon", "n1/0").output == "GPU 0 of node n1 (GPU-n1-0) cordoned\n"


def test_a_device_is_meant_by_its_uuid(monkeypatch, api):
    assert run(monkeypatch, api, "cordon", "rdma-n2-0").output == "rdma device 0 of node n2 (rdma-n2-0) cordoned\n"


def test_a_second_time_says_who_was_first_and_a_new_reason_is_taken(monkeypatch, api):
    run(monkeypatch, api, "cordon", "n1/0", "--reason", "it smokes")
    first = spec(api, "gpu-n1-0")["cordon"]
    output = run(monkeypatch, api, "cordon", "n1/0").output
    assert output == f"GPU 0 of node n1 (GPU-n1-0) already cordoned by jane at {first['time']}: it smokes\n"
    assert spec(api, "gpu-n1-0")["cordon"] == first
    run(monkeypatch, api, "cordon", "n1/0", "--reason", "it burns")
    assert spec(api, "gpu-n1-0")["cordon"]["reason"] == "it burns"


def test_uncordon_leaves_nothing_behind_and_says_so_twice(monkeypatch, api):
    before = spec(api, "gpu-n1-0")
    run(monkeypatch, api, "cordon", "n1/0")
    assert run(monkeypatch, api, "uncordon", "n1/0").output == "GPU 0 of node n1 (GPU-n1-0) uncordoned\n"
    assert spec(api, "gpu-n1-0") == before
    assert run(monkeypatch, api, "uncordon", "n1/0").output == "GPU 0 of node n1 (GPU-n1-0) already uncordoned\n"


def test_an_api_server_that_does_not_say_who_we_are_is_no_obstacle(monkeypatch, api):
    del api.answers[paths.selfsubjectreviews()]
    assert run(monkeypatch, api, "cordon", "n1/0").exit_code == 0
    assert spec(api, "gpu-n1-0")["cordon"]["user"] == ""
