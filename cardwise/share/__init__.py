"""A container's GPU share, and the hook that makes Python frameworks keep to it.

Input: a container's environment and the share agent's file. Output: the share as a value, and memory limits for the
frameworks.

Except `installation`, the files of this package are mounted into users' images and run there with the image's Python.
So they import only the standard library, nothing else of Cardwise, and use only the syntax of Python 3.7.

    hook          the files that an image's Python finds by PYTHONPATH; no module of Cardwise imports them
    installation  writes these files into one folder of the node
    reading       reads a container's share from its environment and the share agent's file
"""

# The path in the container at which the folder of `installation.install_files` is mounted read-only; PYTHONPATH has it.
MOUNT = "/run/cardwise/python"

# The path of the share agent's file, and the variable that overrides this path.
SHARE_FILE = "/run/cardwise/share/share.json"
ENV_SHARE_FILE = "CARDWISE_SHARE_FILE"

# A variable: "off", or a comma-separated list of the frameworks that the hook handles. Unset: all frameworks.
ENV_FRAMEWORKS = "CARDWISE_FRAMEWORKS"
FRAMEWORKS = ("tensorflow", "torch", "jax", "cupy", "onnxruntime")
