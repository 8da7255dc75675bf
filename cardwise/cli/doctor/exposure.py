"""Checks that a pod that asks for no card gets none: tried on each node with cards, since only the node knows.

NVIDIA's runtime gives cards to a container whose environment asks for them, if a file on the node allows that. The
pod asks as an image does, by `CUDA_VERSION`, which alone means all cards, and lists the device nodes of cards that it
finds. It is tried with the node's default runtime, and with each RuntimeClass of NVIDIA's. A dry run in a user's
namespace says whether such a pod is admitted there. The pod itself runs in Cardwise's namespace, where no team's quota
counts it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cardwise.cli.doctor import probing
from cardwise.cli.doctor.facts import Facts, nvidia_runtimes
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

CHECK: Final = "runtime"
_POLICY: Final = f"runtimeclasses.{names.GROUP}"
_DEVICE_PLUGIN: Final = "cardwise-deviceplugin"
_SECONDS: Final = 60.0
_EVERY: Final = 0.5
_AT_ONCE: Final = 50  # pods
_FEW: Final = 5
_SHOWN: Final = 200  # bytes of a reason
_SETTING: Final = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_LOOKED: Final = "looked"
_SCRIPT: Final = (
    f"echo {_LOOKED} >/dev/termination-log; ls -d /dev/nvidia[0-9]* >>/dev/termination-log 2>/dev/null; exit 0"
)
_REMEDIES: Final = {
    "cdi": f"set {_SETTING} = false in config.toml of NVIDIA's container toolkit there, and deviceplugin.privileged of "
    "the chart: shares get their cards by CDI",
    "env": f"enable CDI in the container runtime there, then set {_SETTING} = false; until then make runc its default "
    "runtime",
}


def look(
    client: KubeClient, namespace: str, installed: str, seen: Facts, *, image: str = "", clock: Clock = SYSTEM
) -> Iterator[Finding]:
    """`namespace`: of the dry runs. `installed`: that of Cardwise. `image` has a shell; "": that of the device plugin,
    which the nodes have already.
    """
    access = {
        card["spec"]["node"]: (card.get("status") or {}).get("cardAccess") or "cdi"
        for card in seen.cards
        if card["spec"].get("memoryMiB")
    }
    nodes = [node for node in seen.nodes if node["metadata"]["name"] in access]
    image = image or _image(seen)
    if not nodes:
        return
    if not image:
        text = "whether pods that ask for no card get one was not tried: no image to look with is known"
        yield Finding(CHECK, Severity.NOTE, text, "name one with a shell, which the nodes can pull, by --probe-image")
        return
    for name, handler in [("", ""), *nvidia_runtimes(seen)]:  # the default, and NVIDIA's
        by = f"RuntimeClass {name}" if name else "the default runtime"
        served = [node["metadata"]["name"] for node in nodes if not name or _serves(node, handler)]
        if not served:
            continue
        try:
            client.create(paths.pods(namespace), _pod(image, name, served[0]), query={"dryRun": "All"})
        except errors.Unreachable:
            raise
        except errors.KubeError as error:
            yield _refused(by, error)
            continue
        found: dict[str, _Told] = {}
        for start in range(0, len(served), _AT_ONCE):
            pods = {node: _pod(image, name, node) for node in served[start : start + _AT_ONCE]}
            try:
                found |= _tried(client, installed, pods, clock)
            except errors.Forbidden as error:
                yield _refused(by, error)
                return
        listed = f"list {name} in policies.runtimeClasses of the chart; " if name else ""
        yield from _judged(by, found, access, listed)


def _image(seen: Facts) -> str:
    """The image of the device plugin; "" where it is not in Cardwise's namespace."""
    for daemonset in seen.daemonsets:
        if daemonset["metadata"]["name"] == _DEVICE_PLUGIN:
            return str(daemonset["spec"]["template"]["spec"]["containers"][0]["image"])
    return ""


def _serves(node: Json, handler: str) -> bool:
    """Where the kubelet does not tell its handlers, it may."""
    told = node.get("status", {}).get("runtimeHandlers") or ()
    return not told or any(one.get("name") == handler for one in told)


def _pod(image: str, runtime_class: str, node: str) -> Json:
    asking = {"CUDA_VERSION": "1.0", "NVIDIA_DISABLE_REQUIRE": "true"}
    container = {
        "name": "look",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", _SCRIPT],
        "env": [{"name": name, "value": value} for name, value in asking.items()],
    }
    return probing.pod_of(
        container,
        {names.DEFAULTS_OPT_OUT: "disabled"},
        nodeName=node,
        restartPolicy="Never",
        tolerations=[{"operator": "Exists"}],
        **({"runtimeClassName": runtime_class} if runtime_class else {}),
    )


def _refused(by: str, error: errors.KubeError) -> Finding:
    if _POLICY in error.message:
        return Finding(CHECK, Severity.OK, f"a pod that asks for no card may not name {by.removeprefix('the ')}")
    text = f"whether a pod that asks for no card gets one by {by} was not tried: {error.message}"
    return Finding(CHECK, Severity.NOTE, text, "name a namespace where you may create pods with -n")


@dataclass(frozen=True, slots=True)
class _Told:
    """What a pod has said; or why it has said nothing, as Kubernetes tells it, "" where that is not told."""

    said: str = ""
    why: str = ""

    @property
    def looked(self) -> bool:
        return self.said.startswith(_LOOKED)


def _tried(client: KubeClient, namespace: str, pods: Mapping[str, Json], clock: Clock) -> dict[str, _Told]:
    """What the pod of each node has told; the pods are deleted."""
    told: dict[str, _Told] = {}
    seen: dict[str, Json] = {}
    made = []
    try:
        for pod in pods.values():
            made.append(pod["metadata"]["name"])
            client.create(paths.pods(namespace), pod)
        deadline = clock.now() + _SECONDS
        while len(told) < len(pods) and clock.now() < deadline:
            for node, pod in pods.items():
                if node not in told:
                    seen[node] = client.get(paths.pods(namespace, pod["metadata"]["name"]))
                    said = _said(seen[node])
                    told |= {node: _Told(said, _why(seen[node]))} if said is not None else {}
            clock.sleep(_EVERY)
        return {node: told.get(node) or _Told(why=_why(seen.get(node, {}))) for node in pods}
    finally:
        for name in made:
            probing.delete(client, namespace, name, {"gracePeriodSeconds": 0})


def _said(pod: Json) -> str | None:
    """None while it has not ended."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    states = [one.get("state", {}).get("terminated") or {} for one in status.get("containerStatuses") or ()]
    return next((str(state.get("message") or "") for state in states), "")


def _why(pod: Json) -> str:
    """Why its container has not looked."""
    status = pod.get("status") or {}
    for one in status.get("containerStatuses") or ():
        state = one.get("state") or {}
        told = state.get("terminated") or state.get("waiting") or {}
        if told.get("reason"):
            message = f": {told['message']}" if told.get("message") else ""
            return wording.message(f"{told['reason']}{message}", _SHOWN)
    return wording.message(": ".join(filter(None, (status.get("reason"), status.get("message")))), _SHOWN)


def _judged(by: str, found: Mapping[str, _Told], access: Mapping[str, str], listed: str) -> Iterator[Finding]:
    cards = {node: [line for line in one.said.split() if line.startswith("/dev/")] for node, one in found.items()}
    for how, remedy in _REMEDIES.items():
        open_to_all = [
            f"{node} ({', '.join(there)})" for node, there in cards.items() if there and access.get(node, "cdi") == how
        ]
        if open_to_all:
            text = f"a pod that asks for no card gets cards by {by}: {wording.few(open_to_all, _FEW)}"
            yield Finding(CHECK, Severity.WARNING, text, listed + remedy)
    silent: dict[str, list[str]] = {}
    for node, one in found.items():
        if not one.looked:
            silent.setdefault(one.why, []).append(node)
    for why, nodes in silent.items():
        text = f"whether pods that ask for no card get one by {by} is not known of {wording.few(nodes, _FEW)}"
        said = f": of the pod that was to look Kubernetes says {why}" if why else ""
        remedy = "see whether pods start there; name an image with a shell, which they have, by --probe-image"
        yield Finding(CHECK, Severity.NOTE, text + said, remedy)
    closed = sum(one.looked and not cards[node] for node, one in found.items())
    if closed:
        text = f"a pod that asks for no card gets none by {by} on {wording.count(closed, 'node')}"
        yield Finding(CHECK, Severity.OK, text)
