"""Limits CuPy's memory pools, in bytes, by the variable that CuPy reads when it creates a pool.

A program's own call of set_limit comes later and takes precedence. Python 3.7 and above.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def before_import(share: "Any") -> None:
    """Set the variable unless it is set already."""
    os.environ.setdefault("CUPY_GPU_MEMORY_LIMIT", str(share.limit_bytes))
