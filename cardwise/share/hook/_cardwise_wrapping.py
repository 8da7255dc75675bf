"""Wraps the loader of a watched module, so that the framework's own file acts before and after the module has run.

`exec_module` of the loader object is replaced and nothing else: spec, loader type, resources and reload stay what they
are. Loaded when the first watched module is looked for. Python 3.7 and above.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIB = 1024 * 1024


class FrameworkShare:
    """What the frameworks are told: MiB and bytes on each card, the fraction of a card as text and number; and how to
    speak to those who want to hear.
    """

    def __init__(self, limit_mib: int, fraction: str, say: "Any") -> None:
        self.say = say  # the finder's
        self.limit_mib = limit_mib
        self.limit_bytes = limit_mib * _MIB
        self.text = fraction
        self.fraction = float(fraction)


def read_share(file: str, say: "Any") -> "FrameworkShare | None":
    """The share as the environment tells it, else the agent's file; None where there is nothing for a framework to do.

    That is a whole card, and a share that the kernel enforces: there the card that a program sees *is* the share, and
    a fraction of it would be taken twice.
    """
    told: Any = {}
    if os.path.exists(file):
        import json

        with open(file, encoding="utf-8") as opened:
            told = json.load(opened)
    limit = os.environ.get("CARDWISE_MEM_LIMIT_MIB") or told["limitMiB"]
    fraction = os.environ.get("CARDWISE_MEM_FRACTION") or told["fraction"]
    share = FrameworkShare(int(limit), str(fraction), say)
    if share.limit_mib <= 0 or not 0 < share.fraction < 1 or told.get("enforced") == "kernel":
        return None
    return share


def wrap(finder: "Any", loader: "Any", name: str) -> None:
    """Let the framework of module `name` act when `loader` runs that module."""
    hook = sys.modules[type(finder).__module__]
    share = read_share(finder.file, hook.say)
    if share is None:
        finder.pending.clear()
        _leave(finder)
        return
    run = loader.exec_module

    def exec_module(module: "Any") -> None:
        # A zip file has one loader for all that is in a folder. And pending is asked again: many may look for a spec,
        # and another hook that asks all finders has us wrap a loader twice.
        framework = finder.pending.get(name) if module.__name__ == name else None
        if framework is None:
            run(module)
            return
        actor = _guarded(hook, framework, hook.load, framework)
        _guarded(hook, framework, getattr(actor, "before", None), share)
        run(module)
        # Where it has failed we stay on watch: the program may try again.
        if finder.pending.pop(name, None) is not None:
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            _guarded(hook, framework, getattr(actor, "after", None), module, share)
            hook.say(framework, f"{name}: {share.limit_mib} MiB, fraction {share.text}")
        _leave(finder)

    loader.exec_module = exec_module


def _leave(finder: "Any") -> None:
    if not finder.pending and finder in sys.meta_path:
        sys.meta_path.remove(finder)


def _guarded(hook: "Any", framework: str, step: "Any", *arguments: "Any") -> "Any":
    """Do a step if there is one; the program sees nothing of what it raises, but its own Ctrl-C."""
    if step is None:
        return None
    try:
        return step(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        hook.say(framework, repr(problem))
    return None
