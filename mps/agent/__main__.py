"""The command `cardwise-agent`. The command imports few modules, since each startup probe is a new process."""

import os
import sys
from typing import Final

from cardwise.core.api import shareagent

USAGE: Final = f"""Usage: cardwise-agent [--probe]

The share agent of a pod, injected by Cardwise's webhook (docs/reference/agent.md). Writes {shareagent.SHARE_FILE} for
each container, serves it on a socket beside the file, and delays the pod's containers until MPS is ready on its GPUs.

  --probe    Check for up to five seconds whether the pod's containers may start: exit status 0 or 1. For the startup
             probe.

Environment:
  {shareagent.ASSIGNMENT_ENV}          the pod's assignment; written by the device plugin
  {shareagent.WAIT_ENV}            Ready: wait for MPS; written by the device plugin
  {shareagent.HOOK_ENV}          anything: install the frameworks' hook for the pod's containers; written by the webhook
  {shareagent.FOLDER_ENV}        where to write [{shareagent.FOLDER}]
  {shareagent.MPS_ROOT_ENV}      where the node's MPS folders are mounted [{shareagent.MPS_ROOT}]
"""


def main() -> None:
    """Run the command."""
    match sys.argv[1:]:
        case []:
            # The agent needs SHA-256 only once, for the name of a folder. Without `_hashlib`, hashlib does not load
            # OpenSSL, which saves 4 MiB.
            sys.modules["_hashlib"] = None  # type: ignore[assignment]
            from mps.agent import running  # noqa: PLC0415 - a probe does not need it

            running.run(os.environ)
        case ["--probe"]:
            from mps.agent import probe  # noqa: PLC0415 - the agent does not need it

            sys.exit(probe.wait_ready(os.environ))
        case ["--help" | "-h"]:
            sys.stdout.write(USAGE)
        case _:
            sys.stderr.write(USAGE)
            sys.exit(2)


if __name__ == "__main__":
    main()
