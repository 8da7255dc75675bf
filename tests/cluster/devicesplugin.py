"""The device plugin of a node that has the devices of a folder: `python devicesplugin.py FOLDER OPTION...`."""

import sys
from pathlib import Path

from deviceplugin import __main__ as command

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    command.SYSFS, command.DEV = folder / "sys", folder / "dev"
    command.main()
