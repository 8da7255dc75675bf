"""PyTorch: the fraction of its caching allocator, set when the program itself initialises CUDA.

Queued, so that nothing initialises CUDA here: that would break programs that fork workers afterwards. What the program
sets by set_per_process_memory_fraction comes after the queue and wins. Python 3.7 and above.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KEY = "per_process_memory_fraction"
_CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def after(cuda: "Any", share: "Any") -> None:
    """Queue it in torch.cuda, which has run."""

    def limit() -> None:
        try:
            _limit(cuda, share)
        except Exception as problem:  # torch takes what a queued call raises for a failure of CUDA
            share.say("torch", repr(problem))

    cuda._lazy_call(limit)


def _limit(cuda: "Any", share: "Any") -> None:
    if any(_KEY in os.environ.get(name, "") for name in _CONFIGURATIONS):
        return
    device = _device(cuda.device_count())
    if device is None:
        return
    # Where the card looks no larger than the share (a limit in the kernel), a fraction of it would be taken twice.
    if cuda.get_device_properties(device).total_memory <= share.limit_bytes:
        return
    # Setting it makes `device` the current one; `with` puts back the one of before.
    with cuda.device(device):
        told = getattr(cuda.memory, "get_" + _KEY, None)
        if told is None or told(device) == 1.0:
            cuda.set_per_process_memory_fraction(share.fraction, device)


def _device(count: int) -> "int | None":
    """The card to limit: the only one, or of several the one that torchrun gave to this process.

    Not all of several: setting a limit costs a CUDA context, some hundred MiB on each card for each process.
    """
    if count == 1:
        return 0
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdigit() and int(rank) < count else None
