"""The environment of a container with a share, for its CDI spec.

The variables depend only on the grant and this node. So a container restarts with the same variables even while the API
server is down.
"""

from collections import defaultdict
from collections.abc import Sequence

from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import CardShare, per_card_limit
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from cardwise.devices.protocol import OtherDevice
from deviceplugin.grants.grants import Grant

_BYTES_PER_MIB = 1024 * 1024


def container_env(grant: Grant, devices: Sequence[OtherDevice] = ()) -> dict[str, str]:
    """The variables that Cardwise owns in the container.

    devices: the devices of the grant, in its order.

    Leaves out XLA_*_MEM_FRACTION, since the pod may set it.
    """
    return {
        # CDI adds the devices. This variable prevents NVIDIA's runtime, where it is the default runtime, from adding
        # cards to the container.
        names.ENV_VISIBLE_DEVICES: names.NO_CARDS,
        **(_card_env(grant) if grant.shares else {}),
        **(_agent_env(grant) if grant.is_agent else {}),
        **_device_env(grant, devices),
    }


def _card_env(grant: Grant) -> dict[str, str]:
    shares = grant.shares
    limit, fraction = per_card_limit(shares)
    return {
        names.IDX: ",".join(map(str, grant.indices)),
        names.POD_MEM: str(grant.pod_mem),
        names.CONTAINER_MEM: str(MiB(sum(share.mem for share in shares))),
        names.DEV_MEM: str(shares[0].total),
        names.ENV_DEVICE_ORDER: names.ENV_PCI_BUS_ID,
        names.ENV_LIMIT_MIB: str(limit),
        names.ENV_FRACTION: fraction,
        names.ENV_CUPY_LIMIT: str(limit * _BYTES_PER_MIB),
        **(mps.container_environment([share.mem for share in shares], _sm_percent(grant, shares)) if grant.mps else {}),
    }


def _sm_percent(grant: Grant, shares: Sequence[CardShare]) -> int | None:
    """The percent of SMs that the container's processes may use: the lowest percent of its cards."""
    percentages = [mps.sm_percent(share.core, share.mem, share.total, grant.sm_percent) for share in shares]
    return min((percent for percent in percentages if percent is not None), default=None)


def _agent_env(grant: Grant) -> dict[str, str]:
    return {
        shareagent.ASSIGNMENT_ENV: codec.encode(grant.assignment(), assume_time_ns=0)[names.ASSIGNMENT],
        shareagent.WAIT_ENV: str(MpsState.READY) if grant.mps else "",
    }


def _device_env(grant: Grant, devices: Sequence[OtherDevice]) -> dict[str, str]:
    addresses: dict[str, list[str]] = defaultdict(list)
    for share, device in zip(grant.devices, devices, strict=True):
        if device.pci_address:
            addresses[share.resource_class].append(device.pci_address)
    env = {names.pci_devices_env(name): ",".join(class_addresses) for name, class_addresses in addresses.items()}
    rdma = [device.name for device in devices if device.name]
    return env | ({names.ENV_RDMA_DEVICES: ",".join(rdma)} if rdma else {})
