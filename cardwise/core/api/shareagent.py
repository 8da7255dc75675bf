"""The contract of webhook, device plugin and share agent (docs/design/0007-share-agent.md): names and paths.

The agent is small and imports little else than this; the other names are in `names`.
"""

from typing import Final

CONTAINER: Final = "cardwise-agent"  # the sidecar's name, by which PreStart recognizes it
CHOICE: Final = "cardwise.dev/share-agent"  # annotation of a pod: always, mps, never
VOLUME: Final = "cardwise-share"

# Environment of the agent.
ASSIGNMENT_ENV: Final = "CARDWISE_ASSIGNMENT"  # the pod's assignment, in the annotation's format
WAIT_ENV: Final = "CARDWISE_MPS_WAIT"  # the state of MPS to wait for: Ready, or nothing
METRICS_PORT_ENV: Final = "CARDWISE_AGENT_METRICS_PORT"
HOOK_ENV: Final = "CARDWISE_AGENT_HOOK"  # any value: install the frameworks' hook at HOOK before the probe succeeds

# Paths in the agent's container. In those of the app, the folder of their key is mounted at FOLDER.
FOLDER: Final = "/run/cardwise/share"
MPS_ROOT: Final = "/run/cardwise/node/mps"  # the folders of the pod's cards, named as on the node
FILE: Final = "share.json"
SOCKET: Final = "agent.sock"
STARTED: Final = "started"  # exists after PreStart let the pod start; the pod's containers do not see it
HOOK: Final = "python"  # next to the folders of the containers

METRICS_PORT: Final = 19477

# Environment that moves the two folders, for tests and trials.
FOLDER_ENV: Final = "CARDWISE_AGENT_FOLDER"
MPS_ROOT_ENV: Final = "CARDWISE_AGENT_MPS_ROOT"
