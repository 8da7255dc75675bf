"""ONNX Runtime: sets gpu_mem_limit for the CUDA provider, unless the session sets it.

The hook wraps the function that normalizes the names and options of providers: new sessions and set_providers both call
this function. Python 3.7 and above.
"""

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def after_import(module: "Any", share: "Any") -> None:
    """Wrap the function that normalizes providers and their options."""
    original = module.check_and_normalize_provider_args

    @functools.wraps(original)
    def normalize_with_limit(*arguments: "Any", **named: "Any") -> "Any":
        providers, all_options = original(*arguments, **named)
        for provider, options in zip(providers, all_options):
            if provider == "CUDAExecutionProvider":
                options.setdefault("gpu_mem_limit", str(share.limit_bytes))
        return providers, all_options

    module.check_and_normalize_provider_args = normalize_with_limit
