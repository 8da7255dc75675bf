"""`cardwise bundle`: collects a support bundle in one archive, without secrets.

Secrets and ConfigMaps are not read. In Cardwise's namespace only objects with the chart's label are read, since other
programs may run there too. Users put tokens into commands, probes, annotations, volumes and other fields. So the bundle
contains only the fields of users' pods that this module lists: placement, requests and state. The values of Cardwise's
own environment variables and annotations are kept too.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import click

from cardwise.cli import console, options
from cardwise.cli.doctor import checks
from cardwise.cli.doctor.finding import Finding, as_json
from cardwise.core.api import names
from cardwise.core.values.decoded import Json, annotations_of, labels_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

HIDDEN_TEXT: Final = "(left out)"
_LOG_LINES: Final = 2000
_APPS: Final = "/apis/apps/v1"
_PARTS_QUERY: Final = {"labelSelector": "app.kubernetes.io/name=cardwise"}  # the label of every object of the chart
_NOISY_ANNOTATIONS: Final = ("kubectl.kubernetes.io/last-applied-configuration",)
_OWN_VARIABLE_PREFIXES: Final = ("CARDWISE_", names.GPUSHARE_PREFIX, *names.ENV_LIMIT_PREFIXES)
_CONTAINER_LISTS: Final = ("containers", "initContainers", "ephemeralContainers")
_OWN_DOMAINS: Final = frozenset(key.partition("/")[0] for key in (names.API_VERSION, names.GPU_MEM, names.GROUP_NAME))
_GPUSHARE_ANNOTATION_PREFIXES: Final = ("ALIYUN_COM_", names.GPUSHARE_ALLOCATION)
# The fields that are kept, separated by spaces.
_METADATA_FIELDS: Final = """
    name namespace uid resourceVersion generation generateName labels ownerReferences finalizers
    creationTimestamp deletionTimestamp deletionGracePeriodSeconds"""
_SPEC_FIELDS: Final = """
    nodeName nodeSelector affinity tolerations topologySpreadConstraints schedulerName schedulingGates priority
    priorityClassName preemptionPolicy runtimeClassName restartPolicy terminationGracePeriodSeconds
    activeDeadlineSeconds overhead resources resourceClaims serviceAccountName automountServiceAccountToken
    enableServiceLinks hostNetwork hostPID hostIPC hostUsers shareProcessNamespace securityContext os"""
_CONTAINER_FIELDS: Final = """
    name image imagePullPolicy resources resizePolicy restartPolicy ports volumeMounts volumeDevices securityContext
    targetContainerName"""
_HIDDEN_FIELDS: Final = ("command", "args")  # fields that are kept without their text, which may contain secrets


@click.command()
@options.cluster
@options.cardwise_namespace
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path("cardwise-bundle.tar.gz"))
def bundle(cardwise_namespace: str, file: Path) -> None:
    """Collect a support bundle in FILE: findings, objects and logs of Cardwise, without secrets (see the docs).

    Without FILE, writes cardwise-bundle.tar.gz.
    """
    client = options.load_client()
    try:
        findings = checks.run_all_checks(client, cardwise_namespace)
        missing, file_count = write_bundle(client, file, findings, cardwise_namespace, options.current_clock().wall())
    except FileExistsError:
        raise click.ClickException(f"{file} exists already; name another file") from None
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from None
    for unread in (finding for finding in findings if finding.unread):
        console.print_text(f"note: doctor {'' if unread.text.startswith('could') else 'says: '}{unread.text}", err=True)
    if missing:
        missing_files = ", ".join(line.partition(":")[0] for line in missing)
        console.print_text(
            f"note: could not read {len(missing)} of {file_count} files (missing.json says why): {missing_files}",
            err=True,
        )
    console.print_text(f"wrote {file}; check it for secrets before you send it")


def write_bundle(
    client: KubeClient, target: Path, findings: Sequence[Finding], cardwise_namespace: str, now: datetime
) -> tuple[list[str], int]:
    """Write the archive (tar, gzip).

    Returns a line with the reason for each file that could not be read, and the number of all files, including these.

    Raises OSError if `target` cannot be written, and FileExistsError if `target` exists already.
    """
    folder = target.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    with target.open("xb") as file:
        try:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                _add_file(archive, f"{folder}/doctor.json", as_json(findings), now)
                missing, file_count = _write_contents(archive, folder, _list_contents(client, cardwise_namespace), now)
                _add_file(archive, f"{folder}/missing.json", missing, now)
        except BaseException:
            target.unlink()  # an incomplete archive would be useless
            raise
    return missing, file_count


def _write_contents(
    archive: tarfile.TarFile, folder: str, contents: Iterable[tuple[str, Callable[[], object]]], now: datetime
) -> tuple[list[str], int]:
    missing, file_count = [], 0
    for name, read_content in contents:
        file_count += 1
        try:
            _add_file(archive, f"{folder}/{name}", read_content(), now)
        except errors.KubeError as error:
            missing.append(f"{name}: {error}")
    return missing, file_count


def _list_contents(client: KubeClient, cardwise_namespace: str) -> Iterator[tuple[str, Callable[[], object]]]:
    def objects(
        path: str, clean: Callable[[Json], Json] = _remove_noise, query: Mapping[str, str] | None = None
    ) -> Callable[[], object]:
        return lambda: [clean(manifest) for manifest in client.list_objects(path, query)]

    yield "version.json", lambda: client.get("/version")
    yield "nodes.json", objects(paths.nodes())
    yield "extendedresources.json", objects(paths.extendedresources())
    yield "resourceclasses.json", objects(paths.resourceclasses())
    yield "gpuquotas.json", objects(paths.gpuquotas(), _redact_annotations)
    yield "podgroups.json", objects(paths.podgroups(), _redact_annotations)
    yield "mutatingwebhooks.json", objects(paths.mutatingwebhookconfigurations())
    yield "validatingwebhooks.json", objects(paths.validatingwebhookconfigurations())
    yield "events.json", objects(paths.events())
    yield (
        "pods.json",
        lambda: [_redact_pod(pod) for pod in client.list_objects(paths.pods()) if _concerns_cardwise(pod)],
    )
    for kind in ("daemonsets", "deployments"):
        yield f"{kind}.json", objects(paths.namespaced(_APPS, kind, cardwise_namespace), query=_PARTS_QUERY)
    yield "leases.json", objects(paths.leases(cardwise_namespace))
    yield "parts/pods.json", objects(paths.pods(cardwise_namespace), query=_PARTS_QUERY)
    try:
        parts = list(client.list_objects(paths.pods(cardwise_namespace), _PARTS_QUERY))
    except errors.KubeError:
        return  # the failure is recorded already: writing `parts/pods.json` above had the same error
    for pod in parts:
        statuses = (pod.get("status") or {}).get("containerStatuses") or ()
        restarted_containers = {status["name"] for status in statuses if status.get("restartCount")}
        for container in pod["spec"]["containers"]:
            yield _read_log(client, pod, container["name"], previous=False)
            if container["name"] in restarted_containers:
                yield _read_log(client, pod, container["name"], previous=True)


def _read_log(client: KubeClient, pod: Json, container: str, *, previous: bool) -> tuple[str, Callable[[], object]]:
    metadata = pod["metadata"]
    path = paths.pods(metadata["namespace"], metadata["name"], "log")
    query = {"container": container, "tailLines": str(_LOG_LINES), "previous": str(previous).lower()}
    name = f"parts/{metadata['name']}.{container}{'.previous' * previous}.log"
    return name, lambda: client.request("GET", path, query=query)


def _concerns_cardwise(pod: Json) -> bool:
    """Whether the pod requests resources of Cardwise, or is in a gang."""
    if labels_of(pod).get(names.GANG):
        return True
    requested = {
        resource
        for group in _CONTAINER_LISTS
        for container in pod["spec"].get(group) or ()
        for resource in (container.get("resources") or {}).get("limits") or ()
    }
    return any(resource in names.REQUESTED or resource.startswith(names.CLASS_PREFIX) for resource in requested)


def _remove_noise(manifest: Json) -> Json:
    metadata = manifest.get("metadata") or {}
    metadata.pop("managedFields", None)
    for key in _NOISY_ANNOTATIONS:
        (metadata.get("annotations") or {}).pop(key, None)
    return manifest


def _redact_pod(pod: Json) -> Json:
    """Return a copy of a user's pod that has only the listed fields."""
    spec = pod["spec"]
    redacted = _select_fields(_SPEC_FIELDS, spec)
    for group in _CONTAINER_LISTS:
        if group in spec:
            redacted[group] = [_redact_container(part) for part in spec[group] or ()]
    if "volumes" in spec:
        redacted["volumes"] = [_redact_volume(part) for part in spec["volumes"] or ()]
    return _redact_annotations(
        {"metadata": pod["metadata"], "spec": redacted, "status": _redact_status(pod.get("status") or {})}
    )


def _redact_annotations(manifest: Json) -> Json:
    """Return a copy of the object that has only the annotations of Cardwise, gpushare and gangs."""
    metadata = _select_fields(_METADATA_FIELDS, manifest["metadata"])
    annotations = annotations_of(manifest)
    return manifest | {
        "metadata": metadata
        | {"annotations": {key: annotations[key] for key in annotations if _is_own_annotation(key)}}
    }


def _select_fields(field_names: str, manifest: Json) -> Json:
    return {key: manifest[key] for key in field_names.split() if key in manifest}


def _redact_container(container: Json) -> Json:
    redacted = _select_fields(_CONTAINER_FIELDS, container) | {
        key: HIDDEN_TEXT for key in _HIDDEN_FIELDS if key in container
    }
    if "env" in container:
        redacted["env"] = [_redact_variable(variable) for variable in container["env"] or ()]
    return redacted


def _redact_variable(variable: Json) -> Json:
    """Return the variable with its source, but hide its value, unless it is a variable of Cardwise."""
    if "value" not in variable or _is_own_variable(variable):
        return variable
    return variable | {"value": HIDDEN_TEXT}


def _redact_volume(volume: Json) -> Json:
    """Return the volume with its name and its type, such as csi, and hide the parameters."""
    return {key: content if key == "name" else HIDDEN_TEXT for key, content in volume.items()}


def _redact_status(status: Json) -> Json:
    """Return the status of a pod; hide the messages of containers, but keep their reasons and exit codes."""
    redacted = dict(status)
    for group in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        if group in redacted:
            redacted[group] = [_redact_container_status(container_status) for container_status in redacted[group] or ()]
    return redacted


def _redact_container_status(container: Json) -> Json:
    """Return the status of a container without its messages, which may contain secrets.

    The program writes the message of a container that has ended. The message of a container that could not start may
    contain the container's command (RunContainerError).
    """
    redacted = dict(container)
    for key in ("state", "lastState"):
        for phase, state in (redacted.get(key) or {}).items():
            if "message" in (state or {}):
                redacted[key] = {phase: state | {"message": HIDDEN_TEXT}}
    return redacted


def _is_own_annotation(annotation: str) -> bool:
    """Whether the annotation is one of Cardwise, gpushare or gangs."""
    return annotation.startswith(_GPUSHARE_ANNOTATION_PREFIXES) or annotation.partition("/")[0] in _OWN_DOMAINS


def _is_own_variable(variable: Json) -> bool:
    name = str(variable["name"])
    return name == names.ENV_VISIBLE_DEVICES or name.startswith(_OWN_VARIABLE_PREFIXES)


def _add_file(archive: tarfile.TarFile, name: str, content: object, now: datetime) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content, indent=1).encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(data), int(now.timestamp())
    archive.addfile(entry, io.BytesIO(data))
