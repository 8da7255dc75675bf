"""The GPUs of a node behind one protocol, with two implementations: NVML and a YAML file.

Input: the driver or the file, and the state files of the MPS manager. Output: the cards, their health, and whether a
container may start on a card with MPS.

The modules:

    protocol   `Gpus`: the cards and their health
    nvml       the cards of NVIDIA's driver; `calls`: a thread for each driver call, since a call may never return
    simulated  the cards of a YAML file
    faults     the faults of cards and when each ends; `xids`: what an Xid error of the driver means
    selection  the cards that an administrator lets Cardwise share (`--gpus`)
    mpsfiles   whether a container may start on a card with MPS, read from the manager's files
    usagereport  what containers have used in the last hours, from the manager

Public seam: `Gpus`. The device plugin and the MPS manager know the cards only by this interface. Example, the cards of
a YAML file:

    >>> from cardwise.gpus.simulated import SimulatedGpus
    >>> path = folder / "cards.yaml"
    >>> _ = path.write_text("cards: [{index: 0, uuid: GPU-1, model: T4, memoryMiB: 15360, healthy: false}]")
    >>> gpus = SimulatedGpus(path)
    >>> [(card.model, card.memory, gpus.health()[card.uuid].healthy) for card in gpus.cards()]
    [('T4', 15360, False)]
"""
