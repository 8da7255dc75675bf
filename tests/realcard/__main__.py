"""A real card for some minutes, on a lent machine without a network, to which little travels at a time.

Here `pack` writes loads into .lent: our interpreter, and the programs of Kubernetes. There, from the root of the tree,
one call for each load that travels:

    python3 -m tests.realcard run .lent/1 --out "$OUT" --only tenants speed
    python3 -m tests.realcard run .lent/2 --out "$OUT" --only               (unpacks)
    python3 -m tests.realcard run .lent/3 --out "$OUT"                      (with the chart, and the rest)

$OUT has the results of each scenario as soon as it ends. No setting of the machine is changed. `rows` prints the rows
for docs/measured/gpu.md. With CARDWISE_GPU_DOUBLE=1 all of it runs on doubles.
"""

import argparse
import os
import sys
from pathlib import Path

from tests.realcard import packing


def main() -> int:
    options = parser().parse_args()
    return int(options.command(options) or 0)


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(
        "python -m tests.realcard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = described.add_subparsers(required=True, metavar="COMMAND")

    pack = verbs.add_parser("pack", help="here: pack what travels into .lent, after `make env` and `make binaries`")
    pack.set_defaults(command=pack_here)

    run = verbs.add_parser("run", help="there, by any Python: unpack the loads, run the scenarios, write the results")
    run.add_argument("loads", nargs="*", type=Path, help="loads that came with this call, such as .lent/1")
    run.add_argument("--out", type=Path, required=True, help="folder for results.json, results.md and log.txt")
    run.add_argument("--into", type=Path, default=Path("/tmp/cardwise-lent"), help="folder to unpack into")
    run.add_argument("--seconds", type=float, default=480.0, help="time for all scenarios")
    run.add_argument("--only", nargs="*", metavar="NAME", help="these scenarios; none: unpack only")
    run.set_defaults(command=run_there)

    rows = verbs.add_parser("rows", help="print results.json as tables for docs/measured/gpu.md")
    rows.add_argument("file", type=Path)
    rows.set_defaults(command=print_rows)
    return described


def pack_here(_options: argparse.Namespace) -> int:
    tree = packing.tree_size()
    try:
        loads = packing.pack(packing.ROOT / packing.FOLDER, packing.archives_of_this_machine(), tree)
    except packing.TooLarge as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the working tree, in each call: {tree // packing.MIB} MiB")
    for load in loads:
        for file in sorted(load.iterdir()):
            print(f"{file.relative_to(packing.ROOT)}: {file.stat().st_size // packing.MIB} MiB")
    return 0


def run_there(options: argparse.Namespace) -> int:
    """Starts itself again in the interpreter that travelled."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.loads:
        python = packing.unpack(options.loads, options.into.resolve())
        words = [word for word in sys.argv[1:] if word not in map(str, options.loads)]
        os.execv(python, [str(python), "-m", "tests.realcard", *words])
    from tests.realcard.scenarios import SCENARIOS, Run

    chosen = [scenario for scenario in SCENARIOS if options.only is None or scenario.name in options.only]
    return 0 if Run(options.out, options.seconds).run(chosen) else 1


def print_rows(options: argparse.Namespace) -> None:
    import json

    from tests.realcard import results

    print(results.tables(json.loads(options.file.read_text())), end="")


if __name__ == "__main__":
    sys.exit(main())
