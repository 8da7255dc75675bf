"""Default values of the simulation's options. `--help` imports only this module, and not the simulation."""

from typing import Final

FIRST_SEED: Final = 42  # as in FGD's artefact
DEMAND: Final = 1.3  # requested cards as a multiple of all cards, as in FGD's artefact
LOAD: Final = 1.0  # mean demand of running pods as a multiple of all cards, with `churn`
LIFETIMES: Final = 3.0  # measured time of `churn`, in mean lifetimes of a pod
