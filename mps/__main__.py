"""cardwise-mps: the MPS node manager's command, which does not exist yet.

Here so that the name is taken by an honest answer: shares are placed and delivered by the other parts, but until this
one is written, nothing on a node makes a process keep to its memory.
"""

import sys

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Cardwise's MPS node manager: not part of this release.

    It will run one NVIDIA MPS daemon for each shared card and set each container's limits there (issue 6). Until then
    the memory of a share is advisory: containers learn it from CARDWISE_MEM_LIMIT_MIB and CARDWISE_MEM_FRACTION.
    """
    click.echo("cardwise-mps: the MPS node manager is not part of this release (issue 6)", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
