"""Runs at the start of every Python of a container that has the hook mounted and named by PYTHONPATH.

It puts `_cardwise_finder` on watch for the frameworks and then runs the image's own sitecustomize, which it hides.
Nothing that goes wrong here may reach the program, and a start must cost next to nothing: so no import that the
interpreter has not made by now, and no file read where there is no share. Python 3.7 and above.
"""

import os
import sys

TYPE_CHECKING = False  # typing alone would cost milliseconds; type checkers take this name for true
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _watch() -> None:
    """Put the finder in place, where there is a share and nobody has switched it off."""
    wanted = os.environ.get("CARDWISE_FRAMEWORKS", "").strip().lower()
    if wanted == "off":
        return
    file = os.environ.get("CARDWISE_SHARE_FILE") or "/run/cardwise/share/share.json"
    if os.environ.get("CARDWISE_MEM_LIMIT_MIB") or os.path.exists(file):
        __import__("_cardwise_finder").install(wanted, file)


def _next() -> "Any":
    """The spec of the sitecustomize that stands next on sys.path, or None.

    Next, not first: one that stands before this folder has run and asked for us.
    """
    # importlib.machinery under the name that every interpreter has loaded it by.
    from _frozen_importlib_external import PathFinder

    if _HERE not in sys.path:
        return None
    spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index(_HERE) + 1 :])
    return spec if spec is not None and spec.loader is not None else None


def _quietly(step: "Any") -> "Any":
    """Do a step; whatever it raises, SystemExit too, is shown to those only who ask for it."""
    try:
        return step()
    except BaseException:
        if os.environ.get("CARDWISE_FRAMEWORKS_VERBOSE"):
            import traceback

            traceback.print_exc()
    return None


_quietly(_watch)
_found = _quietly(_next)
if _found is not None:
    from _frozen_importlib import module_from_spec

    # The program's `import sitecustomize` shall find the image's own. What that one raises is the image's affair:
    # it passes through us to where it would have gone without us.
    _theirs = module_from_spec(_found)
    sys.modules["sitecustomize"] = _theirs
    _found.loader.exec_module(_theirs)
