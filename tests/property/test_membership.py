"""The extender's way to the classes of thousands of cards, which must agree with the classifier that all others ask."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import classes
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import Classifier
from cardwise.core.placement.devices import Device
from extender.cache.membership import NO_CLASSES, ClassMembership
from extender.records.cards import CardRecord
from extender.reporting.classcontroller import automatic_class
from tests.examples import examples

MODELS = ["", "Tesla K80", "NVIDIA Tesla K80", "Tesla-K80", "Tesla P100", "\u0130 \u2603"]
NAMES = sorted({classes.name_of_model(model) for model in MODELS})

expressions = st.one_of(
    st.builds(
        lambda models: {"key": "model", "operator": "In", "values": models},
        st.lists(st.sampled_from(MODELS), min_size=1),
    ),
    st.builds(lambda node: {"key": "node", "operator": "In", "values": [node]}, st.sampled_from(["n1", "n2"])),
    st.just({"key": "memory", "operator": "Gt", "values": ["10Gi"]}),
    st.just({"key": "rack", "operator": "Exists"}),
    st.just({"key": "kind", "operator": "In", "values": ["rdma"]}),
)


def of_a_person(name, conditions, priority):
    return {"metadata": {"name": name}, "spec": {"selector": {"matchExpressions": conditions}, "priority": priority}}


def of_ours(name, priority, count):
    manifest = automatic_class(
        name, *[model for model in MODELS if model and classes.name_of_model(model) == name][:count]
    )
    return manifest | {"spec": manifest["spec"] | {"priority": priority}}  # with a priority it is edited


found_classes = st.one_of(
    st.builds(
        of_a_person,
        st.sampled_from([*NAMES, "big", "mine"]),
        st.lists(expressions, min_size=1, max_size=2),
        st.integers(-2, 2),
    ),
    st.builds(
        of_ours, st.sampled_from([name for name in NAMES if name != "nvidia.gpu"]), st.integers(0, 1), st.integers(1, 3)
    ),
)
cards = st.builds(
    lambda model, node, mem, rack, index: CardRecord(
        node, Card(index=index, uuid=f"GPU-{node}-{index}", mem=mem, model=model), (), {"rack": rack} if rack else {}
    ),
    st.sampled_from(MODELS),
    st.sampled_from(["n1", "n2"]),
    st.sampled_from([8 * 1024, 16 * 1024]),
    st.sampled_from(["", "r1"]),
    st.integers(0, 2),
)
devices = st.builds(
    lambda model: CardRecord("n1", Device(uuid="rdma-0", kind="rdma", index=0, model=model)), st.sampled_from(MODELS)
)


@given(
    of_classes=st.lists(found_classes, max_size=5, unique_by=lambda manifest: manifest["metadata"]["name"]),
    records=st.lists(st.one_of(cards, devices)),
)
@settings(max_examples=examples(100, soak=2000), deadline=None)
def test_membership_equals_the_classifier(of_classes, records):
    parsed = [classes.parse(manifest) for manifest in of_classes]
    membership, classifier = ClassMembership(parsed), Classifier(parsed)
    members = [membership.classes_of(record) for record in records]
    for record, member in zip(records, members, strict=True):
        assert member.classes == classifier.classes_of(_labels(record))
        if isinstance(record.card, Card):
            assert member.priority == classifier.priority_of(member.classes)
    again = ClassMembership(parsed[::-1], known_classes=members)
    by_value = {member: member for member in (NO_CLASSES, *members)}
    for record, member in zip(records, members, strict=True):
        assert again.classes_of(record) is by_value[member], "equal members are one object"


def _labels(record):
    card = record.card
    of_device = isinstance(card, Device)
    return classes.card_labels(
        node=record.node,
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory=0 if of_device else card.mem,
        properties={},
        own=record.labels,
        kind=card.kind if of_device else classes.GPU_KIND,
    )
