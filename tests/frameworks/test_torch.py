"""The real PyTorch (a CUDA build, without a card): the fraction that its allocator is given, and when.

The double: the handful of functions that ask the driver. The queue that runs when CUDA is initialised, the device guard
and the settings are torch's own. Unproved without a GPU: that the allocator then refuses more.
"""

import pytest

CARD = """
    import json, os, types
    import torch

    queued = len(torch.cuda._queued_calls)
    initialised_by_import = torch.cuda.is_initialized()
    fractions, at, cards = {}, [0], int(os.environ.get("CARDS", "1"))

    def set_fraction(fraction, device):
        fractions[device] = fraction
        at[0] = device  # as the C++ of it does

    def exchange(device):
        before, at[0] = at[0], device
        return before

    torch._C._cuda_init = lambda: None
    torch._C._cuda_setMemoryFraction = set_fraction
    torch._C._cuda_getMemoryFraction = lambda device: fractions.get(device, 1.0)
    torch._C._cuda_getDevice = lambda: at[0]
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = exchange
    torch.cuda.device_count = lambda: cards
    properties = types.SimpleNamespace(total_memory=16276 * 1024 * 1024, major=9, minor=0, name="H100")
    torch.cuda._get_device_properties = lambda device: properties
"""


def program(*lines):
    return CARD + "".join(f"\n    {line}" for line in lines)


SHOW = "print(json.dumps([{str(k): v for k, v in fractions.items()}, at[0]]))"


def test_importing_torch_initialises_nothing_and_queues_one_call(container):
    lines = ("print(json.dumps([queued, initialised_by_import, fractions]))",)
    calls, initialised, fractions = container.answers(program(*lines))
    without, _, _ = container.answers(program(*lines), CARDWISE_FRAMEWORKS="off")
    assert (calls - without, initialised, fractions) == (1, False, {})


def test_the_allocator_gets_the_fraction_when_the_program_initialises_cuda(container):
    assert container.answers(program("torch.cuda.init()", SHOW)) == [{"0": 0.5}, 0]


def test_what_torch_itself_reports(container):
    lines = ("print(json.dumps(torch.cuda.memory.get_per_process_memory_fraction(0)))",)
    assert container.answers(program(*lines)) == 0.5


def test_a_programs_own_fraction_wins(container):
    lines = ("torch.cuda.set_per_process_memory_fraction(0.9, 0)", SHOW)
    assert container.answers(program(*lines)) == [{"0": 0.9}, 0]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_fraction_in_the_environment_wins(container, name):
    answer = container.answers(program("torch.cuda.init()", SHOW), **{name: "per_process_memory_fraction:0.9"})
    assert answer == [{}, 0]


@pytest.mark.parametrize(("rank", "expected"), [("1", [{"1": 0.5}, 0]), ("", [{}, 0])])
def test_of_two_cards_only_the_ranks_is_touched_and_the_current_one_stays(container, rank, expected):
    answer = container.answers(program("torch.cuda.init()", SHOW), CARDS="2", LOCAL_RANK=rank)
    assert answer == expected


def test_without_a_driver_torch_says_what_it_says_without_the_hook(container):
    ask = """
        import torch
        print(torch.cuda.is_available())
        torch.cuda.init()
    """
    hooked, plain = container.run(ask), container.run(ask, CARDWISE_FRAMEWORKS="off")
    assert (hooked.stdout, hooked.returncode) == (plain.stdout, plain.returncode) == ("False\n", 1)
    assert hooked.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert "NVIDIA driver" in hooked.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(container, method):
    """Forked workers break where the parent has initialised CUDA: the hook does not."""
    answer = container.answers(f"""
        import json, torch

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                bad = torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized()
                waits = any(c.__module__ == "_cardwise_torch" for c, _ in torch.cuda._queued_calls)
                return torch.tensor([int(bad), int(waits)])

        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context={method!r})
            print(json.dumps([row[0].tolist() for row in loader]))
    """)
    assert answer == [[0, 1]] * 4


def test_training_on_the_cpu(container):
    answer = container.answers("""
        import json, torch
        model = torch.nn.Linear(4, 1)
        model(torch.ones(2, 4)).sum().backward()
        print(json.dumps(model.weight.grad.shape[1]))
    """)
    assert answer == 4
