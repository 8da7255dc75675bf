"""The agent's metrics in Prometheus' text format: what was granted, and whether MPS answers. Pure.

What the pod uses is not among them: NVML tells that to privileged processes only, so the node manager exports it.
"""

from collections.abc import Iterable, Mapping

from cardwise.core.api.assignment import CardShare, fraction
from cardwise.gpus.mpsnode import CardLook
from mps.agent.podshares import Told

_BYTES = 1024 * 1024


def text(told: Told, enforced: Mapping[str, str], looks: Mapping[str, CardLook], *, ready: bool) -> str:
    """`enforced` by container key, `looks` by card."""
    shares = [(_labels(key, share), share) for key, shares in told.shares.items() for share in shares]
    limits = ((labels, share.mem * _BYTES) for labels, share in shares)
    totals = ((labels, share.total * _BYTES) for labels, share in shares)
    parts = ((labels, fraction(share.mem, share.total)) for labels, share in shares)
    cores = ((labels, share.core) for labels, share in shares if share.core)
    by = (({"key": key, "by": who or "unknown"}, 1) for key, who in enforced.items())
    usable = (({"uuid": uuid}, int(not look.problem)) for uuid, look in looks.items())
    return "".join(
        (
            _family("cardwise_share_limit_bytes", "Memory that the container may use on the card", limits),
            _family("cardwise_share_card_bytes", "Memory of the whole card", totals),
            _family("cardwise_share_fraction", "The limit as a part of the card", parts),
            _family("cardwise_share_core_percent", "Percent of the card's SMs, where there is a limit", cores),
            _family("cardwise_share_enforced", "1, with what makes the container keep to its limit", by),
            _family("cardwise_share_mps_usable", "1 while the card's MPS takes containers of this pod", usable),
            _family("cardwise_agent_ready", "1 once the pod's containers may start", [({}, int(ready))]),
        )
    )


def _labels(key: str, share: CardShare) -> dict[str, str]:
    return {"key": key, "card": str(share.index), "uuid": share.uuid}


def _family(name: str, what: str, samples: Iterable[tuple[Mapping[str, str], object]]) -> str:
    lines = [f"{name}{_written(labels)} {value}\n" for labels, value in samples]
    return "".join([f"# HELP {name} {what}\n", f"# TYPE {name} gauge\n", *lines]) if lines else ""


def _written(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
