"""Configures the kube-scheduler of a kubeadm control plane node to call the extender, and undoes it.

The script of scheduler.mode=kubeadm. Runs on each control plane node. Changes only what it must in the manifest of the
static pod, and keeps the former manifest beside Cardwise's configuration. If the kubelet cannot start the changed
scheduler, the script restores the former manifest.

Each configuration is in a folder with its TLS files, named by a hash of their content, and the manifest names that
folder. So a manifest that is restored, or left by a Job that was killed, still has the files that it was written for.
And a change of any of these files changes the manifest, which makes the kubelet restart the scheduler.
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
FORMER = "cardwise-former-config"  # annotation of the static pod: its former --config
FOLDER_PREFIX = "wired-"  # of Cardwise's folders; other folders beside them may belong to the administrator
VOLUME = "cardwise"
TLS_FILES = ("ca.crt", "client.crt", "client.key")
FLAG = "--config="
READY_SECONDS = 90  # for a kube-scheduler to become ready
SECRET_SECONDS = 120  # for the extender to create its Secret


class Refused(Exception):
    """The manifest is unchanged, or restored. The text is the reason and the remedy."""


def scheduler_command(pod: Json) -> list[str]:
    """The command line of kube-scheduler in a pod. Raises Refused if no container runs it."""
    for container in pod.get("spec", {}).get("containers", ()):
        words = container.get("command") or []
        if words and words[0].endswith("kube-scheduler"):
            return list(words)
    raise Refused(f"{MANIFEST} has no container that runs kube-scheduler; write scheduler.mode=manual and edit it")


def flag_value(words: list[str], name: str) -> str:
    """The value of the flag `--name=value`; "" without the flag."""
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), "")


def wire_manifest(pod: Json, folder: str, config: str) -> Json:
    """The manifest with Cardwise's configuration. A wired manifest stays as it is. Raises Refused.

    folder: the folder of Cardwise's files, which is mounted.
    config: path of the configuration, below `folder`.
    """
    words = scheduler_command(pod)
    config_flag = f"{FLAG}{config}"
    if config_flag in words:
        return pod
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"].setdefault("annotations", {})
    mounted = FORMER in annotations
    annotations.setdefault(FORMER, flag_value(words, "config"))
    spec = pod["spec"]
    for container in spec["containers"]:
        if (container.get("command") or [""])[0].endswith("kube-scheduler"):
            container["command"] = [word for word in words if not word.startswith(FLAG)] + [config_flag]
            if not mounted:
                mount = {"name": VOLUME, "mountPath": folder, "readOnly": True}
                container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    if not mounted:
        volume = {"name": VOLUME, "hostPath": {"path": folder, "type": "Directory"}}
        spec["volumes"] = [*(spec.get("volumes") or ()), volume]
    return pod


def unwire_manifest(pod: Json) -> Json:
    """The manifest without the changes of `wire_manifest`; everything else stays."""
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
            other_words = [word for word in container["command"] if not word.startswith(FLAG)]
            container["command"] = [*other_words, f"{FLAG}{former}"] if former else other_words
    return pod


def build_configuration(before: Json | None, words: list[str], stanzas: list[Json]) -> Json:
    """The KubeSchedulerConfiguration with the extender. Raises Refused.

    before: the present configuration; None: kube-scheduler has flags only.
    words: the command line of kube-scheduler.
    stanzas: the extenders to add.
    """
    if before is None:
        kubeconfig = flag_value(words, "kubeconfig")
        if not kubeconfig:
            raise Refused("kube-scheduler has neither --config nor --kubeconfig; write scheduler.mode=manual")
        before = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig},
            "leaderElection": {"leaderElect": flag_value(words, "leader-elect") != "false"},
        }
    others = [stanza for stanza in before.get("extenders") or () if not is_own_extender(stanza)]
    return {"percentageOfNodesToScore": 100, **before, "extenders": [*others, *stanzas]}


def is_own_extender(stanza: Json) -> bool:
    """Whether the extender is Cardwise's, or gpushare's, whose resources Cardwise manages."""
    own_resources = {
        resource["name"]
        for own_stanza in schedulerconfig.extender_stanzas(filter_url="", bind_url="")
        for resource in own_stanza["managedResources"]
    }
    return bool(own_resources & {resource["name"] for resource in stanza.get("managedResources") or ()})


def files_folder(manifest: Path) -> Path:
    """The folder of Cardwise's files. Not the folder of the manifests: the kubelet runs every file there."""
    return manifest.parent.parent / "cardwise"


def replace_file(path: Path, text: str, scratch: Path, mode: int = 0o600) -> None:
    """Write a file atomically: the kubelet would read a half-written manifest.

    scratch: folder of the temporary file, on the same file system.
    """
    temporary = scratch / f".{path.name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


def wire_scheduler(client: KubeClient, arguments: argparse.Namespace) -> None:
    """Configure the node's kube-scheduler to call the extender, and wait until it is ready. Raises Refused."""
    path = Path(arguments.manifests) / MANIFEST
    folder = files_folder(path)
    if not path.is_file():
        raise Refused(
            f"{path} does not exist: write scheduler.mode=own if kubeadm did not set up the control plane, or "
            "scheduler.manifestsDir if the manifests are in another directory"
        )
    text = path.read_text()
    pod: Json = yaml.safe_load(text)
    words = scheduler_command(pod)
    address, files = read_extender(client, arguments)
    former = (pod["metadata"].get("annotations") or {}).get(FORMER)
    source = flag_value(words, "config") if former is None else former
    if source and not Path(source).is_file():
        raise Refused(f"--config={source} of kube-scheduler cannot be read from here; write scheduler.mode=manual")
    before = yaml.safe_load(Path(source).read_text()) if source else None

    def render(place: Path) -> str:
        return yaml.safe_dump(build_configuration(before, words, extender_stanzas(address, place)), sort_keys=False)

    place = folder / (FOLDER_PREFIX + hash_texts([render(folder), *files.values()]))
    after = wire_manifest(pod, str(folder), str(place / CONFIGURATION))
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (files | {CONFIGURATION: render(place)}).items():
        replace_file(place / name, content, folder)
    if after == pod:
        print_now(f"{path} already has the extender; waiting up to {READY_SECONDS} s until kube-scheduler is ready")
        if not wait_until(lambda: not startup_problem(client, arguments.node, words), READY_SECONDS):
            state = startup_problem(client, arguments.node, words)
            raise Refused(f"{path} already has the extender, but kube-scheduler is not ready: {state}; see its log")
        remove_stale_folders(folder, place)
        print("kube-scheduler is ready")
        return
    if former is None:
        replace_file(folder / BACKUP, text, folder)
    exchange_manifest(client, arguments.node, path, text, after)
    remove_stale_folders(folder, place)
    print(f"{path} now has the extender at {address}; the former manifest is {folder / BACKUP}")


def extender_stanzas(address: str, place: Path) -> list[Json]:
    """The `extenders` of a KubeSchedulerConfiguration.

    address: IP address of the extender's Service.
    place: folder of the TLS files.
    """
    return schedulerconfig.extender_stanzas(
        filter_url=f"https://{address}:12345",
        bind_url=f"https://{address}:12346",
        ca_file=str(place / "ca.crt"),
        cert_file=str(place / "client.crt"),
        key_file=str(place / "client.key"),
    )


def hash_texts(texts: list[str]) -> str:
    """A hash of files' contents, for the name of their folder."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def remove_stale_folders(folder: Path, current: Path | None) -> None:
    """Remove the other folders. Call it once the scheduler is ready: a restored manifest needs its own folder."""
    for place in folder.glob(f"{FOLDER_PREFIX}*"):
        if place != current:
            shutil.rmtree(place)


def unwire_scheduler(client: KubeClient, arguments: argparse.Namespace) -> None:
    """Remove the extender from the node's kube-scheduler, and wait until it is ready. Raises Refused."""
    path = Path(arguments.manifests) / MANIFEST
    folder = files_folder(path)
    if not path.is_file():
        print(f"{path} does not exist")
        return
    text = path.read_text()
    pod = yaml.safe_load(text)
    after = unwire_manifest(pod)
    if after == pod:
        print(f"{path} has no extender of Cardwise")
        return
    exchange_manifest(client, arguments.node, path, text, after)
    remove_stale_folders(folder, None)
    print(f"removed the extender from {path}")


def exchange_manifest(client: KubeClient, node: str, path: Path, before: str, pod: Json) -> None:
    """Write a manifest and wait until kube-scheduler is ready; else restore the former manifest and raise Refused.

    before: the text of the former manifest.
    pod: the new manifest.
    """
    folder = files_folder(path)
    words, former = scheduler_command(pod), scheduler_command(yaml.safe_load(before))
    replace_file(path, yaml.safe_dump(pod, sort_keys=False), folder)
    print_now(f"changed {path}; waiting up to {READY_SECONDS} s until kube-scheduler is ready")
    if wait_until(lambda: not startup_problem(client, node, words), READY_SECONDS):
        return
    state = startup_problem(client, node, words)
    replace_file(path, before, folder)
    print_now(
        f"kube-scheduler is not ready ({state}); restored {path}, waiting up to {READY_SECONDS} s until it is ready"
    )
    if not wait_until(lambda: not startup_problem(client, node, former), READY_SECONDS):
        raise Refused(f"kube-scheduler of {node} is not ready with its former manifest either; see its log")
    raise Refused(
        f"kube-scheduler of {node} was not ready with the changed manifest ({state}); restored the former one"
    )


def startup_problem(client: KubeClient, node: str, words: list[str]) -> str:
    """Why kube-scheduler is not ready with this command line; "" if it is. Never raises: manifests must be restored."""
    try:
        pod = client.get(paths.pods("kube-system", f"kube-scheduler-{node}"))
        if scheduler_command(pod) != words:
            return "its pod still runs with another manifest"
    except errors.NotFound:
        return "it has no pod"
    except (errors.KubeError, Refused) as error:
        return str(error)
    conditions = pod.get("status", {}).get("conditions") or ()
    up = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return "" if up else "its pod is not ready"


def read_extender(client: KubeClient, arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The address of the extender's Service, and the files of its Secret by name. Waits for both. Raises Refused."""
    service: Json = {}
    secret: Json = {}
    reason = ""

    def has_secret() -> bool:
        nonlocal reason
        reason = "check its pods"
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

    print_now(f"waiting up to {SECRET_SECONDS} s until the extender has created the Secret {arguments.secret}")
    if not wait_until(has_secret, SECRET_SECONDS):
        raise Refused(f"the extender has not created the Secret {arguments.secret} in {SECRET_SECONDS} s; {reason}")
    files = {name: base64.b64decode(secret[name]).decode() for name in TLS_FILES}
    return str(service["spec"]["clusterIP"]), files


def print_now(text: str) -> None:
    """Print without buffering: Helm may give up before the outcome is known, and then only this log is left."""
    print(text, flush=True)


def wait_until(is_ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds. Returns False if it does not hold in time."""
    until = time.monotonic() + seconds
    while not is_ready():
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
        {"wire": wire_scheduler, "unwire": unwire_scheduler}[arguments.action](client, arguments)
    except (Refused, errors.KubeError, OSError, yaml.YAMLError) as error:
        sys.exit(f"node {arguments.node}: {error}")


if __name__ == "__main__":
    main()
