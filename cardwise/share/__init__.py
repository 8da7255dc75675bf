"""What a container learns about its share, and the hook that makes Python frameworks keep to it.

Comes in: a container's environment and the share agent's file. Goes out: the share as a value, and
limits of memory for the frameworks.

These files are mounted into users' images and run there with their Python. So they import the standard library only,
nothing of Cardwise, and keep to the syntax of Python 3.7.

    hook     the files that an image's Python finds by PYTHONPATH; nothing here imports them
    laying   lays these files into one folder of the node
    reading  a container's share, from its environment and the share agent's file
"""

# Where the folder of `laying.lay_out` is mounted, read-only, and what PYTHONPATH names.
MOUNT = "/run/cardwise/python"

# What the share agent writes, and the variable that names another place.
SHARE_FILE = "/run/cardwise/share/share.json"
ENV_SHARE_FILE = "CARDWISE_SHARE_FILE"

# "off", or the frameworks that the hook handles, by comma; all of them where it is not set.
ENV_FRAMEWORKS = "CARDWISE_FRAMEWORKS"
FRAMEWORKS = ("tensorflow", "torch", "jax", "cupy", "onnxruntime")
