"""The physical cards of a node, behind one seam with two implementations: NVML and a YAML file."""
