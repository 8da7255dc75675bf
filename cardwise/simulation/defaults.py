"""Default values of the simulation's options. A module of its own, so that `--help` imports nothing else of it."""

from typing import Final

FIRST_SEED: Final = 42  # as in FGD's artefact
TUNE: Final = 1.3  # times the cards that are asked for, there as well
LOAD: Final = 1.0  # times the cards, of pods that come and go
LIFETIMES: Final = 3.0  # how long that is measured
