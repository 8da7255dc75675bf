"""The extender stanzas of a KubeSchedulerConfiguration.

There are two stanzas, because the timeouts differ. Filter, prioritize and preempt take milliseconds and have a short
timeout: a hung extender must not stall kube-scheduler. Bind may take long. kube-scheduler allows each resource in one
stanza only.
"""

from typing import Any

from cardwise.core.api import names

# Of filter, prioritize and preempt, which take milliseconds. With a hung extender, kube-scheduler waits this long for
# each GPU pod that it tries to schedule.
FAST_TIMEOUT = "1s"
BIND_TIMEOUT = "300s"
# The scores of kube-scheduler's own plugins sum to at most about 1,500 points; the extender's reach 100 x 10 x 10.
SCORE_WEIGHT = 100


def extender_stanzas(
    *,
    filter_url: str,
    bind_url: str,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
) -> list[dict[str, Any]]:
    """The stanzas for `extenders:`.

    filter_url, bind_url: `https://host:port`; without certificate files, `http://` on loopback.
    """

    def common_fields() -> dict[str, Any]:
        stanza: dict[str, Any] = {"nodeCacheCapable": True, "ignorable": False}
        if ca_file is not None:
            tls = {"insecure": False, "caFile": ca_file, "certFile": cert_file, "keyFile": key_file}
            stanza |= {"enableHTTPS": True, "tlsConfig": tls}
        return stanza

    fast = common_fields() | {
        "urlPrefix": filter_url + names.EXTENDER_PREFIX,
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "preemptVerb": "preempt",
        "weight": SCORE_WEIGHT,
        "httpTimeout": FAST_TIMEOUT,
        "managedResources": [
            {"name": names.GPU_MEM, "ignoredByScheduler": False},
            {"name": names.WHOLE_GPU, "ignoredByScheduler": False},
            {"name": names.FILTER_CALL_RESOURCE, "ignoredByScheduler": True},
        ],
    }
    slow = common_fields() | {
        "urlPrefix": bind_url + names.EXTENDER_PREFIX,
        "bindVerb": "bind",
        "httpTimeout": BIND_TIMEOUT,
        "managedResources": [
            {"name": names.SHARE, "ignoredByScheduler": False},
            {"name": names.BIND_CALL_RESOURCE, "ignoredByScheduler": True},
        ],
    }
    return [fast, slow]
