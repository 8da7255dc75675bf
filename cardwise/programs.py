"""The programs of the parts, by their names on PATH. `pip install cardwise` brings the names without what they need."""

import gc
import sys
from importlib import import_module
from typing import Final

_OURS: Final = ("webhook", "extender", "deviceplugin", "mps", "cardwise")


def _run(part: str) -> None:
    # structlog imports rich where it is there, which is a third of a start's CPU and 4 MiB. Only `cardwise top` draws.
    sys.modules["rich"] = None  # type: ignore[assignment]
    gc.disable()  # nothing that is imported here is garbage: looking for it is a tenth of a start
    try:
        program = import_module(f"{part}.__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        sys.exit(f"cardwise-{part} needs {error.name}, which is not installed; write: pip install 'cardwise[server]'")
    gc.freeze()
    gc.enable()
    program.main()


def webhook() -> None:
    """`cardwise-webhook`."""
    _run("webhook")


def extender() -> None:
    """`cardwise-extender`."""
    _run("extender")


def deviceplugin() -> None:
    """`cardwise-deviceplugin`."""
    _run("deviceplugin")


def mps() -> None:
    """`cardwise-mps`."""
    _run("mps")
