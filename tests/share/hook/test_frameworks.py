"""What is done to each framework, on fakes of a few lines; the real ones are in tests/frameworks."""

import textwrap

import pytest

from tests.share import fakes
from tests.share.container import HALF, LIMIT_BYTES


def torch(container, program, **env):
    container.install(fakes.TORCH)
    return container.output_of(f"import torch; from torch.cuda.memory import fractions\n{program}", **{**HALF, **env})


def test_torch_waits_for_the_program_to_initialise_cuda(container):
    assert torch(container, "print(torch.cuda.initialised, fractions)") == "False {}"


def test_torch_gets_its_fraction_with_cuda(container):
    assert torch(container, "torch.cuda._lazy_init(); print(fractions)") == "{0: 0.5}"


def test_torch_programs_own_fraction_wins(container):
    program = "torch.cuda.set_per_process_memory_fraction(0.9); print(fractions)"
    assert torch(container, program) == "{0: 0.9}"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torch_fraction_in_the_environment_wins(container, name):
    program = "torch.cuda._lazy_init(); print(fractions)"
    assert torch(container, program, **{name: "expandable_segments:True,per_process_memory_fraction:0.9"}) == "{}"


def test_torch_fraction_that_the_allocator_has_already_wins(container):
    assert torch(container, "fractions[0] = 0.25; torch.cuda._lazy_init(); print(fractions)") == "{0: 0.25}"


def test_torch_sees_only_the_share(container):
    program = f"torch.cuda.TOTAL = {LIMIT_BYTES}; torch.cuda._lazy_init(); print(fractions)"
    assert torch(container, program) == "{}"


@pytest.mark.parametrize(("rank", "printed"), [("1", "{1: 0.5} 0"), ("", "{} 0"), ("7", "{} 0")])
def test_torch_with_two_cards_touches_only_the_one_of_its_rank(container, rank, printed):
    program = "torch.cuda.CARDS = 2; torch.cuda._lazy_init(); print(fractions, torch.cuda.current)"
    assert torch(container, program, LOCAL_RANK=rank) == printed


def test_torch_failure_of_the_limit_is_no_failure_of_cuda(container):
    program = "del torch.cuda.get_device_properties; torch.cuda._lazy_init(); print('goes on')"
    assert torch(container, program) == "goes on"


OPTIONS = "import os; from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as options\n"
SEEN = "print(options(), *sorted(name for name in os.environ if name.startswith('XLA')))"


def jax(container, program, **env):
    container.install(fakes.JAXLIB)
    return container.output_of(OPTIONS + program, **{**HALF, **env})


def test_jax_reads_the_fraction_and_the_environment_is_as_before(container):
    assert jax(container, SEEN) == "{'memory_fraction': 0.5}"


def test_jax_fraction_of_the_pod_stays(container):
    printed = jax(container, SEEN, XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert printed == "{'memory_fraction': 0.5} XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_jax_programs_own_fraction_wins_even_after_the_import(container, name):
    assert jax(container, f"os.environ[{name!r}] = '0.2'\n{SEEN}") == f"{{'memory_fraction': 0.2}} {name}"


def test_jax_programs_new_name_does_not_clash_with_our_old_one(container):
    program = f"os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.2'\n{SEEN}"
    printed = jax(container, program, XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert printed == "{'memory_fraction': 0.2} XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_MEM_FRACTION"


def test_jax_a_clash_of_the_programs_own_making_stays(container):
    program = """
        os.environ.update(XLA_CLIENT_MEM_FRACTION='0.2', XLA_PYTHON_CLIENT_MEM_FRACTION='0.3')
        try:
            options()
        except ValueError as error:
            print(error)
    """
    assert jax(container, textwrap.dedent(program)) == "both"


def test_cupy_programs_own_limit_wins(container):
    container.install(fakes.CUPY)
    assert container.output_of("import cupy; print(cupy.limit)", **HALF, CUPY_GPU_MEMORY_LIMIT="25%") == "25%"


def test_onnxruntime_cuda_provider_gets_a_limit_and_no_other(container):
    container.install(fakes.ONNXRUNTIME)
    program = """
        from onnxruntime import onnxruntime_inference_collection as collection
        print(collection.check_and_normalize_provider_args(["CUDAExecutionProvider", "CPUExecutionProvider"], None, []))
    """
    printed = container.output_of(program, **HALF)
    providers = "['CUDAExecutionProvider', 'CPUExecutionProvider']"
    assert printed == f"({providers}, [{{'gpu_mem_limit': '{LIMIT_BYTES}'}}, {{}}])"
