"""The environment of a container with a share."""

import json

import pytest

from cardwise.core.api import names
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB
from tests import build
from tests.webhook.rewriting import mutate
from webhook.pods.resources import env_from_annotation, merge_env_entries, own_env_entries

SHARE = ContainerRequest(key="0", name="main", cards=1, mem=MiB(8138))
WHOLE = ContainerRequest(key="init-1", name="side", cards=2)


def by_name(env: list[Json]) -> dict[str, Json]:
    assert len({entry["name"] for entry in env}) == len(env), "duplicates"
    return {entry["name"]: entry for entry in env}


def test_container_gets_all_variables() -> None:
    env, overridden = merge_env_entries([], SHARE, env_from=False)
    assert overridden == []
    paths = {
        entry["name"]: entry.get("value") or entry["valueFrom"]["fieldRef"]["fieldPath"].split("'")[1] for entry in env
    }
    assert paths == {
        "ALIYUN_COM_GPU_MEM_IDX": "ALIYUN_COM_GPU_MEM_IDX",
        "ALIYUN_COM_GPU_MEM_POD": "ALIYUN_COM_GPU_MEM_POD",
        "ALIYUN_COM_GPU_MEM_DEV": "ALIYUN_COM_GPU_MEM_DEV",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "8138",
        "NVIDIA_VISIBLE_DEVICES": "cardwise.dev/devices.0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CARDWISE_MEM_LIMIT_MIB": "cardwise.dev/mem-limit-mib.0",
        "CARDWISE_MEM_FRACTION": "cardwise.dev/mem-fraction.0",
        "CUPY_GPU_MEMORY_LIMIT": "cardwise.dev/mem-limit-bytes.0",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "cardwise.dev/mem-fraction.0",
    }


def test_whole_card_size_is_set_after_placement() -> None:
    variable = by_name(own_env_entries(WHOLE))[names.CONTAINER_MEM]
    assert variable == env_from_annotation(names.CONTAINER_MEM, "cardwise.dev/mem-limit-mib.init-1")


def test_user_values_are_replaced_and_other_entries_follow() -> None:
    existing = [
        {"name": "A", "value": "1"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "B", "value": "$(A)"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"},
        {"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "99999"},
        {"name": "NVIDIA_GPU_MEMORY_REQUEST", "value": "99999"},
        {"name": "CUDA_DEVICE_ORDER", "value": "FASTEST_FIRST"},
    ]
    env, overridden = merge_env_entries(existing, SHARE, env_from=False)
    assert env[-2:] == [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}]
    assert overridden == [
        "CUDA_DEVICE_ORDER",
        "CUDA_MPS_PIPE_DIRECTORY",
        "NVIDIA_GPU_MEMORY_LIMIT",
        "NVIDIA_GPU_MEMORY_REQUEST",
        "NVIDIA_VISIBLE_DEVICES",
    ]
    assert "value" not in by_name(env)["NVIDIA_VISIBLE_DEVICES"]


def test_harmful_cuda_visible_devices_gets_a_warning() -> None:
    def warnings_for(text: str, **amounts: int) -> tuple[str, ...]:
        container = build.container("a", **amounts)
        container["env"] = [{"name": "CUDA_VISIBLE_DEVICES", "value": text}]
        return mutate(build.pod(containers=[container])).warnings

    (warning,) = warnings_for("1", gpu_mem=100)
    assert warning.startswith("spec.containers[0].env[CUDA_VISIBLE_DEVICES]: the container sees only its own GPUs")
    assert warnings_for("0", gpu_mem=100) == warnings_for("1,0", gpu_count=2) == ()
    assert warnings_for("GPU-1", gpu_count=2) != ()
    assert warnings_for("$(NVIDIA_VISIBLE_DEVICES)", gpu_mem=100) == warnings_for("", gpu_mem=100) == (), (
        "the UUIDs of its own GPUs"
    )
    assert warnings_for("$(ALIYUN_COM_GPU_MEM_IDX)", gpu_mem=100) != (), "the node's numbers, not the container's"


def test_misspelled_annotation_gets_a_suggestion() -> None:
    warnings = mutate(build.pod(gpu_mem=100, annotations={"cardwise.dev/polcy": "binpack"})).warnings
    assert warnings == ("metadata.annotations[cardwise.dev/polcy]: removed; did you mean cardwise.dev/policy?",)


def test_user_variables_may_refer_to_own_ones() -> None:
    """Kubernetes expands only variables that are defined before."""
    used = {"name": "OPTIONS", "value": "--fraction=$(CARDWISE_MEM_FRACTION)"}
    env, _ = merge_env_entries([used], SHARE, env_from=False)
    assert [entry["name"] for entry in env].index("CARDWISE_MEM_FRACTION") < env.index(used)
    assert merge_env_entries(env, SHARE, env_from=False) == (env, [])


def test_own_entries_are_replaced_without_a_warning() -> None:
    env, _ = merge_env_entries([], SHARE, env_from=False)
    moved = ContainerRequest(key="1", name="main", cards=1, mem=MiB(64))
    again, overridden = merge_env_entries(env, moved, env_from=False)
    assert overridden == []
    assert again == merge_env_entries([], moved, env_from=False)[0]


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_users_jax_fraction_stays(name: str) -> None:
    own = {"name": name, "value": ".3"}
    env, overridden = merge_env_entries([own], SHARE, env_from=False)
    assert overridden == []
    assert [entry for entry in env if "XLA" in entry["name"]] == [own]


def test_jax_keeps_its_own_default_on_whole_cards() -> None:
    """JAX takes 75 percent by default: with the whole card, no memory would be left for the CUDA context and
    libraries.
    """
    env, _ = merge_env_entries([], WHOLE, env_from=False)
    assert "XLA" not in json.dumps(env)
    own = {"name": names.ENV_XLA_FRACTION, "value": ".9"}
    assert own in merge_env_entries([own], WHOLE, env_from=False)[0]


@pytest.mark.parametrize("now", [WHOLE, None], ids=["whole", "no GPU"])
@pytest.mark.parametrize("env_from", [False, True])
def test_a_copy_with_a_whole_card_loses_the_fraction_of_its_original(
    now: ContainerRequest | None, env_from: bool
) -> None:
    env, _ = merge_env_entries([], SHARE, env_from=False)
    after, overridden = merge_env_entries(env, now, env_from=env_from)
    assert "XLA" not in json.dumps(after)
    assert overridden == []


def test_jax_is_left_alone_where_env_from_may_set_it() -> None:
    env, _ = merge_env_entries([], SHARE, env_from=True)
    assert "XLA" not in json.dumps(env)
    assert "NVIDIA_VISIBLE_DEVICES" in by_name(env), "explicit entries beat envFrom"
