"""The contract of webhook, device plugin and share agent (docs/design/0007-share-agent.md): names and paths.

A module of its own, because the share agent must import as little as possible; all other names are in `names`.
"""

from typing import Final

CONTAINER_NAME: Final = "cardwise-agent"  # the sidecar's name, by which the device plugin recognizes the sidecar
CHOICE_ANNOTATION: Final = "cardwise.dev/share-agent"  # annotation of a pod: always, mps, never
VOLUME_NAME: Final = "cardwise-share"

# Environment of the agent.
ASSIGNMENT_ENV: Final = "CARDWISE_ASSIGNMENT"  # the pod's assignment, in the annotation's format
WAIT_ENV: Final = "CARDWISE_MPS_WAIT"  # the state of MPS for which the agent waits: Ready, or "" for none
HOOK_ENV: Final = "CARDWISE_AGENT_HOOK"  # with any value, the agent installs the frameworks' hook before it is ready

# Paths in the agent's container. An app container has at FOLDER only the folder that is named by the container's key.
FOLDER: Final = "/run/cardwise/share"
MPS_ROOT: Final = "/run/cardwise/node/mps"  # the folders of the pod's cards, named as on the node
SHARE_FILE: Final = "share.json"
SOCKET_FILE: Final = "agent.sock"
STARTED_FILE: Final = "started"  # a file that exists once PreStart let the pod start; only the node sees the file
HOOK_FOLDER: Final = "python"  # next to the folders of the containers

# Environment variables that replace FOLDER and MPS_ROOT, for tests and trials.
FOLDER_ENV: Final = "CARDWISE_AGENT_FOLDER"
MPS_ROOT_ENV: Final = "CARDWISE_AGENT_MPS_ROOT"
