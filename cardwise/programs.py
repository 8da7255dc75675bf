"""The programs of the parts, by their names on PATH. `pip install cardwise` installs these programs without their
dependencies.
"""

import gc
import sys
from importlib import import_module
from typing import Final

_OURS: Final = ("webhook", "extender", "deviceplugin", "mps", "cardwise")


def _run(part: str) -> None:
    # structlog imports rich if it is installed, which takes a third of the CPU time of a start and 4 MiB. Only
    # `cardwise top` needs it.
    sys.modules["rich"] = None  # type: ignore[assignment]
    gc.disable()  # imports create no garbage, and searching for it takes a tenth of the time of a start
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
