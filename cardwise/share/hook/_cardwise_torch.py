"""PyTorch: sets the memory fraction of its caching allocator when the program itself initialises CUDA.

The call is queued, so the hook does not initialise CUDA itself, which would break programs that fork workers
afterwards. A program's own call of set_per_process_memory_fraction comes after the queued call and takes precedence.
Python 3.7 and above.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FRACTION_SETTING = "per_process_memory_fraction"
_CONFIGURATION_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def after_import(cuda: "Any", share: "Any") -> None:
    """Queue the limit in torch.cuda, which has been imported."""

    def limit() -> None:
        try:
            _limit(cuda, share)
        except Exception as problem:  # torch would report the exception of a queued call as a CUDA failure
            share.log("torch", repr(problem))

    cuda._lazy_call(limit)


def _limit(cuda: "Any", share: "Any") -> None:
    if any(_FRACTION_SETTING in os.environ.get(name, "") for name in _CONFIGURATION_VARIABLES):
        return
    device = _device_to_limit(cuda.device_count())
    if device is None:
        return
    # If the kernel enforces the limit, the visible card is as large as the share, so a fraction would limit it again.
    if cuda.get_device_properties(device).total_memory <= share.limit_bytes:
        return
    # Setting the fraction makes `device` the current one; `with` restores the previous one.
    with cuda.device(device):
        get_fraction = getattr(cuda.memory, "get_" + _FRACTION_SETTING, None)
        if get_fraction is None or get_fraction(device) == 1.0:
            cuda.set_per_process_memory_fraction(share.fraction, device)


def _device_to_limit(count: int) -> "int | None":
    """Return the index of the card to limit: the only card, or the card that torchrun assigned to this process.

    Other cards are not limited: a limit needs a CUDA context, and each process's context takes some hundred MiB of the
    card.
    """
    if count == 1:
        return 0
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdigit() and int(rank) < count else None
