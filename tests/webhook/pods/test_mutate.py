"""The rewritten pod."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.assignment import Assignment, encode
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from tests import build
from tests.build import resource_class
from tests.webhook.reviews import Known, mutate_object, on_mutate, on_validate, resource_classes
from tests.webhook.rewriting import mutate, without_placement
from webhook.templates.spellings import format_count

ASSIGNED = encode(Assignment({"0": build.shares(8138, 1)}), assume_time_ns=1)


def limits(pod: Json, index: int = 0, kind: str = "containers") -> Json:
    stored_limits: Json = pod["spec"][kind][index]["resources"]["limits"]
    return stored_limits


@pytest.mark.parametrize(
    ("amounts", "after"),
    [
        pytest.param({"gpu_mem": "8138"}, {names.GPU_MEM: "8138"}, id="MiB"),
        pytest.param({"gpu_mem": "8Gi"}, {names.GPU_MEM: "8192"}, id="GiB"),
        pytest.param({"gpu_mem": "0.5Gi"}, {names.GPU_MEM: "512"}, id="half a GiB"),
        pytest.param({"gpu_mem": "8k"}, {names.GPU_MEM: "8k"}, id="as the API server spells 8000"),
        pytest.param({"gpu_mem": "1e3"}, {names.GPU_MEM: "1000"}, id="exponent"),
        pytest.param({"gpu_mem": 64, "gpu_core": 25}, {names.GPU_MEM: "64", names.GPU_CORE: "25"}, id="with cores"),
        pytest.param({"gpu_mem": 64, "gpu_count": 1}, {names.GPU_MEM: "64"}, id="one GPU"),
        pytest.param({"gpu_mem": 64, "gpu_count": 2}, {names.GPU_MEM: "64"}, id="split share"),
        pytest.param({"gpu_count": 2}, {names.WHOLE_GPU: "2"}, id="whole GPUs"),
        pytest.param({"whole_gpu": 2}, {names.WHOLE_GPU: "2"}, id="whole GPUs by our name"),
        pytest.param({"gpu_mem": 64, "share": 7}, {names.GPU_MEM: "64"}, id="own slots"),
    ],
)
def test_limits_become_canonical_with_one_slot(amounts: Json, after: Json) -> None:
    assert limits(mutate(build.pod(**amounts)).pod) == after | {names.SHARE: "1"}


def test_requests_follow_limits() -> None:
    pod = build.pod(gpu_mem="1Gi", gpu_count=2)
    pod["spec"]["containers"][0]["resources"]["requests"] = {
        names.GPU_MEM: "1Gi", names.GPU_COUNT: "2", names.SHARE: "5", "cpu": "1"
    }  # fmt: skip
    resources = mutate(pod).pod["spec"]["containers"][0]["resources"]
    assert resources["requests"] == {names.GPU_MEM: "1024", names.SHARE: "1", "cpu": "1"}


def test_split_share_is_recorded_in_an_annotation() -> None:
    after = mutate(build.pod(gpu_mem=64, gpu_count=2, annotations={"mine": "x"})).pod
    assert after["metadata"]["annotations"] == {"mine": "x", names.GPU_COUNTS: "main=2"}
    assert request.parse_mutated(after) == request.parse(build.pod(gpu_mem=64, gpu_count=2))


def test_a_copied_split_share_keeps_its_annotation_and_stale_ones_go() -> None:
    annotations = {names.GPU_COUNTS: "main=2,gone=4", "cardwise.dev/gpu-count.0": "2"}
    after = mutate(build.pod(gpu_mem=64, share=1, annotations=annotations)).pod
    assert after["metadata"]["annotations"] == {names.GPU_COUNTS: "main=2"}


def test_misplaced_slots_are_removed() -> None:
    pod = build.pod(containers=[build.container("a", gpu_mem=1), build.container("b", share=1)])
    mutation = mutate(pod)
    assert limits(mutation.pod, 1) == {}
    assert any(f"spec.containers[1].resources.limits[{names.SHARE}]" in text for text in mutation.warnings)


def test_native_sidecars_count_and_ordinary_init_containers_are_refused() -> None:
    sidecar = build.container("s", gpu_mem="1Gi") | {"restartPolicy": "Always"}
    after = mutate(build.pod(init=[sidecar], gpu_mem=1)).pod
    assert limits(after, kind="initContainers") == {names.GPU_MEM: "1024", names.SHARE: "1"}
    with pytest.raises(InvalidRequest, match="ordinary init container"):
        mutate(build.pod(init=[build.container("i", gpu_mem=1)]))


def test_placement_annotations_are_stripped_and_user_ones_stay() -> None:
    pod = build.pod(gpu_mem=8138, annotations=ASSIGNED | {names.POLICY: "spread", "mine": "x"})
    mutation = mutate(pod)
    assert mutation.pod["metadata"]["annotations"] == {names.POLICY: "spread", "mine": "x"}
    assert mutation.warnings[0].endswith("; only Cardwise may write this")
    assert all(len(text) < 256 for text in mutation.warnings)


def test_removal_warning_names_the_reason() -> None:
    keys = {"cardwise.dev/foo": "x", names.DEFAULT_GPU_MEM: "2Gi", names.ASSIGNMENT: "x", "cardwise.dev/polcy": "x"}
    mutation = mutate(build.pod(gpu_mem=8138, annotations=keys))
    assert mutation.pod["metadata"].get("annotations", {}) == {}
    assert set(mutation.warnings) == {
        "metadata.annotations[cardwise.dev/polcy]: removed; did you mean cardwise.dev/policy?",
        "metadata.annotations: removed cardwise.dev/foo; Cardwise does not know this annotation",
        "metadata.annotations: removed cardwise.dev/default-gpu-mem; Cardwise reads this on namespaces only",
        "metadata.annotations: removed cardwise.dev/assignment; only Cardwise may write this",
    }


def test_a_copy_of_a_placed_pod_loses_its_node() -> None:
    pod = build.pod(gpu_mem=8138, annotations=ASSIGNED)
    pod["metadata"]["resourceVersion"] = "7"
    pod["spec"]["nodeName"] = "n1"
    after = without_placement(pod)
    assert "nodeName" not in after.pod["spec"]
    assert "resourceVersion" not in after.pod["metadata"]
    assert len(after.warnings) == 1


def test_a_node_name_of_the_user_stays_to_be_refused() -> None:
    pod = build.pod(gpu_mem=8138)
    pod["spec"]["nodeName"] = "n1"
    after = without_placement(pod)
    assert (after.pod, after.warnings) == (pod, ())


def test_gpu_pods_without_a_scheduler_get_the_configured_one() -> None:
    asking = build.pod(gpu_mem=1)
    asking["spec"]["schedulerName"] = "default-scheduler"  # as the API server has filled it in
    done = mutate(asking, scheduler="cardwise-scheduler")
    assert done.pod["spec"]["schedulerName"] == "cardwise-scheduler"
    assert mutate(done.pod, scheduler="cardwise-scheduler").pod == done.pod
    assert mutate(build.pod(), in_gang=True, scheduler="ours").pod["spec"]["schedulerName"] == "ours"
    own = build.pod(gpu_mem=1)
    own["spec"]["schedulerName"] = "volcano"
    assert mutate(own, scheduler="cardwise-scheduler").pod["spec"]["schedulerName"] == "volcano"
    assert "schedulerName" not in mutate(build.pod(), scheduler="cardwise-scheduler").pod["spec"]
    assert "schedulerName" not in mutate(build.pod(gpu_mem=1)).pod["spec"]


def test_runtime_class_is_set_if_missing() -> None:
    assert mutate(build.pod(gpu_mem=1), runtime_class="nvidia").pod["spec"]["runtimeClassName"] == "nvidia"
    own = build.pod(gpu_mem=1)
    own["spec"]["runtimeClassName"] = "mine"
    assert mutate(own, runtime_class="nvidia").pod["spec"]["runtimeClassName"] == "mine"
    assert "runtimeClassName" not in mutate(build.pod(share=1), runtime_class="nvidia").pod["spec"]


def test_the_policy_of_the_namespace_is_only_a_default() -> None:
    assert mutate(build.pod(gpu_mem=1), policy="spread").pod["metadata"]["annotations"] == {names.POLICY: "spread"}
    own = build.pod(gpu_mem=1, annotations={names.POLICY: "binpack"})
    assert mutate(own, policy="spread").pod["metadata"]["annotations"] == {names.POLICY: "binpack"}


def test_unchanged_pod_is_the_same_object() -> None:
    beside = build.container("b") | {"env": [{"name": names.ENV_VISIBLE_DEVICES, "value": "void"}]}
    pod = build.pod(containers=[build.container("a", gpu_mem=1), beside])
    assert mutate(pod).pod["spec"]["containers"][1] == beside
    assert mutate(build.pod()).pod == build.pod(), "it requests nothing"


def test_other_containers_of_a_gpu_pod_see_no_card() -> None:
    beside, early = build.container("b"), build.container("early")
    beside["env"] = [{"name": "A", "value": "1"}, {"name": names.ENV_VISIBLE_DEVICES, "value": "all"}]
    sidecar = build.container("c") | {"restartPolicy": "Always", "envFrom": [{"configMapRef": {"name": "x"}}]}
    mutation = mutate(build.pod(containers=[build.container("a", gpu_mem=1), beside], init=[early, sidecar]))
    spec, void = mutation.pod["spec"], {"name": names.ENV_VISIBLE_DEVICES, "value": "void"}
    assert spec["containers"][1]["env"] == [void, {"name": "A", "value": "1"}]
    assert [container["env"] for container in spec["initContainers"]] == [[void], [void]]
    (warning,) = mutation.warnings
    assert warning.startswith("spec.containers[1].env: NVIDIA_VISIBLE_DEVICES replaced")


@pytest.mark.parametrize(
    ("text", "number", "after"),
    [
        ("8k", 8000, "8k"),
        ("8000", 8000, "8000"),
        ("8e3", 8000, "8000"),
        ("1M", 10**6, "1M"),
        ("0", 0, "0"),
        (None, 5, "5"),
    ],
)
def test_numbers_keep_the_spelling_of_the_api_server(text: str | None, number: int, after: str) -> None:
    assert format_count(text, number) == after


CLASSES = resource_classes(resource_class("half", share={"memoryMiB": 4000, "corePercent": 30}))


@pytest.mark.parametrize(
    "asks",
    [
        {"aliyun.com/gpu-mem": "8Gi", "aliyun.com/gpu-count": "2"},
        {"half": "2"},
        {"half": "1", "aliyun.com/gpu-count": "1"},
    ],
)
@pytest.mark.parametrize("change", ["annotations", "name", "slot", "annotations and name", "annotations and slot"])
def test_removals_by_other_webhooks_change_no_request(asks: Json, change: str) -> None:
    """`cardwise.dev/gpu-counts` was the only record of a split share: without it, the share became one of a single
    card.
    """
    known = Known(known_classes=CLASSES)
    before = build.pod(containers=[{"name": "main", "image": "x", "resources": {"limits": asks}}])
    pod = mutate_object(before, "pods", known)
    pod_request = request.parse(pod)
    assert pod_request is not None
    container = pod["spec"]["containers"][0]
    if "annotations" in change:
        pod["metadata"].pop("annotations", None)
    if "name" in change:
        container["name"] = "renamed"
    if "slot" in change:
        del container["resources"]["limits"][names.SHARE]
    again = mutate_object(pod, "pods", known)
    after = request.parse(again)
    assert after is not None
    (first,), (two,) = pod_request.containers, after.containers
    assert (two.cards, two.mem, two.core, two.resource_class) == (
        first.cards,
        first.mem,
        first.core,
        first.resource_class,
    )
    assert on_validate(again, "pods", known).allowed
    if "slot" not in change:  # without a call of Cardwise's webhook in between
        late = request.parse(pod)
        assert late is not None
        assert (late.containers[0].cards, late.containers[0].mem) == (first.cards, first.mem)


def _drop(env: list[Json], dropped: str) -> list[Json]:
    match dropped:
        case "plain values":
            return [entry for entry in env if "valueFrom" in entry]
        case "all":
            return []
        case prefix:
            return [entry for entry in env if not entry["name"].startswith(prefix)]


@pytest.mark.parametrize("dropped", ["all", "plain values", "CARDWISE_"])
@pytest.mark.parametrize("change", ["annotations", "name"])
@pytest.mark.parametrize("asks", [{"gpu_mem": "8Gi", "gpu_count": 2}, {"gpu_mem": "8Gi"}], ids=["split", "one GPU"])
def test_share_without_its_card_count_is_refused(dropped: str, change: str, asks: Json) -> None:
    """Without the count, a share of one card looks the same."""
    pod = mutate_object(build.pod(containers=[build.container("main", **asks)]), "pods", Known())
    container = pod["spec"]["containers"][0]
    container["env"] = [*_drop(container["env"], dropped), {"name": "A", "value": "1"}]
    if change == "annotations":
        del pod["metadata"]["annotations"]
    else:
        container["name"] = "renamed"
    decision = on_mutate(pod, "pods", Known())
    assert not decision.allowed
    assert decision.message.startswith(
        "spec.containers[0].env: lacks the variables with the number of the share's GPUs"
    )
    assert "a mutating webhook that runs after Cardwise's has removed them" in decision.message


def test_changed_card_count_is_corrected() -> None:
    once = mutate_object(build.pod(containers=[build.container("main", gpu_mem="8Gi")]), "pods", Known())
    pod = mutate_object(once, "pods", Known())
    env = pod["spec"]["containers"][0]["env"]
    env[:] = [*_drop(env, "NVIDIA_"), {"name": names.ENV_VISIBLE_DEVICES, "value": "all"}]
    del pod["metadata"]["annotations"]
    assert mutate_object(pod, "pods", Known()) == once


@pytest.mark.parametrize("drop", ["annotations", "variables"])
def test_card_count_is_known_from_annotation_or_variable(drop: str) -> None:
    containers = [build.container("train", gpu_mem="8Gi", gpu_count=2), build.container("eval", gpu_mem=64)]
    pod = mutate_object(build.pod(containers=containers), "pods", Known())
    if drop == "annotations":
        del pod["metadata"]["annotations"]
    else:
        for container in pod["spec"]["containers"]:
            del container["env"]
    pod_request = request.parse(mutate_object(pod, "pods", Known()))
    assert pod_request is not None
    assert [container.cards for container in pod_request.containers] == [2, 1]


def test_count_annotation_of_a_user_is_ignored() -> None:
    env = [{"name": names.ENV_GPU_COUNT, "value": "2"}]
    pod = build.pod(containers=[build.container(gpu_mem=8) | {"env": env}])
    after = mutate_object(pod, "pods", Known())
    pod_request = request.parse(after)
    assert pod_request is not None
    assert pod_request.containers[0].cards == 1
    assert names.ENV_GPU_COUNT not in [entry["name"] for entry in after["spec"]["containers"][0]["env"]]
    assert mutate_object(after, "pods", Known()) == after
