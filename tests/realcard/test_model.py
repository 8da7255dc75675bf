"""How long a small model takes for a request beside a training that fills the card, by what the two share it."""

from collections.abc import Callable
from pathlib import Path

from tests.realcard.machine import Machine
from tests.realcard.test_frameworks import PYTHON, skip_without

MODEL = Path(__file__).parent / "model.py"
SHARE = 8192  # MiB, for each of the two
SERVED_SECONDS = 8.0
TOOK = "requests/s, p50 and p99 of a small model (us)"


def answered(machine: Machine, *, beside: bool, through: bool, percent: int = 0) -> tuple[dict, int]:
    """What the model says, and the training's steps in about that time; `beside` it or alone."""
    environment = machine.environment(mib=SHARE if through else 0, percent=percent, through=through)
    if beside:
        training = machine.run(environment, [PYTHON, MODEL, "train"])
        assert training.heard() == {"ready": True}
    serving = machine.run(environment, [PYTHON, MODEL, "serve", str(SERVED_SECONDS)])
    assert serving.heard() == {"ready": True}
    serving.send_line()
    answer, steps = serving.heard(SERVED_SECONDS + 60.0), 0
    if beside:
        training.finish()
        steps = training.heard()["steps"]
    return answer, steps


def test_a_small_model_beside_a_training(machine: Machine, measured: Callable[[str, object], None]) -> None:
    skip_without("torch")

    def measure(label: str, *, beside: bool = True, through: bool = True, percent: int = 0) -> None:
        answer, steps = answered(machine, beside=beside, through=through, percent=percent)
        amounts = f"{answer['requests'] / SERVED_SECONDS:.0f}; {answer['p50']}, {answer['p99']}"
        measured(f"{TOOK}: {label}", amounts + (f"; the training {steps} steps" if beside else ""))

    measure("alone", beside=False, through=False)
    measure("beside a training, time-slicing", through=False)
    machine.share("pod", SHARE)
    measure("alone through MPS", beside=False)
    measure("beside a training through MPS", beside=True)
    for percent in (50, 25):
        measure(f"beside a training through MPS, {percent} % of the SMs each", percent=percent)
