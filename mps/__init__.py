"""The MPS node manager: one daemon per card (or node), its limits, its health, and its end."""
