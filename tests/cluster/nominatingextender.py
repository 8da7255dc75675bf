"""The extender that nominates pods in clusters of more than NODES nodes.

`python -m tests.cluster.nominatingextender NODES OPTION...`
"""

import sys

from extender import __main__ as command
from extender.nomination import nominator

if __name__ == "__main__":
    nominator.MIN_NODES = int(sys.argv.pop(1))
    command.main()
