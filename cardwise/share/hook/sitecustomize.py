"""Runs at each start of Python in a container where the hook is mounted and its folder is in PYTHONPATH.

Installs `_cardwise_finder`, which watches for the frameworks. Then runs the image's own sitecustomize, which this file
hides. Errors of this file must not reach the program, and the file must not delay the start. So it imports only modules
that the interpreter has imported already. It reads files only if there is a share. Python 3.7 and above.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing would cost milliseconds; type checkers treat this name as true
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_watching() -> None:
    """Install the finder if there is a share and the hook is not switched off."""
    switch = os.environ.get("CARDWISE_FRAMEWORKS", "").strip().lower()
    if switch == "off":
        return
    file = os.environ.get("CARDWISE_SHARE_FILE") or "/run/cardwise/share/share.json"
    if os.environ.get("CARDWISE_MEM_LIMIT_MIB") or os.path.exists(file):
        __import__("_cardwise_finder").start_watching(switch, file)


def _next_sitecustomize() -> "Any":
    """The spec of the first sitecustomize after this folder on sys.path, or None.

    A sitecustomize before this folder has run already, and has imported this file.
    """
    # importlib.machinery has this class too, but every interpreter has loaded this module already.
    from _frozen_importlib_external import PathFinder

    if _HERE not in sys.path:
        return None
    spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index(_HERE) + 1 :])
    return spec if spec is not None and spec.loader is not None else None


def _run_silently(step: "Any") -> "Any":
    """Run a step. Its exceptions, SystemExit included, are printed only if CARDWISE_FRAMEWORKS_VERBOSE is set."""
    try:
        return step()
    except BaseException:
        if os.environ.get("CARDWISE_FRAMEWORKS_VERBOSE"):
            import traceback

            traceback.print_exc()
    return None


_run_silently(_start_watching)
_spec = _run_silently(_next_sitecustomize)
if _spec is not None:
    from _frozen_importlib import module_from_spec

    # The program's `import sitecustomize` has to get the image's own module. The exceptions of this module propagate as
    # they would without the hook.
    _module = module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
