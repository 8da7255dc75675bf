"""The chart, rendered by the real Helm: its names are those of core/api/names.py, and bad values are refused."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests.helm.rendering import CHART, OFF, OTHER, Render, conditions, documents, get_object, template, text
from webhook.server import sizes

KNOWN = {
    constant for key, constant in vars(names).items() if key.isupper() and isinstance(constant, str)
} | names.USER_ANNOTATIONS


def test_every_name_of_our_domain_is_in_names(render: Render) -> None:
    # Names of webhooks, policies and the CRD end in our domain; resources, annotations and labels begin with it.
    keys = set(re.findall(r"(?<![\w.-])(?:cardwise\.dev|aliyun\.com)/[\w.-]*|ALIYUN_COM_[A-Z_]+", text(render())))
    assert keys >= {names.GPU_MEM, names.DEFAULTS_LABEL, names.GPUSHARE_PREFIX, names.DEVICES_OF, names.SHARE}
    unknown = {key for key in keys if key not in KNOWN | {names.API_VERSION, f"{names.GROUP}/"}}
    assert not unknown


def test_pods_without_a_share_may_name_no_runtime_class_of_ours_either(render: Render) -> None:
    def listed(*settings: str) -> str:
        policy = get_object(render(*settings), "ValidatingAdmissionPolicy", "runtimeclasses.cardwise.dev")
        return str(conditions(policy["spec"])["names-such-a-class"])

    assert listed().endswith("in ['nvidia', 'nvidia-cdi', 'nvidia-legacy', 'nvidia-experimental']")
    assert listed("policies.runtimeClasses={a}", "webhook.runtimeClass=b", "nodes.runtimeClass=a").endswith(
        "['a', 'b']"
    )
    off = text(render("policies.runtimeClasses=null"))
    assert "runtimeclasses.cardwise.dev" not in off


def test_which_resources_of_nvidia_let_a_pod_name_them(render: Render) -> None:
    def plugins(*settings: str) -> str:
        policy = get_object(render(*settings), "ValidatingAdmissionPolicy", "runtimeclasses.cardwise.dev")["spec"]
        (expression,) = [variable["expression"] for variable in policy["variables"] if variable["name"] == "plugins"]
        return str(expression)

    keys = ("nvidia[.]com/gpu", "nvidia[.]com/gpu[.]shared", 'nvidia[.]com/mig-[^"]*')
    assert " || ".join(f"""amounts.matches('"{key}":"[1-9]')""" for key in keys) in " ".join(plugins().split())
    assert """, amounts.matches('"a/b":"[1-9]'))""" in " ".join(plugins("policies.nvidiaResources={a/b}").split())
    assert "exists(amounts, false)" in plugins("policies.nvidiaResources=null")


def test_a_marker_is_no_share(render: Render) -> None:
    for name in (
        "hostpaths.cardwise.dev",
        "nodename.cardwise.dev",
        "environment.cardwise.dev",
        "runtimeclasses.cardwise.dev",
    ):
        policy = text(get_object(render(), "ValidatingAdmissionPolicy", name)).replace("''", "'").replace("\\n", " ")
        compact = re.sub(r"\s+", " ", policy.replace("\\", ""))
        place, bind = (
            f"amounts.split('\"{name}\":').size()" for name in (names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)
        )
        assert f"amounts.split('\"{names.GROUP}/').size() > {place} + {bind} - 1" in compact


def test_a_pod_grows_no_larger_by_updates_than_the_webhook_creates_it(render: Render) -> None:
    policy = text(get_object(render(), "ValidatingAdmissionPolicy", "annotations.cardwise.dev"))
    assert f"variables.otherBytes[1] <= {sizes.MAX_ANNOTATION_BYTES}" in policy
    assert f"variables.otherCounts[1] <= {sizes.MAX_ANNOTATIONS}" in policy
    assert policy.count(f"write at most {sizes.MAX_ANNOTATIONS}") == 5
    assert f"spec.tolerations: too many for a pod that requests GPUs; write at most {sizes.MAX_ENTRIES}" in policy


def test_another_namespace_is_known_everywhere(render: Render) -> None:
    objects = render(*OTHER)
    assert "system:serviceaccount:gpu:cardwise-extender" in text(
        get_object(objects, "ValidatingAdmissionPolicy", "bindings.cardwise.dev")
    )
    assert f"system:serviceaccount:{names.NAMESPACE}" not in text(objects)
    policy = text(get_object(objects, "ValidatingAdmissionPolicy", "annotations.cardwise.dev"))
    assert "in ['me']" in policy.replace("''", "'")


def test_each_policy_is_bound_and_switched_together(render: Render) -> None:
    objects = render()
    policies = {manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "ValidatingAdmissionPolicy"}
    bound = {
        manifest["spec"]["policyName"] for manifest in objects if manifest["kind"] == "ValidatingAdmissionPolicyBinding"
    }
    assert policies == bound
    assert policies
    nodes = [
        text(get_object(rendered, "ValidatingAdmissionPolicy", "deviceplugin.cardwise.dev"))
        for rendered in (objects, render(*OTHER))
    ]
    assert ["node-name" in policy_text for policy_text in nodes] == [True, False]
    assert not [manifest for manifest in render(*OFF) if manifest["kind"].startswith("ValidatingAdmissionPolicy")]


def test_the_defaults_pass_lint(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_it_can_be_an_optional_dependency_of_another_chart(helm: str, tmp_path: Path) -> None:
    """By the usual condition NAME.enabled, which Helm hands on as a value of this chart."""
    (tmp_path / "charts").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / "cardwise")
    dependency = {"name": "cardwise", "version": "0.1.0", "condition": "cardwise.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "0.0.1", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    command = [helm, "template", "platform", str(tmp_path), "--namespace", names.NAMESPACE, "--kube-version", "1.34.0"]
    settings = {"enabled": True, "image": {"repository": "cardwise"}, "scheduler": {"mode": "manual"}}
    for enabled in (True, False):
        (tmp_path / "values.yaml").write_text(
            yaml.safe_dump({"global": {}, "cardwise": settings | {"enabled": enabled}})
        )
        rendered = subprocess.run(command, capture_output=True, text=True, check=False)
        assert rendered.returncode == 0, rendered.stderr
        assert ("kind: Deployment" in rendered.stdout) == enabled


def test_alone_it_cannot_be_disabled_as_a_whole(helm: str) -> None:
    assert "enabled: has an effect only in a chart" in template(helm, "enabled=false").stderr


def test_a_namespace_that_the_chart_makes_admits_the_parts_on_nodes(render: Render) -> None:
    """Clusters may enforce Pod Security's profile baseline, as Talos does, which forbids hostPath and privileges."""
    (namespace,) = [manifest for manifest in render("namespace.create=true") if manifest["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "helm/cardwise/README.md"])
def test_who_installs_by_the_documents_labels_the_namespace_first(page: str) -> None:
    label = "kubectl label namespace cardwise-system pod-security.kubernetes.io/enforce=privileged"
    before, install, after = (CHART.parents[1] / page).read_text().partition("\nhelm install cardwise ")
    assert install
    assert label in before.splitlines()[-1]
    assert after.split("\n")[1].startswith("helm test cardwise "), "before any pod that asks for a GPU"


def test_who_applies_what_is_rendered_applies_no_hook_and_may_do_so_again(helm: str) -> None:
    """kubectl knows no hooks: it would run those of a deletion at once, and cannot change a Job for another image."""
    page = (CHART.parents[1] / "docs" / "install.md").read_text()
    (command,) = re.findall(r"^(helm template .*) \| kubectl apply --server-side -f -$", page, re.MULTILINE)
    assert "`helm template --no-hooks | kubectl apply`" in (CHART / "values.yaml").read_text().replace("\n  # ", " ")

    def rendered(tag: str) -> dict[tuple[str, str, str], Json]:
        words = command.replace("$REGISTRY", "r.example").replace("helm/cardwise", str(CHART), 1).split()
        words += ["--kube-version=1.34.0", f"--set=image.tag={tag}"]
        done = subprocess.run([helm, *words[1:]], capture_output=True, text=True, check=True)
        objects = documents(done.stdout)
        kinds = [manifest["kind"] for manifest in objects]
        assert kinds[: kinds.index("Namespace")] == ["PriorityClass"], "what comes before it is in no namespace"
        assert "helm.sh/hook:" not in done.stdout
        return {
            (manifest["kind"], manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]): manifest
            for manifest in objects
        }

    first, second = rendered("v1"), rendered("v2")
    assert first.keys() == second.keys()
    assert first != second
    changed = {kind for kind, *_ in (key for key in first if first[key] != second[key])}
    assert changed <= {"Deployment", "DaemonSet"}
    assert {kind for kind, *_ in first} & {"Job", "Pod"} == set()
    for key in first:
        if key[0] in ("Deployment", "DaemonSet"):
            assert first[key]["spec"]["selector"] == second[key]["spec"]["selector"]
