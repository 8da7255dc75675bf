"""Any pods, spelled in any way, for properties."""

from hypothesis import strategies as st

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.build import resource_class
from tests.webhook.reviews import resource_classes

_AMOUNTS = {
    names.GPU_MEM: st.sampled_from(["8138", "8Gi", "0.5Gi", "8000", "8k", "1e3", "6", "1024Mi", "0", "x"]),
    names.GPU_COUNT: st.sampled_from(["1", "2", "3"]),
    names.GPU_CORE: st.sampled_from(["20", "60"]),
    names.WHOLE_GPU: st.sampled_from(["1", "2"]),
    names.SHARE: st.sampled_from(["1", "5"]),
    names.FILTER_CALL_RESOURCE: st.sampled_from(["0", "1"]),
    "cpu": st.just("1"),
    "k80": st.sampled_from(["1", "2", "0"]),
    f"{names.CLASS_PREFIX}k80": st.sampled_from(["1", "2"]),
    "half": st.sampled_from(["1", "2"]),
    f"{names.CLASS_PREFIX}half": st.sampled_from(["1", "2"]),
    "rdma": st.sampled_from(["1", "2"]),
    f"{names.CLASS_PREFIX}rdma": st.sampled_from(["1", "2"]),
    f"{names.CLASS_PREFIX}fpga": st.just("1"),
    names.NVIDIA_GPU: st.sampled_from(["0", "1"]),
}
CLASSES = resource_classes(
    resource_class("k80"),
    resource_class("half", share={"memoryMiB": 4000, "corePercent": 30}),
    *(resource_class(kind, selector={"matchLabels": {"kind": kind}}) for kind in ("rdma", "fpga")),
)


def _strategy_of(*resources: str) -> st.SearchStrategy[Json]:
    """One of the resources, or several with the same meaning."""
    return st.builds(
        dict.fromkeys,
        st.lists(st.sampled_from(resources), min_size=1, max_size=2, unique=True), st.sampled_from(["1", "2"]),
    )  # fmt: skip


def _some(*resources: str) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional={name: _AMOUNTS[name] for name in resources})


def _all_of(*parts: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.tuples(*parts).map(
        lambda parts_found: {name: amount for part in parts_found for name, amount in part.items()}
    )


_NOTHING: st.SearchStrategy[Json] = st.just({})
_K80, _HALF = _strategy_of("k80", f"{names.CLASS_PREFIX}k80"), _strategy_of("half", f"{names.CLASS_PREFIX}half")
_MEMORY = st.fixed_dictionaries(
    {names.GPU_MEM: st.sampled_from(["8138", "8Gi", "0.5Gi", "8000", "8k", "1e3", "1024Mi"])}
)
_CARDS = st.one_of(
    _NOTHING,
    _all_of(_MEMORY, _some(names.GPU_COUNT, names.GPU_CORE)),
    _all_of(_MEMORY, st.fixed_dictionaries({"k80": st.just("1")})),
    _strategy_of(names.WHOLE_GPU, names.NVIDIA_GPU),
    _K80,
    _HALF,
    st.fixed_dictionaries({"half": st.just("1"), names.GPU_CORE: st.just("20")}),
)
_DEVICES = st.one_of(
    _NOTHING, _NOTHING, _strategy_of("rdma", f"{names.CLASS_PREFIX}rdma"), _some(f"{names.CLASS_PREFIX}fpga"),
)  # fmt: skip
# Realistic values, mixed with random ones, most of which are refused.
_MEANT = _all_of(_CARDS, _DEVICES, _some(names.SHARE, names.FILTER_CALL_RESOURCE, "cpu"))
_LIMITS = st.integers(0, 7).flatmap(lambda drawn: _MEANT if drawn else st.fixed_dictionaries({}, optional=_AMOUNTS))
_REFERENCES = ["cardwise.dev/devices.0", "cardwise.dev/mem-fraction.3", names.IDX, "mine"]
_ENV_NAMES = [
    "A", "NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", names.IDX, names.CONTAINER_MEM, names.ENV_XLA_FRACTION,
    names.ENV_GPU_MEMORY_LIMIT, names.ENV_XLA_FRACTION_NEW, names.ENV_FRACTION,
    names.ENV_ISOLATION,
]  # fmt: skip
_ENV = st.lists(
    st.builds(
        lambda name, text, annotation: (
            {"name": name, "value": text}
            if text is not None
            else {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}
        ),
        st.sampled_from(_ENV_NAMES), st.sampled_from(["all", "", "7", None]), st.sampled_from(_REFERENCES),
    ),
    max_size=5,
)  # fmt: skip
_CONTAINERS = st.builds(
    lambda amounts, env, env_from, same: {
        "resources": {"limits": amounts} | ({"requests": dict(amounts)} if same else {}),
        "env": env,
        **({"envFrom": [{"configMapRef": {"name": "x"}}]} if env_from else {}),
    },
    _LIMITS, _ENV, st.booleans(), st.booleans(),
)  # fmt: skip


def name_containers(letter: str, containers: list[Json]) -> list[Json]:
    return [container | {"name": f"{letter}{i}"} for i, container in enumerate(containers)]


_SIDECARS = _CONTAINERS.map(lambda container: container | {"restartPolicy": "Always"})
_TEXTS = ["1", "2", "k80", "fpga,k80", "c0="]
_COUNTS = ["c0=2", "c0=3,c1=2,i0=2"]
_ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        names.IDX: st.sampled_from(_TEXTS),
        names.ASSIGNMENT: st.sampled_from(_TEXTS),
        "mine": st.sampled_from(_TEXTS),
        names.DEVICE_CLASSES: st.sampled_from([*_TEXTS, *_COUNTS]),
        names.GPU_COUNTS: st.sampled_from([*_COUNTS, *_COUNTS, *_COUNTS, "c0=", "2"]),
        names.CLASS: st.sampled_from(["k80", "k80", "half", "half", "rdma"]),
    },
)
PODS = st.builds(
    lambda containers, init, annotations, node: {
        "metadata": {"name": "p", "annotations": annotations, "resourceVersion": "1"},
        "spec": {"containers": name_containers("c", containers), "initContainers": name_containers("i", init)}
        | ({"nodeName": "n1"} if node else {}),
    },
    st.lists(_CONTAINERS, min_size=1, max_size=3), st.lists(_SIDECARS, max_size=2), _ANNOTATIONS, st.booleans(),
)  # fmt: skip
