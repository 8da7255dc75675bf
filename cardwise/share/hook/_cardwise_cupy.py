"""CuPy: the limit of its memory pools, in bytes, by the variable that it reads when it makes one.

A program's own set_limit comes later and wins. Python 3.7 and above.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def before(share: "Any") -> None:
    """Set it where nobody has."""
    os.environ.setdefault("CUPY_GPU_MEMORY_LIMIT", str(share.limit_bytes))
