"""How the interpreter of a part that serves is set: turns of threads, garbage collection, open files. In one place."""

import gc
import resource
import sys
from typing import Final

# Seconds for which a thread may keep another from running. After each system call the thread that reads calls waits for
# the interpreter, which others keep while they collect metrics or answer a large review: with the default, 5 ms,
# strangers who scrape kept a probe waiting for seconds, and a small review was read after nearly all of 60 large ones
# (docs/design/0012-speed.md).
_SWITCH_SECONDS: Final = 0.001

# Objects after which the garbage collector looks at the youngest, and how often it then looks at older ones. It runs
# within one call, whatever thread that is in, and no other thread runs meanwhile. By Python's own numbers (700, 10, 10)
# it looked some 260 times at what one list of 20,000 entries had made so far.
_COLLECT_AFTER: Final = (20_000, 20, 50)

# Open files. Not all that the machine allows, which may be 10^9: programs that a part starts inherit it, and some close
# each number below it at their start.
_FILES: Final = 65_536


def tune_interpreter() -> None:
    """Tune the process that serves. Call it when all is loaded, before the first thread begins.

    A shorter switch interval that a part has chosen stays. Raises OSError where the files cannot be allowed.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    # What was loaded until now stays. Each full collection would walk through all of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    # For more connections than a process has files by default in some places: 1,024 with containerd from 2.1 on.
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft_limit, min(hard_limit, _FILES)), hard_limit))
