"""What manifests that are applied again, by kubectl and on the server, leave on the real API server."""

from collections.abc import Iterator

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster, CommandFailed
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, deployment, wait_for_classes, workload

pytestmark = [pytest.mark.cluster("sim")]

P100 = "nvidia.tesla-p100"  # what simulated cards are
P100_KEY = names.CLASS_PREFIX + P100


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes()
        wait_for_classes(space, P100)
        yield space
        space.kubectl_json("delete", "resourcequotas", "--all")


def apply(space: Space, manifest: Json, *flags: str) -> None:
    if flags:
        space.kubectl_json("apply", *flags, stdin=manifest)
    else:
        space.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))


def pod(name: str, limits: Json, **settings: object) -> Json:
    pod = workload(name, **settings)  # type: ignore[arg-type]
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    return pod


def hard(space: Space, limits: Json, *flags: str) -> Json:
    """Of a ResourceQuota that is applied."""
    manifest = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": limits}}
    apply(space, manifest, *flags)
    stored: Json = space.kubectl_json("get", "resourcequota", "q")["spec"]["hard"]
    return stored


def test_server_side_apply_of_a_workload_leaves_no_stale_key(space: Space) -> None:
    def limits(wanted: Json, *flags: str) -> Json:
        workload = deployment("d", 0)
        workload["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": wanted}
        apply(space, workload, *flags)
        deployments = space.cluster.api.get(f"/apis/apps/v1/namespaces/{space.name}/deployments/d")
        kept: Json = deployments["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        return kept

    assert limits({P100: "1", names.GPU_MEM: "2Gi"}, "--server-side") == {P100_KEY: "1", names.GPU_MEM: "2Gi"}
    space.kubectl_json("label", "deployment", "d", "touched=yes")
    assert limits({P100: "2", names.GPU_MEM: "2Gi"}, "--server-side") == {P100_KEY: "2", names.GPU_MEM: "2Gi"}
    assert limits({names.GPU_MEM: "2Gi"}, "--server-side") == {names.GPU_MEM: "2Gi"}
    assert limits({P100: "1"}, "--server-side") == {P100_KEY: "1"}
    assert limits({"cardwise.dev/other.class": "2"}, "--server-side") == {"cardwise.dev/other.class": "2"}


def test_server_side_apply_of_a_resource_quota_leaves_no_stale_key(space: Space) -> None:
    key = f"requests.{P100_KEY}"
    assert hard(space, {P100: "5"}, "--server-side") == {key: "5"}
    space.kubectl_json("patch", "resourcequota", "q", "--type=merge", "-p", '{"spec": {"hard": {"secrets": "9"}}}')
    assert hard(space, {P100: "6"}, "--server-side") == {key: "6", "secrets": "9"}
    assert hard(space, {"some.other": "5"}, "--server-side") == {
        "requests.cardwise.dev/some.other": "5", "secrets": "9"
    }  # fmt: skip
    assert hard(space, {"pods": "4"}, "--server-side") == {"pods": "4", "secrets": "9"}


@pytest.mark.parametrize(
    ("written", "stored", "requested"),
    [
        ({names.GPU_MEM: "1Gi"}, {f"requests.{names.GPU_MEM}": "1024"}, {names.GPU_MEM: "1Gi"}),
        ({f"requests.{names.GPU_COUNT}": "1"}, {f"requests.{names.WHOLE_GPU}": "1"}, {names.GPU_COUNT: "1"}),
        ({f"limits.{P100_KEY}": "1"}, {f"requests.{P100_KEY}": "1"}, {P100: "1"}),
    ],
)
def test_a_resource_quota_on_our_names_limits(space: Space, written: Json, stored: Json, requested: Json) -> None:
    assert hard(space, written) == stored
    twice = pod("twice", requested)
    twice["spec"]["containers"] += [twice["spec"]["containers"][0] | {"name": "more"}]
    # The API server learns of it by a watch.
    space.wait(lambda: "exceeded quota: q" in space.rejected(twice), "the quota counts")
    apply(space, pod("first", requested))
    with pytest.raises(CommandFailed, match="exceeded quota: q"):
        apply(space, pod("second", requested))


def test_a_resource_quota_on_our_own_marks_is_refused(space: Space) -> None:
    pattern = r"spec\.hard\[requests\.cardwise\.dev/place\]: .*; write one of requests\."
    with pytest.raises(CommandFailed, match=pattern):
        hard(space, {"requests.cardwise.dev/place": "1"})


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client", "server"])
@pytest.mark.parametrize(
    "limits",
    [{P100: 1}, {names.GPU_MEM: "8Gi"}, {names.GPU_MEM: "8Gi", names.GPU_COUNT: 2}, {names.GPU_COUNT: 1}],
    ids=["class", "unit", "split", "whole"],
)
def test_the_manifest_of_a_pod_can_be_applied_again(space: Space, limits: Json, flags: tuple[str, ...]) -> None:
    apply(space, pod("p", limits), *flags)
    space.placed("p")
    before = space.get("p")
    apply(space, pod("p", limits), *flags)
    after = space.get("p")
    assert after["spec"] == before["spec"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


def test_another_amount_for_a_pod_is_refused_with_what_to_do(space: Space) -> None:
    apply(space, pod("p", {P100: 1}))
    with pytest.raises(CommandFailed, match="delete the pod and create it again"):
        apply(space, pod("p", {P100: 2}))
    apply(space, pod("p", {P100: 1}, annotations={"mine": "changed"}))
    assert space.cluster.api.get(paths.pods(space.name, "p"))["metadata"]["annotations"]["mine"] == "changed"
