"""Frameworks of a few lines, with the parts that the hook touches: for what depends on the hook, not on them.

The real ones are in tests/frameworks.
"""

CUPY = {
    "cupy/__init__.py": """
        import os
        limit = os.environ.get("CUPY_GPU_MEMORY_LIMIT")
        runs = globals().get("runs", 0) + 1
    """
}

# As PyTorch: calls wait in a queue until CUDA is initialised.
TORCH = {
    "torch/__init__.py": "from . import cuda",
    "torch/cuda/__init__.py": """
        from . import memory
        from .memory import set_per_process_memory_fraction
        queued, initialised, CARDS, TOTAL = [], False, 1, 16276 * 1024 * 1024
        current = 0

        def _lazy_call(call):
            if initialised:
                call()
            else:
                queued.append(call)

        def _lazy_init():
            global initialised
            if not initialised:
                initialised = True
                for call in queued:
                    call()

        def device_count():
            return CARDS

        class get_device_properties:
            def __init__(self, device):
                self.total_memory = TOTAL

        class device:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                global current
                self.before, current = current, self.index

            def __exit__(self, *raised):
                global current
                current = self.before
    """,
    "torch/cuda/memory.py": """
        fractions = {}

        def set_per_process_memory_fraction(fraction, device=0):
            from torch import cuda
            cuda._lazy_init()
            cuda.current = device  # as the real one does
            fractions[device] = fraction

        def get_per_process_memory_fraction(device=0):
            return fractions.get(device, 1.0)
    """,
}

ONNXRUNTIME = {
    "onnxruntime/__init__.py": "from .capi import onnxruntime_inference_collection",
    "onnxruntime/capi/__init__.py": "",
    "onnxruntime/capi/onnxruntime_inference_collection.py": """
        def check_and_normalize_provider_args(providers, options, available):
            return list(providers), [{} for _ in providers]
    """,
}

JAXLIB = {
    "jaxlib/__init__.py": "",
    "jaxlib/xla_client.py": """
        import os

        def generate_pjrt_gpu_plugin_options():
            new = os.environ.get("XLA_CLIENT_MEM_FRACTION", "")
            old = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
            if new and old:
                raise ValueError("both")
            return {"memory_fraction": float(new or old)} if new or old else {}
    """,
}

# A finder is on watch.
WATCHING = "any(type(finder).__module__ == '_cardwise_finder' for finder in sys.meta_path)"
