"""Recognises frameworks by the images, commands and environments of containers, for `cardwise advise`.

A framework that preallocates takes its share whether it needs it or not, so its peak says nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cardwise.core.values.decoded import Json

_MEASURED: Final = "docs/measured/gpu.md#memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework.

    pattern: a word of an image's path, a command or an argument that names it.
    preallocates: whether it takes its share when it starts.
    off_environment: names and values of variables with which it does not preallocate.
    own_limit: the setting by which a user lowers what it takes.
    start_mib: the smallest share with which it starts; None if unknown.
    source: where this is known from.
    """

    name: str
    pattern: re.Pattern[str]
    preallocates: bool
    off_environment: Mapping[str, str]
    own_limit: str
    start_mib: int | None
    source: str


def _framework(
    name: str,
    words: str,
    source: str,
    *,
    own_limit: str = "",
    off_environment: Mapping[str, str] | None = None,
    preallocates: bool = True,
    start_mib: int | None = None,
) -> Framework:
    return Framework(
        name=name,
        pattern=re.compile(rf"(?<![a-z0-9])(?:{words})(?![a-z])", re.IGNORECASE),
        preallocates=preallocates,
        off_environment=off_environment or {},
        own_limit=own_limit,
        start_mib=start_mib,
        source=source,
    )


# The first that matches counts: images of servers are often based on those of frameworks. 544 MiB: the smallest limit
# with which CUDA starts on an H200; the frameworks that ran there are listed on the same page.
FRAMEWORKS: Final = (
    _framework(
        "vLLM", "vllm", "https://docs.vllm.ai/en/latest/configuration/engine_args/",
        own_limit="--gpu-memory-utilization",
    ),
    _framework(
        "SGLang", "sglang", "https://docs.sglang.ai/advanced_features/server_arguments.html",
        own_limit="--mem-fraction-static",
    ),
    _framework(
        "Triton", "tritonserver|triton-inference-server",
        "https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/",
        own_limit="--cuda-memory-pool-byte-size and the limits of its backends",
    ),
    _framework(
        "JAX", "jax", "https://docs.jax.dev/en/latest/gpu_memory_allocation.html",
        own_limit="XLA_PYTHON_CLIENT_MEM_FRACTION", off_environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        start_mib=544,
    ),
    _framework(
        "TensorFlow", "tensorflow", "https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth",
        own_limit="memory_limit of its logical device", off_environment={"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
    ),
    _framework("PyTorch", "pytorch|torch|torchrun|torchserve", _MEASURED, preallocates=False, start_mib=544),
    _framework("CuPy", "cupy", _MEASURED, preallocates=False, start_mib=544),
)  # fmt: skip


def recognise_framework(pod: Json, container_name: str) -> Framework | None:
    """The framework of a container; None if its manifest names none.

    Returns a framework that does not preallocate if the environment switches that off.
    """
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    for container in containers:
        if container.get("name") != container_name:
            continue
        words = [container.get("image") or "", *(container.get("command") or ()), *(container.get("args") or ())]
        text = "\n".join(map(str, words))
        environment = {str(entry.get("name")): str(entry.get("value", "")) for entry in container.get("env") or ()}
        for framework in FRAMEWORKS:
            if framework.pattern.search(text):
                is_off = any(
                    environment.get(name, "").lower() == setting for name, setting in framework.off_environment.items()
                )
                return _without_preallocation(framework) if is_off else framework
    return None


def _without_preallocation(framework: Framework) -> Framework:
    return Framework(
        name=framework.name,
        pattern=framework.pattern,
        preallocates=False,
        off_environment=framework.off_environment,
        own_limit=framework.own_limit,
        start_mib=framework.start_mib,
        source=framework.source,
    )
