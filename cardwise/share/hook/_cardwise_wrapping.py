"""Wraps the loader of a watched module: the hook's file for the framework acts before and after the module runs.

Only `exec_module` of the loader object is replaced: spec, loader type, resources and reload stay the same. Loaded when
the first watched module is imported. Python 3.7 and above.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BYTES_PER_MIB = 1024 * 1024


class FrameworkShare:
    """The share, for the hook's files of frameworks.

    It has the limit per card in MiB and bytes, the fraction of a card as text and as number, and the log function.
    """

    def __init__(self, limit_mib: int, fraction: str, log: "Any") -> None:
        self.log = log  # the log function of the finder
        self.limit_mib = limit_mib
        self.limit_bytes = limit_mib * _BYTES_PER_MIB
        self.text = fraction
        self.fraction = float(fraction)


def read_share(file: str, log: "Any") -> "FrameworkShare | None":
    """Read the share from the environment, else from the agent's file. None if no framework needs a limit.

    A whole card needs no limit. A share that the kernel enforces also needs no limit. The program sees a card of the
    size of the share, so a fraction would limit the share a second time.
    """
    document: Any = {}
    if os.path.exists(file):
        import json

        with open(file, encoding="utf-8") as stream:
            document = json.load(stream)
    limit = os.environ.get("CARDWISE_MEM_LIMIT_MIB") or document["limitMiB"]
    fraction = os.environ.get("CARDWISE_MEM_FRACTION") or document["fraction"]
    share = FrameworkShare(int(limit), str(fraction), log)
    if share.limit_mib <= 0 or not 0 < share.fraction < 1 or document.get("enforced") == "kernel":
        return None
    return share


def wrap(finder: "Any", loader: "Any", name: str) -> None:
    """Let the framework of module `name` act when `loader` runs that module."""
    hook = sys.modules[type(finder).__module__]
    share = read_share(finder.file, hook.log)
    if share is None:
        finder.pending.clear()
        _stop_if_done(finder)
        return
    original_exec_module = loader.exec_module

    def exec_module(module: "Any") -> None:
        # The name is checked because a zip file has the same loader for all modules of a folder. `pending` is checked
        # again because a spec may be requested several times, and another hook that calls all finders may make this
        # hook wrap a loader twice.
        framework = finder.pending.get(name) if module.__name__ == name else None
        if framework is None:
            original_exec_module(module)
            return
        framework_hook = _run_step(hook, framework, hook.load_hook_file, framework)
        _run_step(hook, framework, getattr(framework_hook, "before_import", None), share)
        original_exec_module(module)
        # If the import failed, keep watching: the program may try again.
        if finder.pending.pop(name, None) is not None:
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            _run_step(hook, framework, getattr(framework_hook, "after_import", None), module, share)
            hook.log(framework, f"{name}: {share.limit_mib} MiB, fraction {share.text}")
        _stop_if_done(finder)

    loader.exec_module = exec_module


def _stop_if_done(finder: "Any") -> None:
    if not finder.pending and finder in sys.meta_path:
        sys.meta_path.remove(finder)


def _run_step(hook: "Any", framework: str, step: "Any", *arguments: "Any") -> "Any":
    """Run a step unless it is None. Except KeyboardInterrupt, the program sees no exception of the step."""
    if step is None:
        return None
    try:
        return step(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        hook.log(framework, repr(problem))
    return None
