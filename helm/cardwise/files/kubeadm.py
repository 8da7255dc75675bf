"""Makes the kube-scheduler of a kubeadm control plane node ask the extender, and undoes that: scheduler.mode=kubeadm.

Runs on each such node. The manifest of the static pod is changed only where it must be, its former text is kept beside
our configuration, and where the kubelet does not bring the changed scheduler up, the former text is put back.

Each configuration lies with its TLS files in a folder named by their content, and the manifest names that folder. So a
manifest that is put back, or left by a Job that was killed, still has what it was written for, and whatever is new in
any of these files makes another manifest, which is what the kubelet starts a scheduler anew for.
"""

import argparse
import base64
import copy
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cardwise.core.api import schedulerconfig
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

Json = dict[str, Any]

MANIFEST = "kube-scheduler.yaml"
BACKUP = "kube-scheduler.yaml.before"
CONFIGURATION = "scheduler-config.yaml"
FORMER = "cardwise-former-config"  # annotation of the static pod: the --config that it had
PLACE = "wired-"  # how our folders begin; the rest beside them may be somebody's
VOLUME = "cardwise"
TLS_FILES = ("ca.crt", "client.crt", "client.key")
FLAG = "--config="
UP_SECONDS = 90  # for a kube-scheduler to come up
MADE_SECONDS = 120  # for the extender to make its Secret


class Refused(Exception):
    """Nothing was changed, or all was changed back; the text says why and what to do."""


def command_of(pod: Json) -> list[str]:
    """The command line of the scheduler. Raises Refused."""
    for container in pod.get("spec", {}).get("containers", ()):
        words = container.get("command") or []
        if words and words[0].endswith("kube-scheduler"):
            return list(words)
    raise Refused(f"{MANIFEST} has no container that runs kube-scheduler; write scheduler.mode=manual and edit it")


def flag(words: list[str], name: str) -> str:
    """The value of `--name=value`, "" where it is not there."""
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), "")


def edited(pod: Json, folder: str, config: str) -> Json:
    """The manifest with our configuration `config`, a path below `folder`. A fixed point. Raises Refused."""
    words = command_of(pod)
    ours = f"{FLAG}{config}"
    if ours in words:
        return pod
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"].setdefault("annotations", {})
    mounted = FORMER in annotations
    annotations.setdefault(FORMER, flag(words, "config"))
    spec = pod["spec"]
    for container in spec["containers"]:
        if (container.get("command") or [""])[0].endswith("kube-scheduler"):
            container["command"] = [word for word in words if not word.startswith(FLAG)] + [ours]
            if not mounted:
                mount = {"name": VOLUME, "mountPath": folder, "readOnly": True}
                container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    if not mounted:
        volume = {"name": VOLUME, "hostPath": {"path": folder, "type": "Directory"}}
        spec["volumes"] = [*(spec.get("volumes") or ()), volume]
    return pod


def undone(pod: Json) -> Json:
    """The manifest without what `edited` has put there; all else stays as it is now."""
    annotations = pod["metadata"].get("annotations") or {}
    if FORMER not in annotations:
        return pod
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"]["annotations"]
    former = annotations.pop(FORMER)
    if not annotations:
        del pod["metadata"]["annotations"]
    spec = pod["spec"]
    spec["volumes"] = [volume for volume in spec.get("volumes") or () if volume["name"] != VOLUME]
    for container in spec["containers"]:
        mounts = container.get("volumeMounts") or []
        if any(mount["name"] == VOLUME for mount in mounts):
            container["volumeMounts"] = [mount for mount in mounts if mount["name"] != VOLUME]
            kept = [word for word in container["command"] if not word.startswith(FLAG)]
            container["command"] = [*kept, f"{FLAG}{former}"] if former else kept
    return pod


def configuration(before: Json | None, words: list[str], stanzas: list[Json]) -> Json:
    """What the scheduler is told: as `before`, or as its flags say, and to ask the extender. Raises Refused."""
    if before is None:
        kubeconfig = flag(words, "kubeconfig")
        if not kubeconfig:
            raise Refused("kube-scheduler has neither --config nor --kubeconfig; write scheduler.mode=manual")
        before = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig},
            "leaderElection": {"leaderElect": flag(words, "leader-elect") != "false"},
        }
    others = [stanza for stanza in before.get("extenders") or () if not is_ours(stanza)]
    return {"percentageOfNodesToScore": 100, **before, "extenders": [*others, *stanzas]}


def is_ours(stanza: Json) -> bool:
    """Whether it is one of ours, or gpushare's, whose resources we manage."""
    ours = {
        resource["name"]
        for own_stanza in schedulerconfig.extender_stanzas(filter_url="", bind_url="")
        for resource in own_stanza["managedResources"]
    }
    return bool(ours & {resource["name"] for resource in stanza.get("managedResources") or ()})


def files_folder(manifest: Path) -> Path:
    """Where our files are: not among the manifests, since the kubelet runs whatever lies there."""
    return manifest.parent.parent / "cardwise"


def replace(path: Path, text: str, scratch: Path, mode: int = 0o600) -> None:
    """In one step; the kubelet would read a half-written manifest."""
    temporary = scratch / f".{path.name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


def wire(client: KubeClient, arguments: argparse.Namespace) -> None:
    """Raises Refused."""
    path = Path(arguments.manifests) / MANIFEST
    folder = files_folder(path)
    if not path.is_file():
        raise Refused(
            f"{path} is not there: write scheduler.mode=own where kubeadm did not make the control plane, or "
            "scheduler.manifestsDir, if the manifests lie elsewhere"
        )
    text = path.read_text()
    pod: Json = yaml.safe_load(text)
    words = command_of(pod)
    address, files = read_extender(client, arguments)
    former = (pod["metadata"].get("annotations") or {}).get(FORMER)
    source = flag(words, "config") if former is None else former
    if source and not Path(source).is_file():
        raise Refused(f"--config={source} of kube-scheduler cannot be read from here; write scheduler.mode=manual")
    before = yaml.safe_load(Path(source).read_text()) if source else None

    def render(place: Path) -> str:
        return yaml.safe_dump(configuration(before, words, stanzas(address, place)), sort_keys=False)

    place = folder / (PLACE + digest([render(folder), *files.values()]))
    after = edited(pod, str(folder), str(place / CONFIGURATION))
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (files | {CONFIGURATION: render(place)}).items():
        replace(place / name, content, folder)
    if after == pod:
        print_now(f"{path} asks the extender already; kube-scheduler has {UP_SECONDS} s to be up with it")
        if not waited(lambda: not startup_problem(client, arguments.node, words), UP_SECONDS):
            state = startup_problem(client, arguments.node, words)
            raise Refused(
                f"{path} asks the extender already, but kube-scheduler is not up with it: {state}; see its log"
            )
        tidy(folder, place)
        print("it is up")
        return
    if former is None:
        replace(folder / BACKUP, text, folder)
    exchange(client, arguments.node, path, text, after)
    tidy(folder, place)
    print(f"{path} asks the extender at {address} now; the former one is {folder / BACKUP}")


def stanzas(address: str, place: Path) -> list[Json]:
    """How to ask the extender, with the TLS files in `place`."""
    return schedulerconfig.extender_stanzas(
        filter_url=f"https://{address}:12345",
        bind_url=f"https://{address}:12346",
        ca_file=str(place / "ca.crt"),
        cert_file=str(place / "client.crt"),
        key_file=str(place / "client.key"),
    )


def digest(texts: list[str]) -> str:
    """For the name of a folder, by what lies in it."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def tidy(folder: Path, kept: Path | None) -> None:
    """Removes what no manifest names any more; only once a scheduler is up, as one that is put back needs its own."""
    for place in folder.glob(f"{PLACE}*"):
        if place != kept:
            shutil.rmtree(place)


def unwire(client: KubeClient, arguments: argparse.Namespace) -> None:
    """Raises Refused."""
    path = Path(arguments.manifests) / MANIFEST
    folder = files_folder(path)
    if not path.is_file():
        print(f"{path} is not there")
        return
    text = path.read_text()
    pod = yaml.safe_load(text)
    after = undone(pod)
    if after == pod:
        print(f"{path} does not ask the extender")
        return
    exchange(client, arguments.node, path, text, after)
    tidy(folder, None)
    print(f"{path} does not ask the extender any more")


def exchange(client: KubeClient, node: str, path: Path, before: str, pod: Json) -> None:
    """The manifest `pod` for the text `before`, and back where the scheduler does not come up. Raises Refused."""
    folder = files_folder(path)
    words, former = command_of(pod), command_of(yaml.safe_load(before))
    replace(path, yaml.safe_dump(pod, sort_keys=False), folder)
    print_now(f"{path} is changed; kube-scheduler has {UP_SECONDS} s to come up with it")
    if waited(lambda: not startup_problem(client, node, words), UP_SECONDS):
        return
    state = startup_problem(client, node, words)
    replace(path, before, folder)
    print_now(f"it did not ({state}); {path} is as before, and kube-scheduler has {UP_SECONDS} s to come up with that")
    if not waited(lambda: not startup_problem(client, node, former), UP_SECONDS):
        raise Refused(f"kube-scheduler of {node} did not come up, nor with its former manifest; look at its log")
    raise Refused(f"kube-scheduler of {node} did not come up with the changed manifest ({state}); it is as before")


def startup_problem(client: KubeClient, node: str, words: list[str]) -> str:
    """Why kube-scheduler is not up with this command line; "" where it is. Raises nothing: manifests must go back."""
    try:
        pod = client.get(paths.pods("kube-system", f"kube-scheduler-{node}"))
        if command_of(pod) != words:
            return "its pod is still that of another manifest"
    except errors.NotFound:
        return "it has no pod"
    except (errors.KubeError, Refused) as error:
        return str(error)
    conditions = pod.get("status", {}).get("conditions") or ()
    up = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return "" if up else "its pod is not ready"


def read_extender(client: KubeClient, arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Address of the extender's Service, and what it has made for kube-scheduler. Raises Refused."""
    service: Json = {}
    secret: Json = {}
    reason = ""

    def is_made() -> bool:
        nonlocal reason
        reason = "look at its pods"
        try:
            path = paths.namespaced("/api/v1", "services", arguments.namespace, "cardwise-extender")
            service.update(client.get(path))
            secret.update(client.get(paths.secrets(arguments.namespace, arguments.secret)).get("data") or {})
        except errors.NotFound:
            return False
        except errors.KubeError as error:  # an API server that is busy may answer the next time
            reason = f"the API server says: {error}"
            return False
        return all(name in secret for name in TLS_FILES)

    print_now(f"the extender has {MADE_SECONDS} s to make the Secret {arguments.secret}")
    if not waited(is_made, MADE_SECONDS):
        raise Refused(f"the extender has made no Secret {arguments.secret} in {MADE_SECONDS} s; {reason}")
    files = {name: base64.b64decode(secret[name]).decode() for name in TLS_FILES}
    return str(service["spec"]["clusterIP"]), files


def print_now(text: str) -> None:
    """At once: Helm may have given up by the time that the outcome is known, and the log is all that there is then."""
    print(text, flush=True)


def waited(ready: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(1)
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("wire", "unwire"))
    parser.add_argument("--node", required=True)
    parser.add_argument("--manifests", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--secret", required=True)
    arguments = parser.parse_args()
    client = KubeClient.load(None)
    try:
        {"wire": wire, "unwire": unwire}[arguments.action](client, arguments)
    except (Refused, errors.KubeError, OSError, yaml.YAMLError) as error:
        sys.exit(f"node {arguments.node}: {error}")


if __name__ == "__main__":
    main()
