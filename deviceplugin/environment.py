"""The environment of a container with a share: one table, for the CDI spec.

Apart so that it can be read in one look. Values come from the grant alone, so that a container is restarted with the
same ones while the API server is away.
"""

from cardwise.core import names
from cardwise.core.assignment import per_card_limit
from cardwise.core.quantity import MiB
from deviceplugin.grants import Grant

_BYTES = 1024 * 1024


def of(grant: Grant) -> dict[str, str]:
    """What Cardwise owns in the container. XLA_*_MEM_FRACTION is not here: a pod may set it itself."""
    shares = tuple(share.to_core() for share in grant.shares)
    limit, part = per_card_limit(shares)
    return {
        names.IDX: ",".join(map(str, grant.indices)),
        names.POD_MEM: str(grant.pod_mem),
        names.CONTAINER_MEM: str(MiB(sum(share.mem for share in shares))),
        names.DEV_MEM: str(shares[0].total),
        # The devices come by CDI; this keeps NVIDIA's own runtime, where it is the default, from adding others.
        names.ENV_VISIBLE_DEVICES: "void",
        names.ENV_DEVICE_ORDER: names.ENV_PCI_BUS_ID,
        names.ENV_LIMIT_MIB: str(limit),
        names.ENV_FRACTION: part,
        names.ENV_CUPY_LIMIT: str(limit * _BYTES),
    }
