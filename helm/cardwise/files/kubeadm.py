"""Configures the kube-scheduler of a kubeadm control plane node to call the extender, and undoes it.

The script of scheduler.mode=kubeadm. Runs on each control plane node. Changes the manifest of the static pod as little
as possible, and keeps the former manifest beside Cardwise's configuration. If the kubelet cannot start the changed
scheduler, the script restores the former manifest.

Each configuration is in a folder with its TLS files. The folder's name is a hash of the files' content, and the
manifest contains this name. So a manifest that was restored, or left by a killed Job, still finds the files that it was
written for. And a change of any file changes the manifest, which makes the kubelet restart the scheduler.
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

MANIFEST_FILE = "kube-scheduler.yaml"
BACKUP_FILE = "kube-scheduler.yaml.before"
CONFIGURATION_FILE = "scheduler-config.yaml"
FORMER_CONFIG_ANNOTATION = "cardwise-former-config"  # of the static pod; its value is the former --config
FOLDER_PREFIX = "wired-"  # the names of Cardwise's folders start with it; other folders may belong to the administrator
VOLUME_NAME = "cardwise"
TLS_FILES = ("ca.crt", "client.crt", "client.key")
CONFIG_FLAG = "--config="
READY_TIMEOUT_SECONDS = 90  # within which a kube-scheduler becomes ready
SECRET_TIMEOUT_SECONDS = 120  # within which the extender creates its Secret


class Refused(Exception):
    """The script stops, and the manifest is unchanged or restored. The text is the reason and the remedy."""


def scheduler_command(pod: Json) -> list[str]:
    """Return the command line of kube-scheduler in a pod. Raises Refused if no container runs it."""
    for container in pod.get("spec", {}).get("containers", ()):
        command_line = container.get("command") or []
        if command_line and command_line[0].endswith("kube-scheduler"):
            return list(command_line)
    raise Refused(f"{MANIFEST_FILE} has no container that runs kube-scheduler; write scheduler.mode=manual and edit it")


def read_flag(command_line: list[str], name: str) -> str:
    """Return the value of the flag `--name=value`; "" without the flag."""
    return next((argument.partition("=")[2] for argument in command_line if argument.startswith(f"--{name}=")), "")


def wire_manifest(pod: Json, folder: str, config_file: str) -> Json:
    """Return the manifest with Cardwise's configuration; unchanged if it has this already. Raises Refused.

    folder: the folder of Cardwise's files, which is mounted.
    config_file: path of the configuration, below `folder`.
    """
    command_line = scheduler_command(pod)
    config_flag = f"{CONFIG_FLAG}{config_file}"
    if config_flag in command_line:
        return pod
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"].setdefault("annotations", {})
    is_mounted = FORMER_CONFIG_ANNOTATION in annotations
    annotations.setdefault(FORMER_CONFIG_ANNOTATION, read_flag(command_line, "config"))
    spec = pod["spec"]
    for container in spec["containers"]:
        if (container.get("command") or [""])[0].endswith("kube-scheduler"):
            container["command"] = [argument for argument in command_line if not argument.startswith(CONFIG_FLAG)] + [
                config_flag
            ]
            if not is_mounted:
                mount = {"name": VOLUME_NAME, "mountPath": folder, "readOnly": True}
                container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    if not is_mounted:
        volume = {"name": VOLUME_NAME, "hostPath": {"path": folder, "type": "Directory"}}
        spec["volumes"] = [*(spec.get("volumes") or ()), volume]
    return pod


def unwire_manifest(pod: Json) -> Json:
    """Return the manifest without the changes of `wire_manifest`."""
    annotations = pod["metadata"].get("annotations") or {}
    if FORMER_CONFIG_ANNOTATION not in annotations:
        return pod
    pod = copy.deepcopy(pod)
    annotations = pod["metadata"]["annotations"]
    former_config = annotations.pop(FORMER_CONFIG_ANNOTATION)
    if not annotations:
        del pod["metadata"]["annotations"]
    spec = pod["spec"]
    spec["volumes"] = [volume for volume in spec.get("volumes") or () if volume["name"] != VOLUME_NAME]
    for container in spec["containers"]:
        mounts = container.get("volumeMounts") or []
        if any(mount["name"] == VOLUME_NAME for mount in mounts):
            container["volumeMounts"] = [mount for mount in mounts if mount["name"] != VOLUME_NAME]
            other_arguments = [argument for argument in container["command"] if not argument.startswith(CONFIG_FLAG)]
            container["command"] = (
                [*other_arguments, f"{CONFIG_FLAG}{former_config}"] if former_config else other_arguments
            )
    return pod


def build_configuration(configuration: Json | None, command_line: list[str], stanzas: list[Json]) -> Json:
    """Return the KubeSchedulerConfiguration with the extender. Raises Refused.

    configuration: the present configuration; None if kube-scheduler has only flags.
    command_line: the command line of kube-scheduler.
    stanzas: the extenders to add.
    """
    if configuration is None:
        kubeconfig = read_flag(command_line, "kubeconfig")
        if not kubeconfig:
            raise Refused("kube-scheduler has neither --config nor --kubeconfig; write scheduler.mode=manual")
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig},
            "leaderElection": {"leaderElect": read_flag(command_line, "leader-elect") != "false"},
        }
    other_stanzas = [stanza for stanza in configuration.get("extenders") or () if not is_own_extender(stanza)]
    return {"percentageOfNodesToScore": 100, **configuration, "extenders": [*other_stanzas, *stanzas]}


def is_own_extender(stanza: Json) -> bool:
    """Whether the extender is Cardwise's, or gpushare's, whose resources Cardwise manages."""
    own_resources = {
        resource["name"]
        for own_stanza in schedulerconfig.extender_stanzas(filter_url="", bind_url="")
        for resource in own_stanza["managedResources"]
    }
    return bool(own_resources & {resource["name"] for resource in stanza.get("managedResources") or ()})


def cardwise_folder(manifest: Path) -> Path:
    """Return the folder of Cardwise's files, outside the folder of manifests, whose files the kubelet runs."""
    return manifest.parent.parent / "cardwise"


def replace_file(path: Path, text: str, scratch: Path, mode: int = 0o600) -> None:
    """Write a file atomically, so that the kubelet never reads a partial manifest.

    scratch: the folder for the temporary file, on the same file system.
    """
    temporary = scratch / f".{path.name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


def wire_scheduler(client: KubeClient, arguments: argparse.Namespace) -> None:
    """Configure the node's kube-scheduler to call the extender, and wait until it is ready. Raises Refused."""
    path = Path(arguments.manifests) / MANIFEST_FILE
    folder = cardwise_folder(path)
    if not path.is_file():
        raise Refused(
            f"{path} does not exist: write scheduler.mode=own if kubeadm did not set up the control plane, or "
            "scheduler.manifestsDir if the manifests are in another directory"
        )
    manifest = path.read_text()
    pod: Json = yaml.safe_load(manifest)
    command_line = scheduler_command(pod)
    address, files = read_extender(client, arguments)
    former_config = (pod["metadata"].get("annotations") or {}).get(FORMER_CONFIG_ANNOTATION)
    config_path = read_flag(command_line, "config") if former_config is None else former_config
    if config_path and not Path(config_path).is_file():
        raise Refused(f"--config={config_path} of kube-scheduler cannot be read from here; write scheduler.mode=manual")
    configuration = yaml.safe_load(Path(config_path).read_text()) if config_path else None

    def render(config_folder: Path) -> str:
        return yaml.safe_dump(
            build_configuration(configuration, command_line, extender_stanzas(address, config_folder)), sort_keys=False
        )

    config_folder = folder / (FOLDER_PREFIX + hash_texts([render(folder), *files.values()]))
    wired_pod = wire_manifest(pod, str(folder), str(config_folder / CONFIGURATION_FILE))
    config_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (files | {CONFIGURATION_FILE: render(config_folder)}).items():
        replace_file(config_folder / name, content, folder)
    if wired_pod == pod:
        print_now(
            f"{path} already has the extender; waiting up to {READY_TIMEOUT_SECONDS} s until kube-scheduler is ready"
        )
        if not wait_until(
            lambda: not describe_startup_fault(client, arguments.node, command_line), READY_TIMEOUT_SECONDS
        ):
            fault = describe_startup_fault(client, arguments.node, command_line)
            raise Refused(f"{path} already has the extender, but kube-scheduler is not ready: {fault}; see its log")
        remove_stale_folders(folder, config_folder)
        print("kube-scheduler is ready")
        return
    if former_config is None:
        replace_file(folder / BACKUP_FILE, manifest, folder)
    exchange_manifest(client, arguments.node, path, manifest, wired_pod)
    remove_stale_folders(folder, config_folder)
    print(f"{path} now has the extender at {address}; the former manifest is {folder / BACKUP_FILE}")


def extender_stanzas(address: str, config_folder: Path) -> list[Json]:
    """Return the `extenders` of a KubeSchedulerConfiguration.

    address: the IP address of the extender's Service.
    config_folder: the folder of the TLS files.
    """
    return schedulerconfig.extender_stanzas(
        filter_url=f"https://{address}:12345",
        bind_url=f"https://{address}:12346",
        ca_file=str(config_folder / "ca.crt"),
        cert_file=str(config_folder / "client.crt"),
        key_file=str(config_folder / "client.key"),
    )


def hash_texts(texts: list[str]) -> str:
    """Return a hash of files' contents, for the name of their folder."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def remove_stale_folders(folder: Path, current_folder: Path | None) -> None:
    """Remove all other folders. Call it when kube-scheduler is ready: a restored manifest needs its own folder."""
    for other_folder in folder.glob(f"{FOLDER_PREFIX}*"):
        if other_folder != current_folder:
            shutil.rmtree(other_folder)


def unwire_scheduler(client: KubeClient, arguments: argparse.Namespace) -> None:
    """Remove the extender from the node's kube-scheduler, and wait until it is ready. Raises Refused."""
    path = Path(arguments.manifests) / MANIFEST_FILE
    folder = cardwise_folder(path)
    if not path.is_file():
        print(f"{path} does not exist")
        return
    manifest = path.read_text()
    pod = yaml.safe_load(manifest)
    unwired_pod = unwire_manifest(pod)
    if unwired_pod == pod:
        print(f"{path} has no extender of Cardwise")
        return
    exchange_manifest(client, arguments.node, path, manifest, unwired_pod)
    remove_stale_folders(folder, None)
    print(f"removed the extender from {path}")


def exchange_manifest(client: KubeClient, node: str, path: Path, former_manifest: str, pod: Json) -> None:
    """Write a manifest and wait until kube-scheduler is ready. If it is not, restore the former one and raise Refused.

    former_manifest: the text of the former manifest.
    pod: the new manifest.
    """
    folder = cardwise_folder(path)
    command_line, former_command_line = scheduler_command(pod), scheduler_command(yaml.safe_load(former_manifest))
    replace_file(path, yaml.safe_dump(pod, sort_keys=False), folder)
    print_now(f"changed {path}; waiting up to {READY_TIMEOUT_SECONDS} s until kube-scheduler is ready")
    if wait_until(lambda: not describe_startup_fault(client, node, command_line), READY_TIMEOUT_SECONDS):
        return
    fault = describe_startup_fault(client, node, command_line)
    replace_file(path, former_manifest, folder)
    print_now(
        f"kube-scheduler is not ready ({fault}); restored {path}, waiting up to {READY_TIMEOUT_SECONDS} s until it "
        "is ready"
    )
    if not wait_until(lambda: not describe_startup_fault(client, node, former_command_line), READY_TIMEOUT_SECONDS):
        raise Refused(f"kube-scheduler of {node} is not ready with its former manifest either; see its log")
    raise Refused(
        f"kube-scheduler of {node} was not ready with the changed manifest ({fault}); restored the former one"
    )


def describe_startup_fault(client: KubeClient, node: str, command_line: list[str]) -> str:
    """Return why kube-scheduler is not ready with this command line; "" if it is.

    Never raises, because the caller must still restore the manifest.
    """
    try:
        pod = client.get(paths.pods("kube-system", f"kube-scheduler-{node}"))
        if scheduler_command(pod) != command_line:
            return "its pod still runs with another manifest"
    except errors.NotFound:
        return "it has no pod"
    except (errors.KubeError, Refused) as error:
        return str(error)
    conditions = pod.get("status", {}).get("conditions") or ()
    is_ready_now = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return "" if is_ready_now else "its pod is not ready"


def read_extender(client: KubeClient, arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return the address of the extender's Service, and the files of its Secret by name.

    Waits for both. Raises Refused.
    """
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
        except errors.KubeError as error:  # a busy API server may answer the next time
            reason = f"the API server says: {error}"
            return False
        return all(name in secret for name in TLS_FILES)

    print_now(f"waiting up to {SECRET_TIMEOUT_SECONDS} s until the extender has created the Secret {arguments.secret}")
    if not wait_until(has_secret, SECRET_TIMEOUT_SECONDS):
        raise Refused(
            f"the extender has not created the Secret {arguments.secret} in {SECRET_TIMEOUT_SECONDS} s; {reason}"
        )
    files = {name: base64.b64decode(secret[name]).decode() for name in TLS_FILES}
    return str(service["spec"]["clusterIP"]), files


def print_now(text: str) -> None:
    """Print without buffering, so that the log is complete if Helm gives up before the script ends."""
    print(text, flush=True)


def wait_until(is_ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds. Returns False if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > deadline:
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
