import pytest

from cardwise.core.api import classes, names, request
from cardwise.core.api.classes import Classifier, ClassShare
from cardwise.core.values.invalid import InvalidRequest
from tests.build import automatic_class, container, pod, resource_class

ANY_GPU = {"matchLabels": {"kind": "nvidia-gpu"}}
OF_MODEL = "nvidia.tesla.k80"  # the class that `card` is in by the name of its model


def card(**differs):
    of_k80 = {
        "node": "n1", "index": 2, "uuid": "GPU-1", "model": "Tesla K80", "memory": 11441,
        "properties": {"driver": "535.104.05", "computeCapability": "3.7"}, "own": {},
    }  # fmt: skip
    return classes.card_labels(**(of_k80 | differs))


def test_class_without_share_counts_whole_cards():
    parsed = classes.parse(resource_class())
    assert (parsed.name, parsed.share, parsed.priority, parsed.auto, parsed.untouched) == ("big", None, 0, False, False)
    assert parsed.selector.matches(card())


def test_every_field_of_a_class_is_parsed():
    parsed = classes.parse(resource_class(priority=-3, share={"memoryMiB": 8138, "corePercent": 25}))
    assert parsed.share == ClassShare(memory=8138, core=25)
    assert parsed.priority == -3


@pytest.mark.parametrize("amount", [8192, "8192", "8Gi", "8GiB", "8192MiB"])
def test_memory_of_a_share_in_mib_or_as_a_quantity(amount):
    assert classes.parse(resource_class(share={"memoryMiB": amount})).share == ClassShare(memory=8192, core=0)


@pytest.mark.parametrize("spelling", ["selector", "resourceSelector", "labelSelector"])
def test_old_selector_spellings_are_parsed(spelling):
    manifest = {"metadata": {"name": "big"}, "spec": {spelling: [{"matchLabels": {"Model": "Tesla K80"}}]}}
    assert classes.parse(manifest).selector.matches(card())
    manifest["spec"][spelling] = []
    with pytest.raises(InvalidRequest) as refused:
        classes.parse(manifest)
    assert refused.value.field == f"spec.{spelling}"


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"selector": None}, "spec.selector", "every GPU"),
        ({"resourceSelector": ANY_GPU}, "spec.resourceSelector", "spec.selector is also set; write only one of them"),
        ({"priorty": 1}, "spec.priorty", "is not a field of a ResourceClass; write selector, .*share, priority"),
        ({"priority": "high"}, "spec.priority", "whole number"),
        ({"priority": True}, "spec.priority", "whole number"),
        ({"priority": 2**31}, "spec.priority", "out of range"),
        ({"share": 8138}, "spec.share", "memoryMiB, corePercent"),
        ({"share": {}}, "spec.share.memoryMiB", "is missing"),
        ({"share": {"memoryMiB": 0}}, "spec.share.memoryMiB", "must be above zero"),
        ({"share": {"memoryMiB": "1.5"}}, "spec.share.memoryMiB", "write 1 or 2, or 1536 for 1.5Gi"),
        ({"share": {"memoryMiB": True}}, "spec.share.memoryMiB", "not an amount of memory"),
        ({"share": {"memoryMiB": 8, "corePercent": 0}}, "spec.share.corePercent", "from 1 to 100"),
        ({"share": {"memoryMiB": 8, "corePercent": 101}}, "spec.share.corePercent", "from 1 to 100"),
        ({"share": {"memoryMiB": 8, "corePercent": "50"}}, "spec.share.corePercent", "from 1 to 100"),
        ({"share": {"memory": 8}}, "spec.share.memory", "is not a field of a share; write memoryMiB, corePercent"),
    ],
)
def test_invalid_class_error_names_the_field(spec, field, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        classes.parse(resource_class(**spec))
    assert refused.value.field == field


def test_a_class_without_a_spec_is_refused():
    with pytest.raises(InvalidRequest, match=r"spec\.selector"):
        classes.parse({"metadata": {"name": "big"}})


@pytest.mark.parametrize("name", ["nvidia.tesla.k80", "k80", "0", "a-b.c", "a" * 48, "gpus"])
def test_good_names(name):
    classes.check_name(name)
    assert (
        request.parse(pod(containers=[with_limit(f"{names.CLASS_PREFIX}{name}")])).containers[0].resource_class == name
    )


def with_limit(resource):
    return container() | {"resources": {"limits": {resource: "1"}}}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is not a name of a class; write at most 48"),
        ("a" * 49, "is not a name of a class; write at most 48"),
        ("Tesla", "is not a name of a class"),
        ("tesla k80", "is not a name of a class"),
        ("nvidia/k80", "is not a name of a class"),
        (".k80", "is not a name of a class"),
        ("k80-", "is not a name of a class"),
        ("a..b", "is not a name of a class"),
        ("k80\n", "is not a name of a class"),
        ("cpu", "is reserved for another resource name.*nvidia.cpu"),
        ("pods", "is reserved for another resource name"),
        ("hugepages-2mi", "is reserved for another resource name"),
        ("requests.k80", "is reserved for another resource name"),
        ("gpu", "is reserved for another resource name"),
        ("share", "is reserved for another resource name"),
        ("place", "is reserved for another resource name"),
        ("bind", "is reserved for another resource name"),
    ],
)
def test_bad_names(name, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        classes.parse(resource_class(name))
    assert refused.value.field == "metadata.name"


def test_own_resource_names_are_not_class_names():
    for resource in names.OWN_RESOURCES:
        with pytest.raises(InvalidRequest):
            classes.check_name(resource.removeprefix(names.CLASS_PREFIX))


def test_labels_of_a_card():
    assert card() == {
        "kind": "nvidia-gpu", "model": "Tesla K80", "memory": "11441Mi", "node": "n1", "hostname": "n1", "index": "2",
        "uuid": "GPU-1", "driver": "535.104.05", "computecapability": "3.7",
    }  # fmt: skip


def test_measured_properties_take_precedence_over_labels_of_users():
    seen = card(properties={"Model": "a lie", "clock": "875"}, own={"clock": "9", "UUID": "a lie", "Team": "vision"})
    assert seen["model"] == "Tesla K80"
    assert seen["uuid"] == "GPU-1"
    assert seen["clock"] == "875"
    assert seen["team"] == "vision"


def classifier(**selectors):
    return Classifier(
        classes.parse(resource_class(name, selector=selector, priority=priority))
        for name, (selector, priority) in selectors.items()
    )


def big(bound):
    return {"matchExpressions": [{"key": "memory", "operator": "Gt", "values": [bound]}]}


def test_a_card_is_in_every_class_that_selects_it():
    types = classifier(
        k80=({"matchLabels": {"model": "Tesla K80"}}, 1), big=(big("10Gi"), 5), huge=(big("40Gi"), 9), low=(ANY_GPU, -2)
    )
    classes_of_card = types.classes_of(card())
    assert classes_of_card == {"k80", "big", "low", OF_MODEL}
    assert types.priority_of(classes_of_card) == 5
    assert types.priority_of(frozenset({"low"})) == -2
    assert types.priority_of(frozenset()) == 0
    assert types.priority_of({"gone"}) == 0
    assert types.priority_of({"low", OF_MODEL}) == 0


def test_cached_classes_are_reused_only_for_equal_labels(monkeypatch):
    monkeypatch.setattr(classes, "_MAX_CACHED", 3)
    types = classifier(big=(big("10Gi"), 0), spare=({"matchLabels": {"pool": "spare"}}, 0))
    for _ in range(2):
        for mib in range(10_238, 10_246):
            assert ("big" in types.classes_of(card(memory=mib))) == (mib > 10_240)
            assert "spare" in types.classes_of(card(memory=mib, own={"pool": "spare"}))
            assert "spare" not in types.classes_of(card(memory=mib, own={"pool": ""}))
        assert len(types._classes_by_labels) <= 3


def test_selectors_are_evaluated_once_for_cards_with_equal_labels():
    types = classifier(k80=({"matchLabels": {"model": "Tesla K80"}}, 0))
    for index in range(8):
        types.classes_of(card(index=index, uuid=f"GPU-{index}"))
    assert len(types._classes_by_labels) == 1


def test_automatic_class_exists_before_its_object_is_created():
    for there in ((), (classes.parse(automatic_class()),)):
        types = Classifier(there)
        assert types.classes_of(card()) == {OF_MODEL}
        (resource_class,) = types.select_classes(card())
        assert (
            resource_class.name,
            resource_class.share,
            resource_class.priority,
            resource_class.other,
            resource_class.auto,
        ) == (OF_MODEL, None, 0, False, True)
        assert resource_class.selector.matches(card())


def test_automatic_class_covers_a_new_spelling_of_its_model_at_once():
    types = Classifier([classes.parse(automatic_class("NVIDIA A100"))])
    assert types.classes_of(card(model="A100")) == {"nvidia.a100"}


@pytest.mark.parametrize(
    "theirs",
    [
        automatic_class(share={"memoryMiB": 1}, selector={"matchLabels": {"node": "n2"}}),
        resource_class(OF_MODEL, selector={"matchLabels": {"model": "another"}}),
        resource_class(OF_MODEL, selector={"matchLabels": {"kind": "rdma"}}),
    ],
)
def test_users_class_with_an_automatic_name_selects_its_own_cards(theirs):
    assert Classifier([classes.parse(theirs)]).classes_of(card()) == frozenset()


def test_cards_without_model_and_devices_have_no_automatic_class():
    assert Classifier(()).classes_of(card(model="")) == frozenset()
    assert Classifier(()).classes_of(device()) == frozenset()


@pytest.mark.parametrize(
    ("model", "name", "accelerator"),
    [
        ("Tesla K80", "nvidia.tesla.k80", "nvidia-tesla-k80"),
        ("Tesla V100-SXM2-16GB", "nvidia.tesla.v100-sxm2-16gb", "nvidia-tesla-v100-sxm2-16gb"),
        ("NVIDIA A100-SXM4-80GB", "nvidia.a100-sxm4-80gb", "nvidia-a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 3090", "nvidia.geforce.rtx.3090", "nvidia-geforce-rtx-3090"),
        ("NVIDIA H100 80GB HBM3", "nvidia.h100.80gb.hbm3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA RTX (PRO) 6000/Server", "nvidia.rtx.pro.6000-server", "nvidia-rtx-pro-6000-server"),
        ("", "nvidia.gpu", "nvidia-gpu"),
        ("NVIDIA", "nvidia.gpu", "nvidia-gpu"),
        ("  ", "nvidia.gpu", "nvidia-gpu"),
        ("x" * 80, "nvidia." + "x" * 41, "nvidia-" + "x" * 56),
    ],
)
def test_names_of_models(model, name, accelerator):
    assert classes.name_of_model(model) == name
    assert classes.accelerator_of_model(model) == accelerator


def test_an_automatic_class_selects_its_model_alone():
    parsed = classes.parse(automatic_class())
    assert (parsed.name, parsed.auto, parsed.untouched) == ("nvidia.tesla.k80", True, True)
    assert parsed.selector.matches(card())
    assert not parsed.selector.matches(card(model="Tesla K40"))


def test_default_priority_of_the_api_server_is_not_a_users_edit():
    assert classes.auto_models(automatic_class(priority=0)) == ("Tesla K80",)


def test_automatic_class_selects_all_spellings_of_its_model():
    manifest = automatic_class("NVIDIA A100", "A100")
    assert classes.auto_models(manifest) == ("A100", "NVIDIA A100")
    parsed = classes.parse(manifest)
    assert parsed.untouched
    assert [parsed.selector.matches(card(model=model)) for model in ("A100", "NVIDIA A100", "A10")] == [1, 1, 0]


def test_copy_of_an_automatic_class_belongs_to_the_user():
    copy = automatic_class()
    copy["metadata"]["name"] = "mine"
    assert classes.auto_models(copy) == ()
    assert not classes.parse(copy).untouched


@pytest.mark.parametrize(
    "edited",
    [
        automatic_class(priority=1),
        automatic_class(share={"memoryMiB": 8138}),
        automatic_class(selector={"matchLabels": {"model": "Tesla K40"}}),
        automatic_class(selector={"matchExpressions": [{"key": "model", "operator": "In", "values": [7]}]}),
        automatic_class() | {"spec": None},
    ],
)
def test_edited_automatic_class_belongs_to_the_user(edited):
    assert classes.auto_models(edited) == ()


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": None},
        {"labels": {names.AUTO_LABEL: "false"}},
        {"annotations": None},
        {"annotations": {names.AUTO_SPEC: "{"}},
        {"annotations": {names.AUTO_SPEC: "null"}},
    ],
)
def test_class_without_automatic_marks_belongs_to_the_user(metadata):
    manifest = automatic_class()
    manifest["metadata"] |= metadata
    assert classes.auto_models(manifest) == ()


def test_selectors_do_not_see_the_node_label_of_cardwise():
    own = {names.NODE_LABEL: "n1", "Rack": "a"}
    seen = classes.card_labels(node="n1", index=0, uuid="u", model="m", memory=1, properties={}, own=own)
    assert names.NODE_LABEL not in seen
    assert seen["rack"] == "a"


def device(kind="rdma", **differs):
    of_mlx5 = {
        "node": "n1", "index": 0, "uuid": "rdma-1", "model": "MT4119", "properties": {"vendor": "15b3"}, "own": {},
    }  # fmt: skip
    return classes.card_labels(**(of_mlx5 | differs), kind=kind)


def selector_of_kinds(*kinds, operator="In"):
    return {"matchExpressions": [{"key": "Kind", "operator": operator, "values": list(kinds)}]}


def test_labels_of_a_device():
    assert device() == {
        "kind": "rdma", "model": "MT4119", "node": "n1", "hostname": "n1", "index": "0", "uuid": "rdma-1",
        "vendor": "15b3",
    }  # fmt: skip


MELLANOX = {"matchLabels": {"vendor": "15b3"}}


@pytest.mark.parametrize(
    ("selector", "other"),
    [
        ({"matchLabels": {"kind": "rdma"}}, True),
        ({"matchLabels": {"kind": "rdma", "vendor": "15b3"}}, True),
        (selector_of_kinds("rdma", "nic"), True),
        ([{"matchLabels": {"kind": "rdma"}}, selector_of_kinds("nic")], True),
        (MELLANOX, False),
        (selector_of_kinds("nvidia-gpu"), False),
        (selector_of_kinds("rdma", operator="NotIn"), False),
        ([MELLANOX, ANY_GPU], False),
    ],
)
def test_class_selects_devices_if_each_alternative_names_a_kind(selector, other):
    assert classes.parse(resource_class(selector=selector)).other is other


@pytest.mark.parametrize(
    "selector",
    [
        [{"matchLabels": {"kind": "rdma"}}, MELLANOX],
        [ANY_GPU, selector_of_kinds("rdma")],
        selector_of_kinds("rdma", "nvidia-gpu"),
    ],
)
def test_a_class_of_gpus_and_devices_is_refused(selector):
    with pytest.raises(InvalidRequest, match=r"GPUs and other devices \(rdma\).*write a class for each") as refused:
        classes.parse(resource_class(selector=selector))
    assert refused.value.field == "spec.selector"


def test_a_class_of_devices_has_no_share():
    with pytest.raises(InvalidRequest, match="leave it out") as refused:
        classes.parse(resource_class(selector=selector_of_kinds("rdma"), share={"memoryMiB": 1}))
    assert refused.value.field == "spec.share"


def test_devices_and_cards_are_only_in_classes_of_their_kind():
    types = classifier(
        mellanox=(MELLANOX, 0),
        rdma=({"matchLabels": {"kind": "rdma"}}, 0),
        fast=(selector_of_kinds("rdma", "nic"), 0),
        numbered=({"matchExpressions": [{"key": "index", "operator": "Exists"}]}, 0),
        unfpga=(selector_of_kinds("fpga", operator="NotIn"), 0),
    )
    for _ in range(2):
        assert types.classes_of(device()) == {"rdma", "fast"}
        assert types.classes_of(device("nic")) == {"fast"}
        assert types.classes_of(card(properties={"vendor": "15b3"})) == {"mellanox", "numbered", "unfpga", OF_MODEL}


def test_cached_classes_of_cards_are_not_used_for_similar_devices():
    types = classifier(mellanox=(MELLANOX, 0))
    assert types.classes_of(card(properties={"vendor": "15b3"})) == {"mellanox", OF_MODEL}
    assert types.classes_of(device()) == frozenset()
