"""python -m cardwise.share: what share of a GPU has this container?"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from typing import Sequence

from cardwise.share import reading

_EPILOG = """\
exit status:
  0  the share was printed
  1  this container has no share
  2  wrong arguments
  3  the share cannot be read: the environment or the agent's file is damaged

read from the environment (CARDWISE_MEM_LIMIT_MIB, CARDWISE_MEM_FRACTION, ALIYUN_COM_GPU_MEM_DEV,
ALIYUN_COM_GPU_MEM_IDX), and what that lacks from the share agent's file: /run/cardwise/share/share.json, or the one
that CARDWISE_SHARE_FILE names.

  eval "$(python -m cardwise.share -o env)"     the variables, for a shell that was started without them
"""


def text(share: reading.Share) -> str:
    """For people: amounts with units."""
    several = "," in share.card
    amount = f"{share.limit_mib} MiB ({share.limit_mib / 1024:.2f} GiB)"
    total = f" of {share.total_mib} MiB" if share.total_mib is not None else ""
    rows = [
        ("cards" if several else "card", " ".join(part for part in (share.card, share.uuid) if part)),
        ("memory", amount + total + (" on each card" if several else "")),
        ("fraction", share.fraction),
        ("enforced", reading.ENFORCED[share.enforced]),
    ]
    return "".join(f"{name:<10} {value or 'not known here'}\n" for name, value in rows)


def printed(share: reading.Share, form: str) -> str:
    """The share in one of the forms of `-o`."""
    if form == "json":
        return json.dumps(share.as_json()) + "\n"
    if form == "env":
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in share.as_env().items())
    return text(share)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m cardwise.share",
        description="Print the share of a GPU that this container has: memory on each card, and who enforces it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", choices=("text", "json", "env"), default="text", help="default: text")
    form = parser.parse_args(arguments).output
    try:
        share = reading.read(os.environ)
    except reading.NoShare as nothing:
        print(f"cardwise: {nothing}", file=sys.stderr)
        return 1
    except reading.UnreadableShare as damage:
        print(f"cardwise: {damage}", file=sys.stderr)
        return 3
    sys.stdout.write(printed(share, form))
    return 0


if __name__ == "__main__":
    sys.exit(main())
