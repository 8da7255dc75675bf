"""The share agent's settings from the environment, and the files for containers. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cardwise.core.api import assignment as codec
from cardwise.core.api import names, shareagent
from cardwise.core.api.assignment import CardShare, per_card_limit
from cardwise.core.api.mps import MpsState
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.core.values.wording import quote_text

MPS = "mps"
ADVISORY = "advisory"
UNKNOWN_ENFORCEMENT = ""
_KEY = re.compile(r"(init-)?\d{1,4}")  # a container key, which is also the name of a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of the agent.

    shares: the pod's shares by container key.
    waits: whether the pod's containers wait for MPS before they start.
    """

    shares: Mapping[str, tuple[CardShare, ...]]
    waits: bool

    def min_ceilings_by_card(self) -> dict[str, MiB]:
        """The largest container limit on each card, by UUID. The card's MPS daemon has to allow this limit."""
        ceilings: dict[str, MiB] = {}
        for share in (share for shares in self.shares.values() for share in shares):
            ceilings[share.uuid] = max(ceilings.get(share.uuid, MiB(0)), share.mem)
        return ceilings


def parse_settings(environ: Mapping[str, str]) -> AgentSettings:
    """Parse the agent's environment. Raises InvalidRequest."""
    remedy = (
        "the device plugin writes this variable with CDI, and the webhook with the downward API; run the agent only in "
        "pods that they have prepared"
    )
    try:
        assignment = codec.decode({names.ASSIGNMENT: environ.get(shareagent.ASSIGNMENT_ENV, "")})
    except codec.InvalidAssignment as error:
        raise InvalidRequest(shareagent.ASSIGNMENT_ENV, str(error), remedy) from error
    shares = assignment.containers if assignment else {}
    if not shares or not all(map(_KEY.fullmatch, shares)):
        raise InvalidRequest(
            shareagent.ASSIGNMENT_ENV, f"it names shares of these containers: {', '.join(shares) or 'none'}", remedy
        )
    required_state = environ.get(shareagent.WAIT_ENV, "")
    if required_state not in ("", MpsState.READY):
        raise InvalidRequest(
            shareagent.WAIT_ENV,
            f"{quote_text(required_state)} is not a state to wait for",
            f"write {MpsState.READY}, or leave it empty",
        )
    return AgentSettings(shares=shares, waits=bool(required_state))


def find_enforcement(shares: tuple[CardShare, ...], states: Mapping[str, MpsState], *, waits: bool) -> str:
    """Determine how the container's memory limit is enforced: MPS, ADVISORY or UNKNOWN.

    states: the MPS state of each card, by UUID.
    waits: as in AgentSettings.

    The limit stays enforced while the daemon is unhealthy: the container was started with the limit, and cannot bypass
    MPS.
    """
    if not waits or len(shares) > 1:
        return ADVISORY
    state = states.get(shares[0].uuid)
    if state is None:
        return UNKNOWN_ENFORCEMENT
    return ADVISORY if state in (MpsState.OFF, MpsState.UNAVAILABLE) else MPS


def build_document(shares: tuple[CardShare, ...], enforced_by: str) -> str:
    """Build the content of a container's share.json. With several cards, `card` and `uuid` are lists."""
    limit, limit_fraction = per_card_limit(shares)
    cards, uuids = [share.index for share in shares], [share.uuid for share in shares]
    has_several_cards = len(shares) > 1
    return json.dumps(
        {
            "card": cards if has_several_cards else cards[0],
            "uuid": uuids if has_several_cards else uuids[0],
            "limitMiB": limit,
            "totalMiB": shares[0].total,
            "fraction": float(limit_fraction),
            "enforced": enforced_by,
        }
    )
