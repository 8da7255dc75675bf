"""Print the GPU share of this container: `python -m cardwise.share`."""

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

The share is read from the environment (CARDWISE_MEM_LIMIT_MIB, CARDWISE_MEM_FRACTION, ALIYUN_COM_GPU_MEM_DEV,
ALIYUN_COM_GPU_MEM_IDX). Variables that are not set are read from the share agent's file:
/run/cardwise/share/share.json, or the file that CARDWISE_SHARE_FILE names.

  eval "$(python -m cardwise.share -o env)"     set the variables in a shell that was started without them
"""


def format_table(share: reading.Share) -> str:
    """The share as a table for people, with units."""
    has_several_cards = "," in share.card
    amount = f"{share.limit_mib} MiB ({share.limit_mib / 1024:.2f} GiB)"
    total = f" of {share.total_mib} MiB" if share.total_mib is not None else ""
    rows = [
        ("cards" if has_several_cards else "card", " ".join(part for part in (share.card, share.uuid) if part)),
        ("memory", amount + total + (" on each GPU" if has_several_cards else "")),
        ("fraction", share.fraction),
        ("enforced", reading.ENFORCEMENTS[share.enforced]),
    ]
    return "".join(f"{name:<10} {text or 'unknown'}\n" for name, text in rows)


def format_share(share: reading.Share, output_format: str) -> str:
    """The share in one of the output formats of `-o`."""
    if output_format == "json":
        return json.dumps(share.as_json()) + "\n"
    if output_format == "env":
        return "".join(f"export {name}={shlex.quote(setting)}\n" for name, setting in share.as_env().items())
    return format_table(share)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cardwise.share",
        description="Print the GPU share of this container: its memory on each GPU, and how the limit is enforced.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", choices=("text", "json", "env"), default="text", help="default: text")
    output_format = parser.parse_args(arguments).output
    try:
        share = reading.read(os.environ)
    except reading.NoShare as error:
        print(f"cardwise: {error}", file=sys.stderr)
        return 1
    except reading.UnreadableShare as error:
        print(f"cardwise: {error}", file=sys.stderr)
        return 3
    sys.stdout.write(format_share(share, output_format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
