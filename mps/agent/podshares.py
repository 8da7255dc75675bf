"""The share agent's settings from the environment, and the agent's output: files for containers, and metrics. Pure."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cardwise.core.api import assignment as codec
from cardwise.core.api import names, shareagent
from cardwise.core.api.assignment import CardShare, fraction, per_card_limit
from cardwise.core.api.mps import MpsState
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.core.values.wording import quote_text
from cardwise.gpus.mpsfiles import CardReadiness

MPS = "mps"
ADVISORY = "advisory"
UNKNOWN_ENFORCEMENT = ""
_KEY = re.compile(r"(init-)?\d{1,4}")  # a container key, which is also the name of a folder
_PORTS = range(65536)
_BYTES_PER_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of the agent.

    shares: the pod's shares by container key.
    waits: whether the pod's containers wait for MPS before they start.
    port: the port of /metrics; 0 for none.
    """

    shares: Mapping[str, tuple[CardShare, ...]]
    waits: bool
    port: int

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
    port = environ.get(shareagent.METRICS_PORT_ENV) or "0"
    if not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        raise InvalidRequest(
            shareagent.METRICS_PORT_ENV, f"{quote_text(port)} is not a port", "write a number below 65536; 0: none"
        )
    return AgentSettings(shares=shares, waits=bool(required_state), port=int(port))


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


def format_metrics(
    settings: AgentSettings, enforced_by: Mapping[str, str], readiness: Mapping[str, CardReadiness], *, ready: bool
) -> str:
    """Format the agent's metrics in Prometheus' text format.

    enforced_by: how each container's limit is enforced, by container key.
    readiness: the readiness of each card, by UUID.
    ready: whether the pod's containers may start.

    The agent has no metric of the memory that the pod uses: NVML reports this to privileged processes only, so the MPS
    manager exports that metric.
    """
    labelled_shares = [
        (_share_labels(key, share), share) for key, shares in settings.shares.items() for share in shares
    ]
    limits = ((labels, share.mem * _BYTES_PER_MIB) for labels, share in labelled_shares)
    totals = ((labels, share.total * _BYTES_PER_MIB) for labels, share in labelled_shares)
    fractions = ((labels, fraction(share.mem, share.total)) for labels, share in labelled_shares)
    cores = ((labels, share.core) for labels, share in labelled_shares if share.core)
    enforcers = (({"key": key, "by": enforcer or "unknown"}, 1) for key, enforcer in enforced_by.items())
    usable = (({"uuid": uuid}, int(not card_readiness.reason)) for uuid, card_readiness in readiness.items())
    return "".join(
        line
        for family in (
            _format_family("cardwise_share_limit_bytes", "Memory that the container may use on the GPU", limits),
            _format_family("cardwise_share_gpu_bytes", "Memory of the whole GPU", totals),
            _format_family(
                "cardwise_share_fraction", "Part of the GPU's memory that the container may use (0 to 1)", fractions
            ),
            _format_family("cardwise_share_core_percent", "Percent of the GPU's SMs, where there is a limit", cores),
            _format_family(
                "cardwise_share_enforced", "Always 1; the label 'by' tells how the limit is enforced", enforcers
            ),
            _format_family("cardwise_share_mps_usable", "1 while MPS on the GPU accepts this pod's containers", usable),
            _format_family("cardwise_agent_ready", "1 once the pod's containers may start", [({}, int(ready))]),
        )
        for line in family
    )


def _share_labels(key: str, share: CardShare) -> dict[str, str]:
    return {"key": key, "index": str(share.index), "uuid": share.uuid}


def _format_family(name: str, help_text: str, samples: Iterable[tuple[Mapping[str, str], object]]) -> list[str]:
    """The lines of a metric; none without samples."""
    lines = [f"{_format_series(name, labels)} {text}\n" for labels, text in samples]
    return [f"# HELP {name} {help_text}\n", f"# TYPE {name} gauge\n", *lines] if lines else []


def _format_series(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{name}{{{pairs}}}" if pairs else name


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
