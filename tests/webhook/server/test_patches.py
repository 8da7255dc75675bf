"""The patch of a response: its effect, and the work to compute it."""

import jsonpatch
from hypothesis import example, given
from hypothesis import strategies as st

from cardwise.core.values.decoded import Json
from webhook.server import patches

NAMES = st.sampled_from(["containers", "initContainers", "limits", "env", "a/b", "c~d", "name"])
VALUES = st.recursive(
    st.none() | st.integers(0, 2) | st.sampled_from(["", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(before=OBJECTS, after=OBJECTS)
def test_patch_turns_before_into_after(before: Json, after: Json) -> None:
    assert jsonpatch.apply_patch(before, patches.make_patch(before, after)) == after


CONTAINERS = st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=4)


@st.composite
def rewritten_containers(draw: st.DrawFn) -> tuple[Json, Json]:
    """A pod before and after rewriting: the containers keep their positions, and fields of some differ."""
    before, after = draw(CONTAINERS), []
    for container in before:
        fields = draw(st.dictionaries(NAMES, VALUES, max_size=3))
        removed = draw(st.sets(st.sampled_from(sorted(container)))) if container else set()
        after.append({key: field for key, field in (container | fields).items() if key not in removed})
    key = draw(st.sampled_from(["containers", "initContainers"]))
    return {"spec": {key: before}}, {"spec": {key: after}}


@given(pods=rewritten_containers())
@example(
    pods=(
        {"spec": {"containers": [{"name": "proxy"}, {"name": "logger", "env": [1]}]}},
        {"spec": {"containers": [{"name": "proxy", "env": [2]}, {"name": "logger", "env": [2]}]}},
    )
)
def test_each_container_gets_its_own_changes(pods: tuple[Json, Json]) -> None:
    before, after = pods
    assert jsonpatch.apply_patch(before, patches.make_patch(before, after)) == after


def test_rewritten_list_is_one_operation() -> None:
    env = [{"name": f"N{i}"} for i in range(2000)]
    gates = [{"name": "g"}]
    before = {"spec": {"containers": [{"name": "c", "env": env}], "schedulingGates": gates}}
    after = {"spec": {"containers": [{"name": "c", "env": env[::2]}], "schedulingGates": []}}
    assert sorted(patches.make_patch(before, after), key=lambda operation: str(operation["path"])) == [
        {"op": "replace", "path": "/spec/containers/0/env", "value": env[::2]},
        {"op": "replace", "path": "/spec/schedulingGates", "value": []},
    ]
