"""NVIDIA's container runtime beside runc: what opens a card, with which settings, and what Cardwise leaves of it.

One real node with two cards and NVIDIA's own toolkit on a mock of the driver's library (tests/cluster/toolkit.py). A
namespace of the infrastructure shows the runtime as it is by itself; one of a team what comes past our rules.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import container
from tests.cluster import Cluster, images, toolkit
from tests.cluster.toolkit import ENVIRONMENT, KIND, MODE
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, device_numbers, probe, probed, workload

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.node,
    pytest.mark.skipif(not os.environ.get(toolkit.MOCK), reason=f"set {toolkit.MOCK}: CONTRIBUTING.md"),
]

DEVICES = names.ENV_VISIBLE_DEVICES
ALL, OLD = "cardwise.local/cuda:12", "cardwise.local/cuda:8"  # an image that asks for all cards, and one of before that
IMAGES = {ALL: {DEVICES: "all"}, OLD: {"CUDA_VERSION": "8.0"}}
LISTED = {"name": "null", "mountPath": "/var/run/nvidia-container-devices/all"}
VOID = {"env": [{"name": DEVICES, "value": "void"}]}
STOLEN = {"envFrom": [{"configMapRef": {"name": "stolen"}}]}
PRIVILEGED = {"securityContext": {"privileged": True}}

# How a container asks the runtime for all cards.
BY_ENVIRONMENT: Mapping[str, Json] = {
    "image": {"image": ALL},
    "old-image": {"image": OLD},
    "env-from": STOLEN,
    "cuda-version": {"env": [{"name": "CUDA_VERSION", "value": "1.0"}]},
}
BY_MOUNT: Mapping[str, Json] = {
    "mount": {"volumeMounts": [LISTED]},
    "void-mount": {"volumeMounts": [LISTED]} | VOID,
}
BY_PRIVILEGE: Mapping[str, Json] = {"privileged": {"image": ALL} | PRIVILEGED}
NOT: Mapping[str, Json] = {
    "nothing": {},
    "void-image": {"image": ALL} | VOID,
    "void-old-image": {"image": OLD} | VOID,
    "void-env-from": STOLEN | VOID,
}
WAYS = {**BY_ENVIRONMENT, **BY_MOUNT, **BY_PRIVILEGE, **NOT}

MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
DEFAULT = {MODE: "auto", ENVIRONMENT: True, MOUNTS: False, KIND: "nvidia.com/gpu"}
# As the GPU Operator gives them to the toolkit (NVIDIA_CONTAINER_RUNTIME_MODE, ..._MODES_CDI_DEFAULT_KIND), with the
# two that docs/integrations/gpu-operator.md adds.
OPERATOR = {MODE: "cdi", ENVIRONMENT: False, MOUNTS: False, KIND: "management.nvidia.com/gpu"}
# mode, environment and mounts, to whom it gives cards then. "auto" is "jit-cdi" on a machine with a driver.
OPENS = [
    ("auto", True, False, BY_ENVIRONMENT.keys()),
    ("auto", False, True, BY_MOUNT.keys()),
    ("auto", False, False, frozenset()),
    ("cdi", True, True, BY_ENVIRONMENT.keys() | BY_MOUNT.keys()),
    ("cdi", False, False, frozenset()),
    ("legacy", True, True, BY_ENVIRONMENT.keys() | BY_MOUNT.keys()),
    ("legacy", False, False, frozenset()),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    for running in started(SpecOf(nodes=1, nvidia_runtime=True)):
        node = running.node("n1")
        for name, env in IMAGES.items():
            node.load_image(images.busybox_with(running.state_dir / "images", name, **env))
        toolkit.cdi_spec(node.folder)
        toolkit.runtime_class(running.api)
        yield running


@pytest.fixture
def settings(cluster: Cluster) -> Iterator[Path]:
    """The node's folder; its toolkit is as by default when the test begins and ends."""
    folder = cluster.node("n1").folder
    toolkit.configure(folder, DEFAULT)
    yield folder
    toolkit.configure(folder, DEFAULT)


@pytest.fixture
def team(cluster: Cluster) -> Iterator[Space]:
    yield from _space(cluster, "team")


@pytest.fixture
def infrastructure(cluster: Cluster) -> Iterator[Space]:
    """What runs there passes our rules."""
    yield from _space(cluster, "gpu-operator")


def _space(cluster: Cluster, name: str) -> Iterator[Space]:
    with Space(cluster, name) as space:
        maps = paths.namespaced("/api/v1", "configmaps", name)
        with suppress(errors.AlreadyExists):
            cluster.api.create(maps, {"metadata": {"name": "stolen"}, "data": {DEVICES: "all"}})
        yield space


def looking(cluster: Cluster, name: str, fields: Json) -> Json:
    """A container that tells which cards it opens."""
    return container(name) | {"command": ["sh", "-c", probe(device_numbers(cluster, "n1"))]} | fields


def with_runtime(name: str, containers: list[Json], **fields: object) -> Json:
    volumes = [{"name": "null", "hostPath": {"path": "/dev/null"}}]
    spec = {"runtimeClassName": toolkit.RUNTIME_CLASS, "restartPolicy": "Never", "volumes": volumes}
    return workload(name, containers, spec=spec | fields)


def ended(space: Space, *pods: str) -> None:
    space.wait(lambda: all(space.phase(name) in ("Succeeded", "Failed") for name in pods), f"{pods} have looked")


def termination_messages(space: Space, pod: str) -> dict[str, list[str]]:
    """What each container of the pod has told."""
    status = space.get(pod)["status"]
    return {
        status["name"]: status["state"]["terminated"]["message"].splitlines()
        for status in [*status.get("initContainerStatuses", ()), *status["containerStatuses"]]
    }


@pytest.mark.parametrize("case", OPENS, ids=lambda case: "-".join(map(str, case[:3])))
def test_what_opens_a_card(
    cluster: Cluster, infrastructure: Space, settings: Path, case: tuple[str, bool, bool, AbstractSet[str]]
) -> None:
    mode, environment, mounts, opens = case
    calls = settings / "asked"
    toolkit.configure(settings, {MODE: mode, ENVIRONMENT: environment, MOUNTS: mounts} | recording(settings, calls))
    ways = [looking(cluster, way, fields) for way, fields in WAYS.items()]
    infrastructure.create(with_runtime("ways", ways, nodeName="n1"))
    ended(infrastructure, "ways")
    states, outputs = (
        infrastructure.get("ways")["status"]["containerStatuses"],
        termination_messages(infrastructure, "ways"),
    )
    if mode == "legacy":
        # The program that would give the cards is none of Go's, and needs the driver itself: only whom it is asked for.
        ids = {status["name"]: str(status["containerID"]).partition("://")[2] for status in states}
        lines = [line for line in calls.read_text().splitlines() if "--device=all" in line]
        opening = {way for way, id_ in ids.items() if any(id_ in line for line in lines)}
    else:
        opening = {way for way, lines in outputs.items() if {"opens 0", "opens 1"} <= set(lines)}
        assert all(len(lines) == 2 for way, lines in outputs.items() if way not in opening), outputs
        assert all("sees /dev/nvidiactl" in "\n".join(outputs[way]) for way in opening)
    assert opening == opens | BY_PRIVILEGE.keys(), outputs


def recording(folder: Path, calls: Path) -> dict[str, object]:
    """A double of nvidia-container-cli that notes what it is asked."""
    program = folder / "nvidia-container-cli"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    calls.write_text("")
    return {"nvidia-container-cli.path": program}


@pytest.mark.parametrize("scope", ["", "/pod", "/container.main"])
def test_devices_by_annotation_need_no_runtime_of_nvidia(
    cluster: Cluster, infrastructure: Space, team: Space, settings: Path, scope: str
) -> None:
    node, key = cluster.node("n1"), f"nvidia.cdi.k8s.io{scope}"
    # Anew: for a while after the runtime's own restart it is not connected.
    node.process("nri").kill()
    node.process("nri").log.unlink(missing_ok=True)
    node.start_nri_plugin()
    toolkit.configure(settings, {ENVIRONMENT: False})
    named, once = {key: "nvidia.com/gpu=all"}, {"restartPolicy": "Never", "nodeName": "n1"}
    pod = workload("annotated", [looking(cluster, "main", {})], annotations=named, spec=once)
    infrastructure.create(pod)
    ended(infrastructure, "annotated")
    assert {"opens 0", "opens 1"} <= set(termination_messages(infrastructure, "annotated")["main"]), (
        "nothing on the node forbids it"
    )
    with pytest.raises(errors.Invalid) as refused:
        cluster.api.create(paths.pods(team.name), pod)
    assert f"metadata.annotations[{key}]" in str(refused.value)


def test_a_share_whose_container_starts_without_its_device_opens_no_card(
    cluster: Cluster, team: Space, infrastructure: Space, settings: Path
) -> None:
    """The kubelet forgets the devices of a pod that is deleted by force, and may start its container all the same. Such
    a container has nothing but its environment.
    """
    main = looking(cluster, "main", {"resources": {"limits": {names.GPU_MEM: "64"}}})
    team.create(with_runtime("share", [main], volumes=[]))
    ended(team, "share")
    visible = team.get("share")["metadata"]["annotations"][names.DEVICES_OF + "0"]
    alone = looking(cluster, "main", {"env": [{"name": DEVICES, "value": visible}]})
    infrastructure.create(with_runtime("alone", [alone], nodeName="n1"))
    ended(infrastructure, "alone")
    assert termination_messages(infrastructure, "alone")["main"] == closed(cluster)


@pytest.mark.parametrize("mode", ["auto", "cdi", "legacy"])
def test_beside_a_share_nobody_gets_a_card_by_image_or_environment(
    cluster: Cluster, team: Space, settings: Path, mode: str
) -> None:
    calls = settings / "asked"
    toolkit.configure(settings, {MODE: mode} | recording(settings, calls))
    early = looking(cluster, "early", {"image": ALL})
    main = looking(cluster, "main", STOLEN | {"image": ALL, "resources": {"limits": {names.GPU_MEM: "64"}}})
    others = [looking(cluster, way, fields) for way, fields in BY_ENVIRONMENT.items()]
    team.create(with_runtime("mixed", [main, *others], initContainers=[early], volumes=[]))
    ended(team, "mixed")
    outputs, numbers = termination_messages(team, "mixed"), device_numbers(cluster, "n1")
    (index,) = assigned(team.get("mixed")).indices()
    assert outputs.pop("main") == probed(numbers, str(index))
    assert outputs.keys() == {"early", *BY_ENVIRONMENT}
    for lines in outputs.values():
        assert lines == [f"refused {number} Operation not permitted" for number in numbers]
    assert "--device" not in calls.read_text(), "what gives cards in the mode legacy is asked for none"


def test_as_the_gpu_operator_sets_the_toolkit_a_share_has_its_card_and_the_operators_pods_all(
    cluster: Cluster, team: Space, infrastructure: Space, settings: Path
) -> None:
    toolkit.configure(settings, OPERATOR)
    spec = toolkit.management_spec(settings)
    try:
        main = looking(cluster, "main", {"image": ALL, "resources": {"limits": {names.GPU_MEM: "64"}}})
        team.create(with_runtime("share", [main, looking(cluster, "beside", {"image": ALL})], volumes=[]))
        exporter = looking(cluster, "exporter", {"image": ALL} | PRIVILEGED)
        infrastructure.create(with_runtime("exporter", [exporter], nodeName="n1"))
        ended(team, "share")
        ended(infrastructure, "exporter")
        numbers = device_numbers(cluster, "n1")
        (index,) = assigned(team.get("share")).indices()
        assert termination_messages(team, "share") == {
            "main": probed(numbers, str(index)),
            "beside": [f"refused {number} Operation not permitted" for number in numbers],
        }
        assert {"opens 0", "opens 1"} <= set(termination_messages(infrastructure, "exporter")["exporter"])
    finally:
        spec.unlink()


def test_by_environment_alone_a_share_has_its_card_only_where_the_toolkit_heeds_it(
    cluster: Cluster, team: Space, settings: Path
) -> None:
    plugin = cluster.process("deviceplugin-n1")
    start_line = plugin.recorded
    assert start_line is not None

    def set_card_access(access: str) -> None:
        plugin.stop()
        plugin.start([*start_line.command, f"--gpu-access={access}"], start_line.environment)
        cards = paths.extendedresources()

        def is_reported() -> bool:
            return all(card["status"].get("gpuAccess") == access for card in cluster.api.get(cards)["items"])

        team.wait(is_reported, f"the cards are given by {access}")

    set_card_access("env")
    try:
        outputs = {}
        for heeds in (True, False):
            toolkit.configure(settings, {ENVIRONMENT: heeds})
            main = looking(cluster, "main", {"resources": {"limits": {names.GPU_MEM: "64"}}})
            beside = looking(cluster, "beside", {"image": ALL})
            name = f"heeds-{heeds}".lower()
            team.create(with_runtime(name, [main, beside], volumes=[]))
            ended(team, name)
            outputs[heeds] = termination_messages(team, name)
        opened = {
            (heeds, name): [line for line in lines if line.startswith("opens")]
            for heeds, by_name in outputs.items()
            for name, lines in by_name.items()
        }
        assert len(opened.pop((True, "main"))) == 1
        assert not any(opened.values()), "without it those with a share have no card either"
    finally:
        set_card_access("cdi")


def test_a_pod_without_a_share_may_not_name_the_runtime(team: Space) -> None:
    def refused(pod: Json) -> str:
        with pytest.raises(errors.Invalid) as error:
            team.cluster.api.create(paths.pods(team.name), pod, query={"dryRun": "All"})
        return str(error.value)

    refusal = refused(with_runtime("plain", [container()], volumes=[]))
    assert "spec.runtimeClassName: nvidia gives GPUs to pods without a share" in refusal
    assert names.GPU_MEM in refusal
    of_plugin = container() | {"resources": {"limits": {names.NVIDIA_GPU: "1"}}}
    team.cluster.api.create(
        paths.pods(team.name), with_runtime("theirs", [of_plugin], volumes=[]), query={"dryRun": "All"}
    )
    assert "to pods without a share" in refused(with_runtime("theirs", [of_plugin], volumes=[], nodeName="n1"))
    beside = [of_plugin, looking(team.cluster, "beside", {"image": ALL})]
    assert "spec.containers[beside].env: the runtime nvidia would give it" in refused(with_runtime("two", beside))
    beside[1] |= VOID
    team.cluster.api.create(paths.pods(team.name), with_runtime("two", beside, volumes=[]), query={"dryRun": "All"})
    network = container() | {"resources": {"limits": {"nvidia.com/hostdev": "1"}}}
    assert "to pods without a share" in refused(with_runtime("network", [network], volumes=[]))
    none = container() | {"resources": {"limits": {names.NVIDIA_GPU: "0"}}}
    assert "to pods without a share" in refused(with_runtime("none", [none], volumes=[]))


def test_a_debug_container_of_a_pod_with_a_share_says_that_it_wants_no_card(
    cluster: Cluster, team: Space, settings: Path
) -> None:
    team.create(with_runtime("steady", [container(gpu_mem=64)], volumes=[]))
    team.running("steady")
    path = paths.namespaced("/api/v1", "pods", team.name, "steady", "ephemeralcontainers")

    def debug(fields: Json) -> None:
        debugger = looking(cluster, "debug", {"image": ALL} | fields)
        del debugger["resources"]
        cluster.api.patch(path, {"spec": {"ephemeralContainers": [debugger]}}, "strategic")

    with pytest.raises(errors.Invalid, match="kubectl debug --env=NVIDIA_VISIBLE_DEVICES=void"):
        debug({})
    debug(VOID)
    assert debugged(team, "debug") == closed(cluster)


def closed(cluster: Cluster) -> list[str]:
    """What a container tells that opens no card."""
    return [f"refused {number} Operation not permitted" for number in device_numbers(cluster, "n1")]


def debugged(space: Space, name: str) -> list[str]:
    """What a debug container of the pod "steady" has told."""

    def debug_output() -> list[str]:
        states = space.get("steady")["status"].get("ephemeralContainerStatuses") or ()
        messages = {
            status["name"]: status.get("state", {}).get("terminated", {}).get("message", "") for status in states
        }
        return str(messages.get(name, "")).splitlines()

    space.wait(debug_output, f"{name} has looked")
    return debug_output()


def test_where_it_is_the_default_runtime_a_debug_container_gets_cards_by_its_image(
    cluster: Cluster, team: Space, settings: Path
) -> None:
    """Unless it says `void`, or the node does not read the environment."""
    path = paths.namespaced("/api/v1", "pods", team.name, "steady", "ephemeralcontainers")
    node = cluster.node("n1")

    def debug(name: str, fields: Json) -> list[str]:
        debugger = looking(cluster, name, {"image": ALL} | fields)
        del debugger["resources"]
        cluster.api.patch(path, {"spec": {"ephemeralContainers": [debugger]}}, "strategic")
        return debugged(team, name)

    node.default_runtime("nvidia")
    try:
        team.create(workload("steady", gpu_mem=64))
        team.running("steady")
        assert {"opens 0", "opens 1"} <= set(debug("open", {}))
        assert debug("void", VOID) == closed(cluster)
        toolkit.configure(settings, {ENVIRONMENT: False})
        assert debug("ignored", {}) == closed(cluster)
    finally:
        node.default_runtime("runc")


def test_doctor_finds_the_node_where_a_pod_without_a_share_gets_cards(
    cluster: Cluster, team: Space, settings: Path
) -> None:
    def runtime_findings() -> list[tuple[str, str, str]]:
        program = str(Path(__file__).parents[3] / ".venv" / "bin" / "cardwise")
        words = ["doctor", "-n", team.name, "--probe-image", images.BUSYBOX, "-o", "json"]
        environment = os.environ | cluster.environment()
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False, env=environment)
        assert done.stdout, done.stderr
        output = json.loads(done.stdout)["findings"]
        return [
            (finding["level"], finding["text"], finding["remedy"])
            for finding in output
            if finding["check"] == "runtime"
        ]

    named = ("ok", "a policy keeps pods without a GPU request from using RuntimeClass nvidia", "")
    node = cluster.node("n1")
    node.default_runtime("nvidia")
    try:
        (level, text, remedy), by_class = runtime_findings()
        assert (level, by_class) == ("warning", named)
        assert "gets GPUs through the default runtime: n1 (/dev/nvidia0, /dev/nvidia1)" in text
        assert f"set {ENVIRONMENT} = false" in remedy
        toolkit.configure(settings, {ENVIRONMENT: False})
        assert runtime_findings() == [
            ("ok", "a pod without a GPU request gets none through the default runtime on 1 node", ""),
            named,
        ]
    finally:
        node.default_runtime("runc")
    assert not team.pods()
