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
"""
