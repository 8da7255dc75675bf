"""Watches imports for the frameworks: a finder at the front of sys.meta_path.

For a watched module, this finder calls the later finders, and `_cardwise_wrapping` wraps the loader that they return.
Any other import costs one dictionary lookup. The finder removes itself when every watched module has run. Each start of
Python in the container loads this file, so it contains only the code that every start needs. Python 3.7 and above.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing would cost milliseconds; type checkers treat this name as true
if TYPE_CHECKING:
    from typing import Any

# The modules at whose import the hook acts, and their frameworks.
HOOK_FILE_BY_MODULE = {
    "tensorflow.python.eager.context": "tensorflow",
    "tensorflow.python.client.session": "tensorflow",
    "torch.cuda": "torch",
    "jaxlib.xla_client": "jax",
    "cupy": "cupy",
    "onnxruntime.capi.onnxruntime_inference_collection": "onnxruntime",
}
_HERE = os.path.dirname(os.path.abspath(__file__))


class Finder:
    """A finder that stays on sys.meta_path until every watched module was imported."""

    def __init__(self, pending: "dict[str, str]", file: str) -> None:
        self.pending = pending
        self.file = file  # the path of the share agent's file

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """The spec of the next finder with a wrapped loader; None for modules that are not watched."""
        if name not in self.pending:
            return None
        spec = self._next_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            try:
                load_hook_file("wrapping").wrap(self, spec.loader, name)
            except Exception as problem:
                # The loader does not accept attributes, or the share is damaged: this framework gets no limit.
                log(name, repr(problem))
        return spec

    def _next_spec(self, name: str, path: "Any", target: "Any") -> "Any":
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def load_hook_file(name: str) -> "Any":
    """Load the file `_cardwise_<name>.py` in this file's folder, also if the program has changed sys.path."""
    # importlib.util has this function too, but every interpreter has loaded this module already.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    full = "_cardwise_" + name
    if full not in sys.modules:
        spec: Any = spec_from_file_location(full, os.path.join(_HERE, full + ".py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[full] = module
    return sys.modules[full]


def log(subject: str, message: str) -> None:
    """Print to stderr if CARDWISE_FRAMEWORKS_VERBOSE is set; otherwise print nothing."""
    if os.environ.get("CARDWISE_FRAMEWORKS_VERBOSE"):
        sys.stderr.write(f"cardwise: {subject}: {message}\n")


def start_watching(frameworks: str, file: str) -> None:
    """Watch for the frameworks of a comma-separated list; for all frameworks if the list is empty."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):  # a tool may run sitecustomize again
        return
    chosen_frameworks = {part.strip() for part in frameworks.split(",") if part.strip()}
    pending = {
        name: framework
        for name, framework in HOOK_FILE_BY_MODULE.items()
        # Modules that are imported already, for example by a .pth file, cannot be handled.
        if (not chosen_frameworks or framework in chosen_frameworks) and name not in sys.modules
    }
    if pending:
        sys.meta_path.insert(0, Finder(pending, file))
