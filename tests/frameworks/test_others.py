"""The real CuPy and ONNX Runtime, what they have read or handed on; and a program that has all frameworks.

Doubles: for ONNX Runtime's CPU build, the call into its C++, which has no CUDA provider; none for CuPy, which parses
its variable without a card. Unproved without a GPU: that CuPy's pool and ONNX Runtime's arena keep to it.
"""

LIMIT = 8138 * 1024 * 1024


def test_cupy_reads_the_limit(container):
    program = """
        import json, cupy
        print(json.dumps(cupy.cuda.memory._parse_limit_string()))
    """
    assert container.answers(program) == {"size": LIMIT, "fraction": None}
    assert container.answers(program, CARDWISE_FRAMEWORKS="off") == {"size": None, "fraction": None}
    assert container.answers(program, CUPY_GPU_MEMORY_LIMIT="25%") == {"size": None, "fraction": 0.25}


SESSION = """
    import json, warnings
    import onnxruntime
    from onnxruntime.capi import onnxruntime_inference_collection as collection
    from onnxruntime.datasets import get_example
    warnings.simplefilter("ignore")
    handed = []

    class Session(collection.C.InferenceSession):
        def initialize_session(self, providers, options, disabled):
            handed.append([list(providers), [dict(o) for o in options]])
            super().initialize_session(["CPUExecutionProvider"], [{}], disabled)

    collection.C.InferenceSession = Session
    CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
    model = get_example("sigmoid.onnx")
"""


def handed(container, *lines):
    return container.answers(SESSION + "".join(f"\n    {line}" for line in (*lines, "print(json.dumps(handed))")))


def test_onnxruntime_hands_the_limit_to_the_cuda_provider(container):
    assert handed(
        container,
        "session = onnxruntime.InferenceSession(model, providers=[CUDA, CPU])",
        "session.set_providers([(CUDA, {'device_id': 0})])",
        "onnxruntime.InferenceSession(model, providers=[CPU])",
    ) == [
        [["CUDAExecutionProvider", "CPUExecutionProvider"], [{"gpu_mem_limit": str(LIMIT)}, {}]],
        [["CUDAExecutionProvider"], [{"device_id": "0", "gpu_mem_limit": str(LIMIT)}]],
        [["CPUExecutionProvider"], [{}]],
    ]


def test_onnxruntime_programs_own_limit_wins_and_its_options_stay_as_they_were(container):
    assert handed(
        container,
        "own, empty = {'gpu_mem_limit': 1000}, {}",
        "onnxruntime.InferenceSession(model, providers=[(CUDA, own)])",
        "onnxruntime.InferenceSession(model, providers=[CUDA, CPU], provider_options=[own, empty])",
        "onnxruntime.InferenceSession(model, providers=[(CUDA, empty)])",
        "assert (own, empty) == ({'gpu_mem_limit': 1000}, {})",
    ) == [
        [["CUDAExecutionProvider"], [{"gpu_mem_limit": "1000"}]],
        [["CUDAExecutionProvider", "CPUExecutionProvider"], [{"gpu_mem_limit": "1000"}, {}]],
        [["CUDAExecutionProvider"], [{"gpu_mem_limit": str(LIMIT)}]],
    ]


def test_onnxruntime_runs_a_model_on_the_cpu_undoubled(container):
    answer = container.answers("""
        import json, numpy, onnxruntime
        from onnxruntime.datasets import get_example
        session = onnxruntime.InferenceSession(get_example("sigmoid.onnx"), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        out = session.run(None, {name: numpy.zeros((3, 4, 5), numpy.float32)})
        print(json.dumps(float(out[0][0][0][0])))
    """)
    assert answer == 0.5


def test_all_frameworks_in_one_program_and_the_finder_is_gone(container):
    answer = container.answers("""
        import json, sys
        import onnxruntime, torch, jax, cupy, tensorflow
        print(json.dumps([type(f).__module__ for f in sys.meta_path if type(f).__module__.startswith("_cardwise")]))
    """)
    assert answer == []


def test_the_images_own_sitecustomize_with_a_real_framework(container):
    container.install({"sitecustomize.py": "import sys; sys.image = True"})
    answer = container.answers("import json, sys, onnxruntime; print(json.dumps(sys.image))")
    assert answer is True
