"""The commands by their arguments: what comes out, where, and with which errors."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from cardwise.cli import main, rights
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from tests.build import gpu_quota, resource_class
from tests.cli.clusters import K80, K80_CLASS, Cluster, allocated, lists, run, waiting


def test_classes_by_every_output(monkeypatch):
    table = run(monkeypatch, lists(), "classes").output
    assert "NAMESPACE" not in table
    assert "NAMESPACE" in run(monkeypatch, lists(), "classes", "-o", "wide").output
    of_one = run(monkeypatch, lists(), "classes", K80_CLASS).output
    assert (table.split()[:9], "big" in of_one, "NAMESPACE" in of_one) == (of_one.split()[:9], False, True)
    as_json = json.loads(run(monkeypatch, lists(), "classes", "-o", "json").output)
    assert as_json == yaml.safe_load(run(monkeypatch, lists(), "classes", "-o", "yaml").output)
    assert [resource_class["name"] for resource_class in as_json["classes"]] == ["big", K80_CLASS]


def test_an_unknown_class_is_named_with_the_known_ones_and_a_broken_one_with_its_mistake(monkeypatch):
    refused = run(monkeypatch, lists(), "classes", "k80")
    assert refused.exit_code == 1
    assert "no ResourceClass 'k80'; available: big, nvidia.tesla.k80" in refused.stderr
    broken = lists(resourceclasses=[resource_class("k80", selector={})])
    assert (
        "warning: ResourceClass k80: spec.selector: an empty selector"
        in run(monkeypatch, broken, "classes", "k80").stderr
    )


def test_a_cluster_without_classes_and_quotas_says_so(monkeypatch):
    api = lists(resourceclasses=[], gpuquotas=[])
    assert "there is no ResourceClass yet" in run(monkeypatch, api, "classes").stderr
    completed = run(monkeypatch, api, "quota", "-n", "team-a")
    assert completed.exit_code == 0
    assert completed.stdout == ""
    assert "namespace 'team-a' has no GPUQuota" in completed.stderr
    assert json.loads(run(monkeypatch, api, "quota", "-A", "-o", "json").stdout) == {
        "gpuQuotas": [],
        "resourceQuotas": [],
    }


def test_nodes_that_take_no_new_pods_are_named_by_each_command_that_shows_nodes(monkeypatch):
    api = lists()
    api.change("nodes", "n1", status={"conditions": [{"type": "Ready", "status": "Unknown"}]})
    api.change("nodes", "n2", spec={"unschedulable": True})
    silent = "note: node n1 takes no new pods: it is NotReady (its kubelet does not report)\n"
    for command in (["nodes"], ["top", "-1"], ["inspect"]):
        completed = run(monkeypatch, api, *command)
        assert silent + "note: node n2 takes no new pods: it is cordoned\n" in completed.stderr + completed.stdout, (
            command
        )
        states = {
            node["name"]: node["unschedulableReason"]
            for node in json.loads(run(monkeypatch, api, *command, "-o", "json").stdout)["nodes"]
        }
        assert states == {"n1": "NotReady (its kubelet does not report)", "n2": "cordoned"}, command
    assert "n2 takes" not in run(monkeypatch, api, "inspect", "n1").stderr
    api.forbid("nodes")
    completed = run(monkeypatch, api, "top", "-1")
    assert (completed.exit_code, "takes no new pods" in completed.stdout) == (0, False)


def test_a_problem_of_many_pods_is_one_warning(monkeypatch):
    api = lists()
    api.add("pods", *(waiting("team-a", f"p{number}", {"aliyun.com/gpu-mem": "100"}) for number in range(5)))
    for command in ("nodes", "classes", "inspect"):
        errors_shown = run(monkeypatch, api, command).stderr
        (warning,) = (line for line in errors_shown.splitlines() if line.startswith("warning"))
        assert warning == (
            "warning: team-a/p0, team-a/p1, team-a/p2 and 2 more: spec.containers[0].resources.limits: the pod was not "
            "rewritten by the Cardwise webhook; run cardwise explain for the cause and the remedy"
        )


def test_quota_of_one_namespace_and_of_all(monkeypatch):
    assert "13441/32768" in run(monkeypatch, lists(), "quota", "-n", "team-a").output
    assert "13441/32768" in run(monkeypatch, lists(), "quota", "-A").output
    assert "13441/32768" not in run(monkeypatch, lists(), "quota", "-n", "team-b").output


def test_explain_pod_of_a_full_quota(monkeypatch):
    api = lists()
    limits = {f"cardwise.dev/{K80_CLASS}": "1", "aliyun.com/gpu-mem": "100", "cardwise.dev/share": "1"}
    api.add("pods", waiting("team-a", "more", limits))
    text = run(monkeypatch, api, "explain", "pod", "more", "-n", "team-a").output
    assert f"requests 100 MiB of class {K80_CLASS} (container main)" in text
    assert f"GPUQuota team does not allow this on {K80_CLASS}: 2 of 2 shares used, 1 requested." in text


def test_explain_says_what_it_takes_the_policy_for_where_one_decides(monkeypatch):
    api = lists()
    limits = {"aliyun.com/gpu-mem": "100", "cardwise.dev/share": "1"}
    api.add("pods", waiting("team-a", "more", limits))
    completed = run(monkeypatch, api, "explain", "pod", "more", "-n", "team-a")
    assert completed.exit_code == 0
    assert (
        "assuming that the extender's policy is priced: there is no ConfigMap cardwise-workload in" in completed.stderr
    )
    placed = run(monkeypatch, api, "explain", "pod", "notebook", "-n", "team-a")
    assert (placed.exit_code, placed.stderr) == (0, "")


def test_a_missing_right_is_told_with_the_command_that_gives_it(monkeypatch):
    api = lists()
    api.forbid("extendedresources", "resourceclasses", "pods")
    monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
    monkeypatch.setattr(sys, "argv", ["cardwise", "inspect"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert "the right to list extendedresources in the whole cluster is missing" in str(ended.value.code)
    assert str(ended.value.code).endswith(GIVES_VIEW)


GIVES_VIEW = "with: kubectl create clusterrolebinding cardwise-view-jane --clusterrole=cardwise-view --user=jane"
ASK_FOR_VIEW = "is missing (ClusterRole cardwise-view, docs/admin.md#looking)"


@pytest.mark.parametrize(
    ("denied", "command"),
    [
        ('cannot list resource "extendedresources" in API group "cardwise.dev" at the cluster scope', GIVES_VIEW),
        (
            'cannot list resource "nodes" in API group "" at the cluster scope',
            "with: kubectl create clusterrolebinding cardwise-inspect-jane --clusterrole=cardwise-inspect --user=jane",
        ),
        (
            'cannot list resource "pods" in API group "" in the namespace "team"',
            "with: kubectl create rolebinding view-jane -n team --clusterrole=view --user=jane",
        ),
        (
            'cannot list resource "gpuquotas" in API group "cardwise.dev" in the namespace "team"',
            "with: kubectl create rolebinding cardwise-view-jane -n team --clusterrole=cardwise-view --user=jane",
        ),
        (
            'cannot patch resource "extendedresources" in API group "cardwise.dev" at the cluster scope',
            "with: kubectl create clusterrolebinding cardwise-drain-jane --clusterrole=cardwise-drain --user=jane",
        ),
    ],
)
def test_each_missing_right_has_its_command(denied, command):
    error = errors.Forbidden(403, "Forbidden", f'x is forbidden: User "jane" {denied}')
    assert rights.describe_refusal(error).endswith(command)


def test_a_missing_right_is_said_in_a_few_words():
    for at, place in (("at the cluster scope", "the whole cluster"), ('in the namespace "team"', "namespace team")):
        denied = f'pods is forbidden: User "jane" cannot list resource "pods" in API group "" {at}'
        error = errors.Forbidden(403, "Forbidden", denied)
        assert rights.describe_refusal(error).startswith(
            f"the right to list pods in {place} is missing; an administrator grants"
        )
        assert rights.describe_missing_right(error).startswith(
            f"the right to list pods in {place} is missing (ClusterRole "
        )
        assert len(rights.describe_missing_right(error)) < 120
    error = errors.Forbidden(403, "Forbidden", "somebody's webhook says no")
    assert rights.describe_refusal(error) == rights.describe_missing_right(error) == "somebody's webhook says no", (
        "no role helps"
    )


@pytest.mark.parametrize(
    ("user", "binding"),
    [
        ("system:serviceaccount:team:ann", "cardwise-view-system:serviceaccount:team:ann --clusterrole=cardwise-view "),
        ("https://idp.example/#ann", "cardwise-view-https:-idp.example-ann --clusterrole=cardwise-view "),
    ],
)
def test_the_right_is_given_to_the_user_whom_it_was_denied_under_a_name_of_its_own(user, binding):
    denied = f'User "{user}" cannot list resource "gpuquotas" in API group "cardwise.dev" at the cluster scope'
    message = rights.describe_refusal(errors.Forbidden(403, "Forbidden", denied))
    assert f"kubectl create clusterrolebinding {binding}" in message
    assert shlex.split(message)[-1] == f"--user={user}"
    assert "system:authenticated" not in message


def test_a_kubeconfig_without_credentials_is_no_reason_to_give_everybody_rights():
    denied = 'User "system:anonymous" cannot list resource "nodes" in API group "" at the cluster scope'
    error = errors.Forbidden(403, "Forbidden", denied)
    for message in (rights.describe_refusal(error), rights.describe_missing_right(error)):
        assert "your kubeconfig has no credentials; log in" in message
        assert "kubectl create" not in message


CARDS_DENIED = (
    'extendedresources is forbidden: User "jane" cannot {} resource "extendedresources" in API group "cardwise.dev"'
)


@pytest.mark.parametrize(
    ("command", "denied", "role"),
    [
        ("cordon", CARDS_DENIED.format("list"), "cardwise-drain"),
        ("drain", CARDS_DENIED.format("list"), "cardwise-drain"),
        ("defrag", CARDS_DENIED.format("list"), "cardwise-defrag"),
        ("defrag", 'User "jane" cannot list resource "poddisruptionbudgets" in API group "policy"', "cardwise-defrag"),
        ("defrag", CARDS_DENIED.format("patch"), "cardwise-drain"),
        ("gangs", CARDS_DENIED.format("list"), "cardwise-inspect"),
        ("simulate", CARDS_DENIED.format("list"), "cardwise-inspect"),
    ],
)
def test_a_command_that_needs_more_than_it_was_denied_has_a_role_for_all_of_it(command, denied, role):
    message = rights.describe_refusal(errors.Forbidden(403, "Forbidden", denied), command)
    assert message.endswith(f"kubectl create clusterrolebinding {role}-jane --clusterrole={role} --user=jane")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gangs", "-n", "x/y"], "'x/y' is not a valid name of a Kubernetes object: it contains '/'"),
        (["explain", "deploy/x%2f"], "'x%2f' is not a valid name of a Kubernetes object: it contains '%'"),
        (["drain", "n),m/0"], "no object has the label cardwise.dev/node='n),m': it is not a valid label value"),
    ],
)
def test_what_can_be_no_name_is_told_in_a_line_and_nobody_is_asked(monkeypatch, words, says):
    api = lists()
    monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
    monkeypatch.setattr(sys, "argv", ["cardwise", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == f"cardwise: {says}"
    assert api.sent() == []


def test_which_command_ran_is_known_to_who_tells_of_its_rights(monkeypatch):
    api = lists()
    api.forbid("extendedresources", "resourceclasses", "pods")
    monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
    monkeypatch.setattr(sys, "argv", ["cardwise", "cordon", "n1/0"])
    with pytest.raises(SystemExit, match="--clusterrole=cardwise-drain"):
        main.main()


def test_a_class_that_is_not_there_is_an_error_for_who_may_read_no_card(monkeypatch):
    completed = run(monkeypatch, as_a_user_of("team-a", "extendedresources"), "classes", "nope")
    assert completed.exit_code == 1
    assert "there is no ResourceClass 'nope'" in completed.stderr


def test_without_rights_on_cards_classes_and_quotas_are_as_the_extender_says(monkeypatch):
    api = as_a_user_of("team-a", "extendedresources")
    api.change("resourceclasses", K80_CLASS, status={"devices": 3, "healthyDevices": 2, "freeMiB": 8441})
    used = [{"class": K80_CLASS, "shares": 2, "memoryMiB": 13441, "gpus": 1}]
    api.change("gpuquotas", "team", "team-a", status={"used": used})
    completed = run(monkeypatch, api, "classes")
    assert completed.exit_code == 0, completed.output
    rows = [line.split() for line in completed.stdout.splitlines()]
    assert rows[0] == run(monkeypatch, lists(), "classes").stdout.splitlines()[0].split()
    assert [K80_CLASS, "3", "-", "8441", "-", "-", "whole", "GPU", "0", "yes"] in rows
    assert "without the users of each class: the right to list extendedresources" in completed.stderr
    assert ASK_FOR_VIEW in completed.stderr
    assert {
        resource_class["name"]
        for resource_class in json.loads(run(monkeypatch, api, "classes", "-o", "json").stdout)["classes"]
    } == {
        "big",
        K80_CLASS,
    }
    quota = run(monkeypatch, api, "quota")
    assert quota.exit_code == 0
    assert ["team-a", "team", K80_CLASS, "2/2", "13441/-", "1/1", "Wait"] in [
        line.split() for line in quota.stdout.splitlines()
    ]
    assert "without the pods" in quota.stderr


def test_devices_are_apart_also_for_who_may_read_no_card(monkeypatch):
    api = as_a_user_of("team-a", "extendedresources")
    rdma = resource_class("rdma", kind="rdma")
    api.add("resourceclasses", rdma | {"status": {"devices": 4, "nodes": 2, "healthyDevices": 3}})
    cards, devices = run(monkeypatch, api, "classes").stdout.split("\n\n")
    assert "rdma" not in cards
    assert [line.split() for line in devices.splitlines()] == [
        ["DEVICE-CLASS", "DEVICES", "NODES", "HEALTHY"],
        ["rdma", "4", "2", "3"],
    ]


@pytest.mark.parametrize("command", [("inspect",), ("top", "--once"), ("nodes",)])
def test_without_rights_on_cards_types_and_ones_own_pods_are_shown(monkeypatch, command):
    api = as_a_user_of("team-a", "extendedresources")
    api.change("resourceclasses", K80_CLASS, status={"devices": 3, "freeMiB": 8441})
    completed = run(monkeypatch, api, *command)
    assert completed.exit_code == 0, completed.output
    rows = [line.split() for line in completed.stdout.splitlines()]
    assert [K80_CLASS, "3", "-", "8441", "-", "-", "whole", "GPU", "0", "yes"] in rows
    assert ["team-a/notebook", "n1", "0", "2000"] in rows
    assert "team-b" not in completed.output
    assert ASK_FOR_VIEW in completed.stderr
    of_node = run(monkeypatch, api, *command, "n2", "-o", "json")
    assert [pod["name"] for pod in json.loads(of_node.stdout)["pods"]] == ["train"]
    api.forbid("extendedresources", "resourceclasses", "pods of all")
    assert "team-a/notebook" in run(monkeypatch, api, *command).stdout
    api.forbid("extendedresources", "pods")
    output = run(monkeypatch, api, *command).stdout
    assert (K80_CLASS in output, "team-a" in output) == (True, False)


def test_inspect_without_nodes_and_others_pods_shows_the_cards(monkeypatch):
    completed = run(monkeypatch, as_a_user_of("team-b"), "inspect")
    assert completed.exit_code == 0
    assert "unknown" in completed.stdout
    assert "you may not read the pods of all namespaces" in completed.stderr


def test_who_may_not_read_nodes_sees_classes_and_quotas(monkeypatch):
    api = lists()
    api.forbid("nodes")
    assert run(monkeypatch, api, "classes").exit_code == 0
    assert run(monkeypatch, api, "quota", "-A").exit_code == 0


LIMITS = {f"cardwise.dev/{K80_CLASS}": "1", "aliyun.com/gpu-mem": "9000", "cardwise.dev/share": "1"}


def as_a_user_of(namespace: str, *forbidden: str) -> Cluster:
    """`lists` for who may read what is in the namespace, and with the extender's word on each GPU."""
    api = lists()
    of_n1, p100, _, whole = api.objects("extendedresources")
    api.add(
        "extendedresources",
        allocated(of_n1, 3000, 2),
        allocated(p100, 4069, core=25),
        allocated(whole, K80, core=100, whole=True),
    )
    api.add("pods", waiting(namespace, "more", LIMITS))
    api.kube.namespace = namespace
    api.forbid("pods of all", "nodes", *forbidden)
    return api


def test_classes_for_who_may_not_read_all_pods_have_the_same_numbers(monkeypatch):
    api = as_a_user_of("team-b")
    completed = run(monkeypatch, api, "classes")
    assert completed.exit_code == 0
    assert completed.stdout == run(monkeypatch, lists(), "classes").stdout
    assert "you may not read the pods of all namespaces" in completed.stderr
    users = run(monkeypatch, api, "classes", K80_CLASS).stdout.split("\n\n")[1].splitlines()[1:]
    assert [row.split() for row in users] == [
        ["other", "namespaces", "2", str(2000 + K80), "1"],
        ["team-b", "1", "1000", "0"],
    ]
    api.forbid("pods")
    assert run(monkeypatch, api, "classes").stdout == completed.stdout


def test_explain_for_who_may_not_read_all_pods_says_what_others_leave(monkeypatch):
    completed = run(monkeypatch, as_a_user_of("team-b"), "explain", "pod", "more")
    assert completed.exit_code == 0
    assert "you may not read the pods of all namespaces" in completed.stderr
    assert "GPU 0 Tesla K80: 8441 of 11441 MiB free, 559 MiB short" in completed.stdout
    assert "held by other namespaces/pods (2000 MiB), team-b/serve (1000 MiB)" in completed.stdout


def test_explain_for_who_may_read_no_card_says_what_the_pod_tells(monkeypatch):
    api = as_a_user_of("team-b", "extendedresources", "leases")
    completed = run(monkeypatch, api, "explain", "pod", "more")
    assert completed.exit_code == 0
    assert "the right to list extendedresources in the whole cluster is missing" in completed.stderr
    assert completed.stdout == (
        f"pod team-b/more requests 9000 MiB of class {K80_CLASS} (container main).\n"
        "Its placement policy is priced, from the extender's setting (assumed, since it is unknown here).\n"
        "kube-scheduler has not reported on it yet.\n"
    )
    conditions = [{"type": "PodScheduled", "message": "0/2 nodes"}]
    api.change("pods", "more", "team-b", status={"conditions": conditions})
    assert "kube-scheduler says: 0/2 nodes" in run(monkeypatch, api, "explain", "pod", "more").stdout
    api.change("pods", "serve", "team-b", spec={"containers": [{"name": "main", "resources": {"limits": LIMITS}}]})
    placed = run(monkeypatch, api, "explain", "pod", "serve").stdout
    assert "is on node n1" in placed
    assert "GPU 0 GPU-n1-0\n" in placed, "nothing is said of who else is on it"


def test_the_namespace_is_that_of_the_context_unless_one_is_named(monkeypatch):
    api = lists()
    api.kube.namespace = "team-a"
    assert "13441/32768" in run(monkeypatch, api, "quota").output
    assert "13441/32768" not in run(monkeypatch, api, "quota", "-n", "team-b").output
    assert "no pod 'none' in namespace 'team-a'" in run(monkeypatch, api, "explain", "pod", "none").output
    assert (
        "no pod 'none' in namespace 'team-b'" in run(monkeypatch, api, "explain", "pod", "none", "-n", "team-b").output
    )
    assert "in namespace 'team-a'" in run(monkeypatch, api, "gangs").output


def test_an_entry_whose_class_is_gone_does_not_look_like_a_limit(monkeypatch):
    hard = [{"class": "p100", "shares": 1}, {"class": "nvidia.tesla.p100", "shares": 1}, {"class": "odd", "gpus": 1}]
    api = lists(gpuquotas=[gpu_quota(*hard, namespace="team-b")])
    api.add("resourceclasses", resource_class("odd", selector={}))
    gone, of_model, odd = run(monkeypatch, api, "quota", "-n", "team-b").stdout.splitlines()[1:]
    assert gone.split()[2:] == ["p100:", "no", "such", "class", "-", "-", "-", "Wait"]
    assert of_model.split()[2:] == ["nvidia.tesla.p100", "1/1", "4069/-", "0/-", "Wait"]
    assert "odd: unreadable class" in odd
    entries = json.loads(run(monkeypatch, api, "quota", "-n", "team-b", "-o", "json").stdout)["gpuQuotas"]
    assert [entry.get("problem") for entry in entries] == ["no such class", None, "unreadable class"]


def test_ctrl_c_before_anything_is_seen_ends_without_a_word(monkeypatch):
    def interrupted(_path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(KubeClient, "load", interrupted)
    completed = CliRunner().invoke(main.cli, ["top"])
    assert (completed.exit_code, completed.output) == (130, "")


@pytest.mark.parametrize(
    "words",
    [
        ["--context", "c", "--kubeconfig", "FILE", "quota"],
        ["quota", "--context", "c", "--kubeconfig", "FILE"],
        ["--context", "c", "quota", "--kubeconfig", "FILE"],
        ["--context", "other", "quota", "--context", "c", "--kubeconfig", "FILE"],
    ],
)
def test_context_and_kubeconfig_stand_before_the_command_or_behind(monkeypatch, tmp_path, words):
    file = tmp_path / "config"
    file.write_text("")
    api, loads = lists(), []
    monkeypatch.setattr(KubeClient, "load", lambda path, **options: loads.append((path, options)) or api.kube)
    done = CliRunner().invoke(main.cli, [str(file) if word == "FILE" else word for word in words])
    assert done.exit_code == 0, done.output
    assert loads == [(file, {"context": "c"})]


def command_of(name: str) -> click.Command:
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", sorted(main._COMMANDS.keys() - {"completion", "report", "scheduler-config"}))
def test_every_command_that_asks_a_cluster_takes_a_context(name):
    options = {option for parameter in command_of(name).params for option in parameter.opts}
    assert {"--context", "--kubeconfig"} <= options


def test_a_cluster_without_cardwise_is_told_from_one_that_answers_wrongly(monkeypatch):
    def fails(**_):
        raise errors.UnknownKind(404, "", "404 page not found")

    monkeypatch.setattr(main, "cli", fails)
    with pytest.raises(
        SystemExit,
        match="cardwise: this cluster has no CRDs",
    ):
        main.main()


def test_the_help_says_of_each_command_in_one_line_what_it_is():
    modules = {path.stem for path in (Path(main.__file__).parent / "commands").glob("*.py")} - {"__init__"}
    assert {module for module, _ in main._COMMANDS.values()} == modules | {"cardwise.web.command"}
    help_ = CliRunner().invoke(main.cli, ["--help"], terminal_width=80).output.splitlines()
    for name, (_, summary) in main._COMMANDS.items():
        command = command_of(name)
        assert (command.name, command.get_short_help_str(30)) == (name, summary)
        assert [line for line in help_ if line.split() == [name, *summary.split()]], name


def loaded_for(*words: str) -> tuple[str, set[str]]:
    """What `cardwise` says, and the modules that it has loaded for that."""
    script = f"import sys; sys.argv = ['cardwise', *{words!r}]; from cardwise.cli.main import main\n"
    script += "try: main()\nfinally: print('LOADED', *sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    help_, _, loaded = output.partition("LOADED ")
    return help_, set(loaded.split())


HEAVY = {"cardwise.kube", "kubernetes", "urllib3", "yaml", "msgspec", "numpy", "rich"}


def test_the_help_waits_for_nothing_that_it_does_not_show():
    """It is what people type first: 0.5 s of a core with all commands, 0.1 s without."""
    help_, loaded = loaded_for("--help")
    assert all(f"\n  {name} " in help_ for name in main._COMMANDS)
    assert HEAVY & loaded == set()
    assert [name for name in loaded if name.startswith("cardwise.cli.commands.")] == []


def test_nor_does_that_of_inspect():
    help_, loaded = loaded_for("inspect", "--help")
    assert "--details" in help_
    assert HEAVY & loaded == set()


def test_and_inspect_itself_for_no_more_of_the_cluster_than_it_shows(tmp_path):
    """Half a second of a core with the official client, a quarter of one without."""
    api, path = lists(), tmp_path / "config"
    clusters = [{"name": "c", "cluster": {"server": api.serve()}}]
    contexts = [{"name": "c", "context": {"cluster": "c"}}]
    path.write_text(yaml.safe_dump({"current-context": "c", "clusters": clusters, "contexts": contexts}))
    try:
        output, loaded = loaded_for("inspect", "--kubeconfig", str(path))
    finally:
        api.close()
    assert "Allocated/Total GPU Memory In Cluster:" in output
    not_shown = {"numpy", "rich", "cardwise.core.preemption", "cardwise.core.gangs", "cardwise.simulation"}
    assert (not_shown | {"kubernetes", "requests", "oauthlib", "websocket"}) & loaded == set()


def test_a_mistyped_command_gets_a_suggestion():
    done = CliRunner().invoke(main.cli, ["explian", "pod", "x"])
    assert done.exit_code == 2
    assert "No such command 'explian'" in done.output
    assert "explain" in done.output.partition("No such command 'explian'")[2]
    assert "mean" not in CliRunner().invoke(main.cli, ["zzzzzz"]).output


@pytest.mark.parametrize(
    "command", ["advise", "bundle", "defrag", "doctor", "explain", "idle", "nodes", "simulate", "top"]
)
def test_where_cardwise_is_installed_has_one_name(command):
    output = CliRunner().invoke(main.cli, [command, "--help"]).output
    assert "--cardwise-namespace" in output
    assert "CARDWISE_NAMESPACE" in output
    assert "--installed" not in output
