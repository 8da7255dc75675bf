"""The entry points of the components' programs.

`pip install cardwise` installs these programs on PATH, but without their dependencies.
"""

import gc
import sys
from importlib import import_module
from typing import Final

_OWN_PACKAGES: Final = ("webhook", "extender", "deviceplugin", "mps", "cardwise")


def _run(component: str) -> None:
    # If rich is installed, structlog imports it, which takes a third of the CPU time of a start and 4 MiB. Only
    # `cardwise top` needs rich.
    sys.modules["rich"] = None  # type: ignore[assignment]
    gc.disable()  # imports create no garbage, and the search for garbage takes a tenth of the time of a start
    try:
        program = import_module(f"{component}.__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OWN_PACKAGES:
            raise
        sys.exit(
            f"cardwise-{component} needs {error.name}, which is not installed; write: pip install 'cardwise[server]'"
        )
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
