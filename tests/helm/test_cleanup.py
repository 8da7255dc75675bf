"""What `helm uninstall` takes away from a node, and what it leaves there because others wrote it."""

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.helm.scripts import load

cleanup = load("cleanup")


def cleaned(labels, annotations, **amounts):
    """The node afterwards."""
    api = ApiServer(FakeClock())
    made = {"metadata": {"name": "n1", "labels": labels, "annotations": annotations}}
    node = api.put(paths.nodes(), made | {"status": {"capacity": amounts, "allocatable": dict(amounts)}})
    cleanup.clean_node(api.client(), node)
    return api.get(paths.nodes("n1"))


@pytest.mark.parametrize(("now", "left"), [("ours", {}), ("theirs", {names.ACCELERATOR: "theirs"})])
def test_the_label_of_the_model_goes_unless_somebody_has_changed_it(now, left):
    node = cleaned({names.ACCELERATOR: now}, {cleanup.NOTED: "ours", names.NODE_CHANGED: "1", "example.com/x": "y"})
    assert node["metadata"].get("labels", {}) == left
    assert node["metadata"]["annotations"] == {"example.com/x": "y"}


def test_a_label_that_we_never_wrote_stays():
    assert cleaned({names.ACCELERATOR: "theirs"}, {})["metadata"]["labels"] == {names.ACCELERATOR: "theirs"}


def test_our_capacities_go_and_no_others():
    ours = {names.GPU_MEM: "1", names.SHARE: "1", f"{names.CLASS_PREFIX}a100": "1"}
    node = cleaned({}, {}, **ours, cpu="4", **{names.NVIDIA_GPU: "1"})
    for kind in ("capacity", "allocatable"):
        assert node["status"][kind] == {"cpu": "4", names.NVIDIA_GPU: "1"}
