"""Suggestions for misspelled and foreign names."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardwise.core.api import lookalikes, names
from cardwise.core.api.lookalikes import is_like_gpu, suggest_resource

CLASSES = ["nvidia.tesla.k80", "nvidia.a100-sxm4-40gb", "nvidia.l4"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("aliyun.com/gpu-memory", names.GPU_MEM),
        ("aliyun.com/gpumem", names.GPU_MEM),
        ("aliyun.com/gpu_mem", names.GPU_MEM),
        ("aliyun.com/gup-mem", names.GPU_MEM),
        ("alyun.com/gpu-mem", names.GPU_MEM),
        ("example.org/gpu-mem", names.GPU_MEM),
        ("aliyun.com/gpu-counts", names.GPU_COUNT),
        ("aliyun.com/gpu-core", names.GPU_CORE),
        ("aliyun.com/gpu-cores", names.GPU_CORE),
        ("aliyun.com/gpu-core.percent", names.GPU_CORE),
        ("nvidia.com/gpumem", names.GPU_MEM),
        ("nvidia.com/gpu", names.GPU_COUNT),
        ("volcano.sh/vgpu-memory", names.GPU_MEM),
        ("nvidia.com/tesla.k80", "nvidia.tesla.k80"),
        ("nvidia.com/l4", "nvidia.l4"),
        ("nvidia.com/l40", "nvidia.l4"),
        ("nvidia.com/a100-sxm4-40gb", "nvidia.a100-sxm4-40gb"),
        ("nvidia.com/mig-1g.5gb", None),
        ("amd.com/gpu", None),
        ("gpu.intel.com/i915", None),
        ("aliyun.com/" + "gpu-mem" * 40, None),
    ],
)
def test_suggests_the_nearest_name(written: str, expected: str | None) -> None:
    assert suggest_resource(written, CLASSES) == expected


def test_suggests_resources_that_nodes_offer() -> None:
    assert (
        suggest_resource("nvidia.com/mig-1g.5g", ["nvidia.com/mig-1g.5gb", "nvidia.com/gpu"]) == "nvidia.com/mig-1g.5gb"
    )


def suggest_label(key: str, known: list[str]) -> str:
    return lookalikes.suggest_node_label(key, "x", dict.fromkeys(known, ()))


@pytest.mark.parametrize(
    ("suggest", "written", "expected"),
    [
        (suggest_resource, "nvidia.com/tesla.k80", "nvidia.tesla.k80"),
        (lookalikes.suggest_class, "nvidia.tesla.k8", "nvidia.tesla.k80"),
        (suggest_label, "nvidia.tsela.k80", "nvidia.tesla.k80"),
        (suggest_resource, "amd.com/gpus", "amd.com/gpu"),
    ],
)
def test_only_the_most_similar_candidates_are_compared(suggest, written, expected, monkeypatch) -> None:
    """Comparing one name with 256 classes took 0.1 s, and an object may have several such names."""
    compared, edit_distance = [], lookalikes._edit_distance

    def observe(name, other, limit):
        compared.append(other)
        return edit_distance(name, other, limit)

    monkeypatch.setattr(lookalikes, "_edit_distance", observe)
    invented = [f"{expected.partition('.')[0]}.{prefix}/{i}.gpu" for prefix in ("a", "amd.com") for i in range(250)]
    assert suggest(written, [*invented, *(f"{i}.amd.com/gpu-{i}" for i in range(250)), expected]) == expected
    assert len(set(compared)) <= 2 * 32 + 8, "with and without the domain, and our own"


def test_limited_number_of_candidates_is_considered() -> None:
    read = []

    def invent():
        for i in range(100_000):
            read.append(i)
            yield f"nvidia.com/gpu-{i}"

    suggest_resource("nvidia.com/gpu-x", invent())
    assert len(read) <= 1024


def test_most_similar_candidates_come_first() -> None:
    assert lookalikes.select_alike("nvidia.tesla.k81", ["nvidia.l4", "nvidia.tesla.p100", "nvidia.tesla.k80"], 2) == [
        "nvidia.tesla.k80",
        "nvidia.tesla.p100",
    ]


def test_internal_name_of_whole_cards_is_not_suggested() -> None:
    assert suggest_resource("example.org/gpu", [names.WHOLE_GPU]) == names.GPU_COUNT


def test_no_suggestion_for_gpus_of_other_vendors() -> None:
    assert suggest_resource("amd.com/gpu", [names.WHOLE_GPU]) is None
    assert suggest_resource("amd.com/gpus", [names.WHOLE_GPU, "amd.com/gpu"]) == "amd.com/gpu"
    assert all(map(lookalikes.is_of_other_vendor, ["amd.com/gpu", "gpu.intel.com/i915"]))
    assert not any(map(lookalikes.is_of_other_vendor, ["nvidia.com/gpu", "myamd.com/gpu", "amd.community/gpu"]))


@pytest.mark.parametrize(
    ("key", "expected"),
    [("modle", "model"), ("model", None), ("memroy", "memory"), ("mem", None), ("hostnam", "hostname"), ("zone", None)],
)
def test_suggests_labels_of_cards(key: str, expected: str | None) -> None:
    assert lookalikes.suggest_card_label(key) == expected


def test_suggests_annotations_of_users() -> None:
    assert lookalikes.suggest_annotation("cardwise.dev/polcy") == names.POLICY
    ours = {constant for name, constant in vars(names).items() if name.isupper() and isinstance(constant, str)}
    written = {key for key in ours if names.is_placement_annotation(key)}
    assert {key for key in written if lookalikes.suggest_annotation(key)} == set(), "Cardwise writes them"
    assert lookalikes.suggest_annotation("cardwise.dev/" + "x" * 200) is None


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("scheduling.k8s.io/group-num", "4", names.GROUP_NUM),
        ("scheduling.k8s.io/group-pod-number", "4", names.GROUP_NUM),
        ("scheduling.k8s.io/groupname", "train", names.GROUP_NAME),
        ("scheduling.k8s.com/group-name", "train", names.GROUP_NAME),
        ("scheduling.x-k8s.io/podgroup", "train", names.COSCHEDULING),
        ("pod-group.scheduling.sigs.k8s.io/min-available", "4", names.GROUP_NUM),
        ("gang.scheduling.koordinator.sh/name", "train", names.GROUP_NAME),
        ("Cardwise.dev/policy", "spread", names.POLICY),
        ("cardwise.io/policy", "spread", names.POLICY),
        ("cardwse.dev/clas", "nvidia.l4", names.CLASS),
        ("gpu-memory", "2000", "the limit aliyun.com/gpu-mem"),
        ("gpu-fraction", "0.5", "the limit aliyun.com/gpu-mem"),
        ("hami.io/gpu-scheduler-policy", "spread", names.POLICY),
        ("nvidia.com/use-gputype", "A100", names.CLASS),
        ("scheduling.k8s.io/group-name", "train", None),
        ("scheduling.k8s.io/group-pod-num", "4", None),
        ("scheduling.x-k8s.io/pod-group", "train", None),
        ("kueue.x-k8s.io/pod-group-name", "train", None),
        ("kai.scheduler/queue", "team", None),
        ("cardwise.dev/polcy", "spread", None),
        ("cardwise.example.org/anything", "x", None),
        ("app.kubernetes.io/part-of", "cardwise", None),
        ("app", "gang", None),
        ("scheduling.k8s.io/" + "group" * 40, "4", None),
    ],
)
def test_suggests_keys_of_pods(key: str, text: str, expected: str | None) -> None:
    assert lookalikes.suggest_pod_key(key, text) == expected
    assert lookalikes.is_like_own(key) or not expected
    # The webhook must see every key that gets a suggestion. It sees keys with a misspelled domain only if the pod also
    # requests cards.
    if expected and "cardwse" not in key and "k8s.com" not in key:
        assert lookalikes._OWN_KEY.search(key)


@pytest.mark.parametrize(
    ("key", "label", "expected"),
    [
        ("cardwise.dev/default-gpumem", False, names.DEFAULT_GPU_MEM),
        ("Cardwise.dev/default-gpu-mem", False, names.DEFAULT_GPU_MEM),
        ("cardwise.dev/default", True, names.DEFAULTS_LABEL),
        ("cardwise.dev/gpu-mem-units", True, names.GPU_MEM_UNIT),
        ("cardwise.dev/default-gpu-mem", True, f"the annotation {names.DEFAULT_GPU_MEM}"),
        ("cardwise.dev/defaults", False, f"the label {names.DEFAULTS_LABEL}"),
        ("cardwise.dev/default-gpu-mem", False, None),
        ("cardwise.dev/defaults", True, None),
        ("cardwise.dev/team", False, None),
        ("kubernetes.io/metadata.name", True, None),
    ],
)
def test_suggests_keys_of_namespaces(key: str, label: bool, expected: str | None) -> None:
    assert lookalikes.suggest_namespace_key(key, label=label) == expected
    assert lookalikes.is_like_own(key) or not expected


def test_names_about_gpus() -> None:
    about = ["aliyun.com/gpu-mem", "nvidia.com/mig-1g.5gb", "x.y/vgpu", "tencent.com/vcuda-core", "cardwise.dev/t4"]
    assert all(map(is_like_gpu, about))
    assert not any(map(is_like_gpu, ["cpu", "nvidia.tesla.k80", "rdma/hca", "intel.com/sriov", "hugepages-2Mi"]))


WORDS = st.text(alphabet="ab-", max_size=8)


@given(WORDS, WORDS, st.integers(0, 5))
def test_the_edit_distance_is_exact_up_to_its_limit(name: str, other: str, limit: int) -> None:
    @cache
    def plain(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        costs = [plain(i - 1, j) + 1, plain(i, j - 1) + 1, plain(i - 1, j - 1) + (name[i - 1] != other[j - 1])]
        if i > 1 and j > 1 and (name[i - 1], name[i - 2]) == (other[j - 2], other[j - 1]):
            costs.append(plain(i - 2, j - 2) + 1)
        return min(costs)

    assert min(lookalikes._edit_distance(name, other, limit), limit + 1) == min(plain(len(name), len(other)), limit + 1)
