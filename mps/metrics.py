"""The metrics of the MPS manager. The label `card` is the GPU's UUID, or "node" for the daemon of a whole node."""

from prometheus_client import Counter, Gauge, Histogram

from cardwise.core.api.mps import MpsState
from mps.host.availability import Cause

UP = Gauge("cardwise_mps_up", "1 while the GPU's MPS is ready for containers", ["gpu"])
STATE = Gauge(
    "cardwise_mps_state",
    "1 for the GPU's state: Ready, Starting, Fault, Draining, Down, Off, Unavailable",
    ["gpu", "state"],
)
UNAVAILABLE = Gauge(
    "cardwise_mps_unavailable",
    "1 for the cause: program, driver, mig, plugin, daemon, pods; 0 for others",
    ["gpu", "cause"],
)
RECOVERIES = Counter("cardwise_mps_recoveries", "Times that the GPU's MPS became ready again after a failure", ["gpu"])
DAEMON_STARTS = Counter("cardwise_mps_daemon_starts", "Starts of a daemon", ["gpu"])
DAEMON_FAILURES = Counter("cardwise_mps_daemon_failures", "Unexpected ends of a daemon", ["gpu"])
SERVER_FAULTS = Counter("cardwise_mps_server_faults", "Faults that a client has caused on its GPU", ["gpu"])
SETTINGS_LOST = Counter("cardwise_mps_settings_lost", "Times that a daemon's settings were changed or lost", ["gpu"])
CLIENTS = Gauge("cardwise_mps_clients", "Clients of the GPU's MPS server", ["gpu"])
CEILING_BYTES = Gauge("cardwise_mps_ceiling_bytes", "Memory limit of one client on the GPU", ["gpu"])
CLIENTS_DETACHED = Counter(
    "cardwise_mps_clients_detached", "Clients that were detached, by reason: terminating, draining", ["gpu", "reason"]
)
PROBE_SECONDS = Histogram(
    "cardwise_mps_probe_seconds",
    "Time of a probe by outcome",
    ["outcome"],
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 3, 10),
)
USE_FAILURES = Counter(
    "cardwise_container_gpu_use_failures", "Samples of use that could not list the processes of the GPU", ["gpu"]
)
AUDIT_OPEN_VIOLATIONS = Gauge(
    "cardwise_mps_audit_open_violations",
    "Standing violations, by reason: MemoryOverrun, WrongGPU, MPSBypassed, GPUWithoutGrant, UnknownProcess",
    ["gpu", "reason"],
)
AUDIT_VIOLATIONS = Counter("cardwise_mps_audit_violations", "Violations that the audit reported", ["gpu", "reason"])
AUDIT_EVICTIONS = Counter(
    "cardwise_mps_audit_evictions", "Evictions by the audit, by outcome: evicted, budget, error, withheld", ["outcome"]
)
AUDIT_FAILURES = Counter("cardwise_mps_audit_failures", "Audits that could not list the processes of the GPU", ["gpu"])
THREAD_FAILURES = Counter(
    "cardwise_mps_thread_failures", "Unexpected errors in a thread, which continued; see the log", ["thread"]
)


def set_unavailable(card: str, cause: Cause | None) -> None:
    """Set the gauges to the cause of MPS's unavailability on a card; None if MPS is available.

    card: its UUID, or "node".
    """
    for other_cause in Cause:
        UNAVAILABLE.labels(card, other_cause).set(1 if other_cause is cause else 0)


def set_state(card: str, state: MpsState) -> None:
    """Set the gauges to the present MPS state of a card.

    card: its UUID, or "node".
    """
    UP.labels(card).set(1 if state is MpsState.READY else 0)
    for other_state in MpsState:
        STATE.labels(card, other_state).set(1 if other_state is state else 0)
