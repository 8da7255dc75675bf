"""JAX: puts the memory fraction into the environment while JAX reads it.

JAX reads the environment when it starts its GPU backend, long after the import. If both the old and the new variable
are set, JAX refuses to start. So the hook sets the variable at that moment, unless the program has set it before. If
the program has set the new variable, the hook removes the old variable if it has the value that the webhook sets in
pods. Python 3.7 and above.
"""

import functools
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NEW_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
# The functions of jaxlib that read the fraction: the plugins' options, or before about 0.4.16 the client's creation.
_READING_FUNCTIONS = ("generate_pjrt_gpu_plugin_options", "make_gpu_client")


def after_import(module: "Any", share: "Any") -> None:
    """Wrap the functions of jaxlib.xla_client that read the fraction."""
    for name in _READING_FUNCTIONS:
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _with_fraction(original, share))


def _with_fraction(original: "Any", share: "Any") -> "Any":
    @functools.wraps(original)
    def read_with_fraction(*arguments: "Any", **named: "Any") -> "Any":
        old_text, new_text = os.environ.get(_OLD_VARIABLE), os.environ.get(_NEW_VARIABLE)
        if not old_text and not new_text:
            os.environ[_OLD_VARIABLE] = share.text
        elif new_text and old_text == share.text:
            del os.environ[_OLD_VARIABLE]
        try:
            return original(*arguments, **named)
        finally:
            if old_text is None:
                os.environ.pop(_OLD_VARIABLE, None)
            else:
                os.environ[_OLD_VARIABLE] = old_text

    return read_with_fraction
