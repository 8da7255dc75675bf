import pytest

from cardwise.core.api import names, request
from cardwise.core.api.request import DeviceRequest
from cardwise.core.placement import fitting
from cardwise.core.values.invalid import InvalidRequest
from tests.build import container, pod
from tests.core.others import asking, wanting


def keys(parsed):
    return [(c.key, c.mem, c.cards, c.whole) for c in parsed.containers]


def test_pod_without_gpu_has_no_request():
    assert request.parse(pod(containers=[{"name": "x"}])) is None


def test_share():
    assert keys(request.parse(pod(gpu_mem="8Gi"))) == [("0", 8192, 1, False)]


def test_whole_cards_by_either_name():
    assert keys(request.parse(pod(gpu_count=2))) == [("0", 0, 2, True)]
    assert keys(request.parse(pod(whole_gpu=2))) == [("0", 0, 2, True)]


def test_split_share_before_and_after_the_webhook():
    assert keys(request.parse(pod(gpu_mem=8000, gpu_count=2))) == [("0", 8000, 2, False)]
    moved = pod(gpu_mem=8000, share=1, annotations={names.GPU_COUNTS: "main=2"})
    assert keys(request.parse_mutated(moved)) == [("0", 8000, 2, False)]


def test_an_amount_as_the_api_server_spells_it_has_passed_the_webhook():
    assert keys(request.parse_mutated(pod(gpu_mem="10k", share=1))) == [("0", 10_000, 1, False)]


def test_sidecars_count_like_containers():
    sidecar = container("agent", gpu_mem=100) | {"restartPolicy": "Always"}
    parsed = request.parse(pod(containers=[container(gpu_mem=200)], init=[{"name": "setup"}, sidecar]))
    assert keys(parsed) == [("init-1", 100, 1, False), ("0", 200, 1, False)]
    assert parsed.mem == parsed.largest_share == 300


def typed(n, container_manifest=None, *, resource_class="nvidia.tesla.k80", section="limits"):
    container_manifest = container_manifest or container()
    resources = container_manifest["resources"] | {
        section: container_manifest["resources"].get(section, {}) | {f"cardwise.dev/{resource_class}": str(n)}
    }
    return container_manifest | {"resources": resources}


def parsed_container(container_manifest, **fields):
    (container_request,) = request.parse(pod(containers=[container_manifest], **fields)).containers
    return container_request.resource_class, container_request.cards, container_request.mem, container_request.whole


SPLIT = {names.GPU_COUNTS: "main=2"}


@pytest.mark.parametrize(
    ("written", "after_the_webhook", "annotations", "means"),
    [
        (typed(2), typed(2, container(whole_gpu=2, share=1)), {}, (2, 0, True)),
        (typed(2, container(gpu_count=2)), typed(2, container(whole_gpu=2, share=1)), {}, (2, 0, True)),
        (typed(1, container(gpu_mem=800)), typed(1, container(gpu_mem=800, share=1)), {}, (1, 800, False)),
        (typed(2, container(gpu_mem=800)), typed(2, container(gpu_mem=800, share=1)), SPLIT, (2, 800, False)),
        # A class with a share: the webhook writes the amounts of three units before the request is parsed.
        (typed(3, container(gpu_mem=900, share=1)), typed(3, container(gpu_mem=900, share=1)), {}, (1, 900, False)),
    ],
)
def test_a_class_means_the_same_before_and_after_the_webhook(written, after_the_webhook, annotations, means):
    assert parsed_container(written) == ("nvidia.tesla.k80", *means)
    assert parsed_container(after_the_webhook, annotations=annotations) == ("nvidia.tesla.k80", *means)
    assert request.parse_mutated(pod(containers=[after_the_webhook], annotations=annotations))


def test_class_annotation_applies_to_containers_without_a_class():
    several = [container("a", gpu_mem=10), typed(1, resource_class="own"), container("c", gpu_count=2), {"name": "d"}]
    parsed = request.parse(pod(containers=several, annotations={names.CLASS: "nvidia.tesla.k80"}))
    assert [c.resource_class for c in parsed.containers] == ["nvidia.tesla.k80", "own", "nvidia.tesla.k80"]


def test_an_annotation_after_the_webhook_changes_nothing():
    """The webhook wrote the class into the limits; users may still write the annotation."""
    several = [container("a", gpu_mem=10, share=1), typed(1, container("b", share=1, gpu_mem=5))]
    annotated = pod(containers=several, annotations={names.CLASS: "Not A Class!"})
    assert request.parse_mutated(annotated) == request.parse_mutated(pod(containers=several))


def test_shares_of_different_classes_are_on_different_cards():
    several = [
        typed(1, container("a", gpu_mem=500, gpu_core=60)),
        typed(1, container("b", gpu_mem=400, gpu_core=60), resource_class="other"),
        typed(1, container("c", gpu_mem=100, gpu_core=40)),
    ]
    assert request.parse(pod(containers=several)).largest_share == 600


def of_card_requests(count):
    """A pod with this many card requests of each kind, and one more container that shares a card with another."""
    separate = [container("whole", whole_gpu=1), container("split", gpu_mem=80, gpu_count=2), container("a", gpu_mem=8)]
    classes = [typed(1, container(f"c{i}", gpu_mem=8), resource_class=f"class-{i}") for i in range(count - 3)]
    return pod(containers=[*separate[:count], *classes, container("b", gpu_mem=9)])


@pytest.mark.parametrize("parse", [request.parse, request.parse_mutated])
def test_a_pod_has_a_limited_number_of_card_requests(parse):
    allowed = of_card_requests(request.MAX_CARD_REQUESTS)
    parsed = request.parse(allowed)
    assert len(fitting.card_requests(parsed)) == request.MAX_CARD_REQUESTS
    assert len(parsed.containers) == request.MAX_CARD_REQUESTS + 1, "shares of one card are one request"
    with pytest.raises(InvalidRequest) as refused:
        parse(of_card_requests(request.MAX_CARD_REQUESTS + 1))
    assert refused.value.field == f"spec.containers[{request.MAX_CARD_REQUESTS}].resources.limits"
    assert "more than 16 separate GPU requests" in refused.value.problem
    assert "or several pods" in refused.value.remedy


def both(limit, requested):
    return {"name": "x", "resources": {"limits": {names.GPU_MEM: limit}, "requests": {names.GPU_MEM: requested}}}


@pytest.mark.parametrize(
    ("bad", "field", "says"),
    [
        (pod(gpu_mem=-1), "spec.containers[0].resources.limits[aliyun.com/gpu-mem]", "at least 1"),
        (pod(gpu_mem="1.5"), "limits[aliyun.com/gpu-mem]", "write 1 or 2, or 1536 for 1.5Gi"),
        (pod(gpu_count=0), "limits[aliyun.com/gpu-count]", "whole number from 1 to 4096, or leave it out"),
        (pod(gpu_count="500m"), "limits[aliyun.com/gpu-count]", "for a part of a GPU write aliyun.com/gpu-mem"),
        (pod(whole_gpu="0.5"), "limits[cardwise.dev/gpu]", "for a part of a GPU write aliyun.com/gpu-mem"),
        (pod(gpu_mem=10, gpu_core=0), "limits[aliyun.com/gpu-core.percentage]", "for each GPU, or leave it out"),
        (pod(containers=[typed(0)]), "limits[cardwise.dev/nvidia.tesla.k80]", ", or leave it out"),
        (
            pod(containers=[typed("8Gi", resource_class="gpu-mem")]),
            "limits[cardwise.dev/gpu-mem]",
            "did you mean aliyun.com/gpu-mem?",
        ),
        (pod(gpu_count=10**9), "limits[aliyun.com/gpu-count]", "whole number from 1 to 4096"),
        (pod(gpu_mem=2**30, gpu_count=2**30), "limits[aliyun.com/gpu-count]", "to 4096"),
        (pod(containers=[typed(10**9)]), "limits[cardwise.dev/nvidia.tesla.k80]", "to 4096"),
        (pod(gpu_mem=8, share=1, annotations={names.GPU_COUNTS: f"main={10**9}"}), names.GPU_COUNTS, "to 4096"),
        (
            pod(containers=[typed(1, container(gpu_mem=80, gpu_count=8, share=1))]),
            "limits[cardwise.dev/nvidia.tesla.k80]",
            "differs from the number of GPUs, 8; write 8",
        ),
        (
            pod(containers=[typed(1, container(gpu_mem=80, share=1))], annotations={names.GPU_COUNTS: "main=8"}),
            "limits[cardwise.dev/nvidia.tesla.k80]",
            "write 8",
        ),
        (pod(containers=[both("8138", "4069")]), "requests[aliyun.com/gpu-mem]", "in limits only"),
        (
            pod(containers=[{"name": "x", "resources": {"requests": {names.GPU_MEM: "1"}}}]),
            "limits[aliyun.com/gpu-mem]",
            "is missing",
        ),
        (pod(containers=[{"name": "x"}], init=[container(gpu_mem=1)]), "spec.initContainers[0]", "restartPolicy"),
        (pod(gpu_mem=10, whole_gpu=1), "limits[cardwise.dev/gpu]", "cannot be combined"),
        (pod(gpu_count=1, whole_gpu=2), "limits[aliyun.com/gpu-count]", "differs"),
        (pod(gpu_mem=10001, gpu_count=2), "limits[aliyun.com/gpu-mem]", "write 10000Mi or 10002Mi"),
        (pod(gpu_core=10), "limits[aliyun.com/gpu-core.percentage]", "add aliyun.com/gpu-mem"),
        (pod(gpu_core=10, gpu_count=1), "limits[aliyun.com/gpu-core.percentage]", "leave it out"),
        (pod(gpu_mem=10, gpu_core=101), "spec.containers[0].resources.limits[aliyun.com/gpu-core.perc", "at most 100"),
        (pod(gpu_mem=10, gpu_core=202, gpu_count=2), "limits[aliyun.com/gpu-core.percentage]", "at most 200"),
        (
            pod(containers=[container("a", gpu_mem=1, gpu_core=60), container("b", gpu_mem=1, gpu_core=41)]),
            "spec.containers[1].resources.limits[aliyun.com/gpu-core.percentage]",
            "at most 40",
        ),
        (
            pod(containers=[container("a", gpu_mem=1, gpu_core=100), container("b", gpu_mem=1, gpu_core=1)]),
            "spec.containers[1].resources.limits[aliyun.com/gpu-core.percentage]",
            "in total",
        ),
        (
            pod(containers=[typed(1, typed(1), resource_class="a")]),
            "spec.containers[0].resources.limits[cardwise.dev/nvidia.tesla.k80]",
            "cardwise.dev/a is also requested; request one class",
        ),
        (pod(containers=[typed("0.5")]), "limits[cardwise.dev/nvidia.tesla.k80]", "whole number from 1"),
        (pod(containers=[typed("0.5")]), "limits[cardwise.dev/nvidia.tesla.k80]", "for a part of a GPU write"),
        (
            pod(containers=[typed(2, section="requests")]),
            "limits[cardwise.dev/nvidia.tesla.k80]",
            "write cardwise.dev/nvidia.tesla.k80 in limits only",
        ),
        (
            pod(containers=[typed(2, container(gpu_count=3))]),
            "limits[aliyun.com/gpu-count]",
            "differs from cardwise.dev/nvidia.tesla.k80; write only cardwise.dev/nvidia.tesla.k80",
        ),
        (pod(containers=[typed(2, container(gpu_count=3, gpu_mem=6))]), "limits[aliyun.com/gpu-count]", "differs"),
        (pod(containers=[typed(2, container(gpu_mem=7))]), "limits[aliyun.com/gpu-mem]", "write 6Mi or 8Mi"),
        (pod(containers=[typed(1, container(gpu_core=10))]), "limits[aliyun.com/gpu-core.percentage]", "leave it out"),
        (
            pod(
                containers=[
                    typed(1, container("a", gpu_mem=1, gpu_core=60)),
                    typed(1, container("b", gpu_mem=1, gpu_core=41)),
                ]
            ),
            "spec.containers[1].resources.limits[aliyun.com/gpu-core.percentage]",
            "at most 40",
        ),
        (pod(containers=[{"name": "x"}], init=[typed(1)]), "spec.initContainers[0]", "restartPolicy"),
        (pod(gpu_mem=1, annotations={names.POLICY: "random"}), "cardwise.dev/policy", "binpack, priced, spread"),
        (pod(gpu_mem=2, share=1, annotations={names.GPU_COUNTS: "main=x"}), names.GPU_COUNTS, "not a quantity"),
    ],
)
def test_bad_requests_name_the_field_and_the_remedy(bad, field, says):
    with pytest.raises(InvalidRequest) as error:
        request.parse(bad)
    assert field in error.value.field
    assert says in str(error.value)


@pytest.mark.parametrize(
    "raw",
    [
        pod(gpu_mem=10),
        pod(gpu_mem="8Gi", share=1),
        pod(gpu_count=1, share=1),
        pod(gpu_mem=10, share=2),
        pod(containers=[typed(1)]),
        pod(containers=[typed(1, container(share=1))]),
    ],
)
def test_pod_that_bypassed_the_webhook_is_detected(raw):
    with pytest.raises(InvalidRequest, match="not rewritten"):
        request.parse_mutated(raw)


def test_every_card_of_a_pod_has_100_percent_of_its_own():
    several = [
        container("a", gpu_mem=2, gpu_core=200, gpu_count=2),
        container("b", gpu_mem=1, gpu_core=60),
        container("c", gpu_mem=1, gpu_core=40),
    ]
    assert [c.core_per_card for c in request.parse(pod(containers=several)).containers] == [100, 60, 40]


def test_device_classes_of_the_annotation_are_not_cards():
    with_devices = asking(wanting(rdma=2, nic=1), wanting(container("b", gpu_mem=100), rdma=1))
    assert request.parse(with_devices) == request.parse_mutated(with_devices)
    assert keys(request.parse(with_devices)) == [("1", 100, 1, False)]
    assert request.parse(with_devices).devices == (
        DeviceRequest("0", "nic", 1),
        DeviceRequest("0", "rdma", 2),
        DeviceRequest("1", "rdma", 1),
    )


def test_one_class_of_cards_beside_classes_of_devices():
    whole_with_devices = wanting(typed(2, container(whole_gpu=2)), rdma=1, nic=1)
    parsed = request.parse_mutated(asking(whole_with_devices))
    assert [(c.resource_class, c.cards) for c in parsed.containers] == [("nvidia.tesla.k80", 2)]
    assert [device.resource_class for device in parsed.devices] == ["nic", "rdma"]


def test_pod_may_request_only_devices():
    parsed = request.parse_mutated(asking({"name": "x"}, wanting(rdma=1)))
    assert parsed.containers == ()
    assert parsed.devices == (DeviceRequest("1", "rdma", 1),)
    assert parsed.mem == parsed.largest_share == 0


def test_sidecars_hold_devices_too():
    sidecar = wanting(rdma=1) | {"restartPolicy": "Always"}
    assert request.parse_mutated(asking({"name": "x"}, init=[sidecar])).devices == (DeviceRequest("init-0", "rdma", 1),)


def test_unrequested_device_classes_are_ignored():
    assert request.parse(asking({"name": "x"})) is None
    assert request.parse(asking(container(gpu_mem=1))).devices == ()


def test_the_annotation_with_the_classes_of_devices():
    written = request.write_device_classes(["rdma", "fpga", "rdma"])
    assert written == "fpga,rdma"
    assert request.read_device_classes({names.DEVICE_CLASSES: written}) == {"rdma", "fpga"}
    assert request.read_device_classes({names.DEVICE_CLASSES: request.write_device_classes([])}) == frozenset()
    assert request.read_device_classes({}) == frozenset()
    assert names.is_placement_annotation(names.DEVICE_CLASSES)


@pytest.mark.parametrize("amount", ["0", "-1", "1.5", "many"])
def test_bad_numbers_of_devices(amount):
    with pytest.raises(InvalidRequest) as refused:
        request.parse(asking(wanting(rdma=amount)))
    assert refused.value.field == "spec.containers[0].resources.limits[cardwise.dev/rdma]"
    assert "write a" in refused.value.remedy


def test_an_ordinary_init_container_holds_no_device():
    with pytest.raises(InvalidRequest, match=r"hold a device.*restartPolicy") as refused:
        request.parse(asking({"name": "x"}, init=[wanting(rdma=1)]))
    assert refused.value.field == "spec.initContainers[0].resources.limits[cardwise.dev/rdma]"


@pytest.mark.parametrize("limits", [{"cardwise.dev/rdma": "1"}, {"cardwise.dev/rdma": "1", names.SHARE: "2"}])
def test_container_with_devices_that_bypassed_the_webhook_is_detected(limits):
    with pytest.raises(InvalidRequest, match="not rewritten"):
        request.parse_mutated(asking(wanting(nic=1), {"name": "x", "resources": {"limits": limits}}))


def test_device_without_the_annotation_counts_as_not_rewritten():
    with pytest.raises(InvalidRequest, match="not rewritten"):
        request.parse_mutated(pod(containers=[wanting(rdma=1)]))
