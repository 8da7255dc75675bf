"""The ports that test clusters draw."""

import json
import random
import subprocess
import sys

from tests.cluster import ports

HOLDER = (
    "import random, sys; from tests.cluster import ports; random.seed(7); print(ports.free(3), flush=True); input()"
)


def test_no_port_is_given_twice_also_by_another_process():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = other.stdout.readline()
        state = random.getstate()
        try:
            random.seed(7)
            ours = ports.free(3)
            random.seed(7)
            again = ports.free(3)
        finally:
            random.setstate(state)
        other.communicate("\n")
    assert len({*json.loads(theirs), *ours, *again}) == 9
