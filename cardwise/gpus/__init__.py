"""The physical cards of a node, behind one protocol with two implementations: NVML and a YAML file.

The modules:

    protocol   what cards there are, and how they are
    nvml       cards of NVIDIA's driver
    simulated  cards of a YAML file
    faults     what is wrong with cards, and until when; `xids`: what an Xid error of the driver means
    chosen     the cards that an admin lets Cardwise share
    mpsnode    whether a card's MPS takes a container, by files of the node
"""
