"""The physical cards of a node, behind one protocol with two implementations: NVML and a YAML file.

Comes in: answers of the driver or the file, and files of the MPS manager. Goes out: cards, their health, and whether a
card's MPS takes a container.

The modules:

    protocol   what cards there are, and how they are
    nvml       cards of NVIDIA's driver; `calls`: each of its calls in a thread, since it may never return
    simulated  cards of a YAML file
    faults     what is wrong with cards, and until when; `xids`: what an Xid error of the driver means
    chosen     the cards that an admin lets Cardwise share
    mpsnode    whether a card's MPS takes a container, by files of the node
"""
