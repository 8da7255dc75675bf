"""A container's GPU share, and the hook that makes Python frameworks keep to it.

Input: a container's environment and the share agent's file. Output: the share as a value, and memory limits for
the frameworks.

These files are mounted into users' images and run there with the image's Python. So they import the standard library
only, nothing else of Cardwise, and keep to the syntax of Python 3.7.

    hook          the files that an image's Python finds by PYTHONPATH; no module of Cardwise imports them
    installation  writes these files into one folder of the node
    reading       reads a container's share from its environment and the share agent's file
"""

# Where the folder of `installation.install_files` is mounted, read-only; PYTHONPATH names it.
MOUNT = "/run/cardwise/python"

# The share agent's file, and the variable that overrides its path.
SHARE_FILE = "/run/cardwise/share/share.json"
ENV_SHARE_FILE = "CARDWISE_SHARE_FILE"

# "off", or a comma-separated list of the frameworks that the hook handles. Unset: all of them.
ENV_FRAMEWORKS = "CARDWISE_FRAMEWORKS"
FRAMEWORKS = ("tensorflow", "torch", "jax", "cupy", "onnxruntime")
