"""Settings of the interpreter of a serving component: thread switches, garbage collection, open files."""

import gc
import resource
import sys
from typing import Final

# Seconds for which a thread may prevent another thread from running. After each system call the reading thread waits
# for the interpreter, which other threads use to collect metrics or to answer a large review. With the default of 5 ms,
# scrapes delayed a probe by seconds, and a small review was read only after nearly all of 60 large reviews.
_SWITCH_SECONDS: Final = 0.001

# Thresholds of the garbage collector, for `gc.set_threshold`. A collection stops all threads. With Python's defaults
# (700, 10, 10) there were about 260 collections while a list of 20,000 entries was built. The thread that collects may
# hold a lock, so the two younger generations are small: 5,000 and 50,000 new objects take 2 and 15 ms in a busy
# process. All objects are visited once in 20 million new ones.
_GC_THRESHOLDS: Final = (5_000, 10, 400)

# The limit of open files. Not the machine's maximum, which may be 10^9: programs that a component starts inherit the
# limit, and some of them close every descriptor below the limit when they start.
_MAX_OPEN_FILES: Final = 65_536


def tune_interpreter() -> None:
    """Tune the serving process. Call this when all modules are loaded, before the first thread starts.

    If a component has set a shorter switch interval, it stays. Raises OSError if the limit of open files cannot be set.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    # All present objects live until the process ends, so full collections need not visit them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    # The default limit of open files can be too low for the connections: 1,024 with containerd 2.1 and later.
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft_limit, min(hard_limit, _MAX_OPEN_FILES)), hard_limit))
