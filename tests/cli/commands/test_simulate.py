"""`cardwise simulate`: the tables as people see them, the files that it writes, what it says of mistakes."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner, Result

from cardwise.cli import main
from cardwise.core.api.policies import CARD_POLICIES
from tests.build import resource_class
from tests.cli import clusters
from tests.cli.clusters import K80, P100, Cluster, card, device, lists, placed, waiting
from tests.simulation import smalltraces


@pytest.fixture(name="trace")
def _trace(tmp_path):
    folder = tmp_path / "openb"
    folder.mkdir()
    return str(smalltraces.write_trace(folder, "default"))


def run(*args: str) -> Result:
    return CliRunner().invoke(main.cli, ["simulate", *args])


def live(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str) -> Result:
    return clusters.run(monkeypatch, api, "simulate", "--from-cluster", *args)


def cells(text: str, policy: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if policy in line.split()]


GOLDEN = """\
Allocated GPUs in percent, by the percentage requested so far;
standard deviation over the seeds and idle GPUs at 100%, unusable part of the idle GPUs at 95%:
TRACE    POLICY   SEEDS  80%    90%    95%    100%   110%   130%   S.D.  IDLE GPUS  FRAGMENTED  FIRST REFUSAL
default  binpack  2      75.80  80.80  82.39  94.32  97.73  98.30  2.05  1          33.8%       87.8%
default  spread   2      62.16  67.16  67.16  67.73  72.84  81.36  1.82  7          48.3%       64.4%

Pods refused in percent, by the number of GPUs requested:
TRACE    POLICY   NO GPU  TO 1/4  TO 1/2  BELOW 1  1      TO 2  TO 4   OVER 4
default  binpack  0.00    34.38   21.43   37.50    27.27  -     0.00   -
default  spread   0.00    0.00    3.57    43.75    63.64  -     66.67  -
"""


def test_the_tables(trace):
    completed = run(trace, "--policy", "binpack", "--policy", "spread", "--seeds", "2", "--processes", "1")
    assert completed.exit_code == 0
    assert completed.output == GOLDEN


def test_every_policy_where_none_is_named(trace):
    output = run(trace, "--seeds", "1", "--demand", "0.5", "--processes", "1").output
    for policy in ("binpack", "priced", "spread"):
        (allocated, refused) = cells(output, policy)
        assert float(allocated[3]) > 45, "AT 50%"
        assert set(refused[2:]) <= {"0.00", "-"}


def test_rows_for_programs(trace):
    of = ("--policy", "binpack", "--seeds", "2", "--seed", "7", "--processes", "1")
    rows = list(csv.DictReader(io.StringIO(run(trace, *of, "-o", "csv").output)))
    assert {row["seed"] for row in rows} == {"7", "8"}
    assert {row["trace"] for row in rows} == {"default"}
    runs = json.loads(run(trace, *of, "-o", "json").output)["runs"]
    assert [simulated["seed"] for simulated in runs] == [7, 8]
    assert "seconds" not in runs[0]
    by_csv = [float(row["allocated"]) for row in rows if row["seed"] == "7"]
    assert by_csv == pytest.approx([point["allocated"] for point in runs[0]["points"]], abs=1e-3)


def test_pods_that_leave(trace):
    of = ("--churn", "--load", "0.3", "--lifetimes", "1", "--policy", "binpack", "--seeds", "1", "--processes", "1")
    completed = run(trace, *of)
    assert completed.exit_code == 0
    assert 5 < float(cells(completed.output, "binpack")[0][3]) < 60
    rows = list(csv.DictReader(io.StringIO(run(trace, *of, "-o", "csv").output)))
    assert float(rows[-1]["time"]) == pytest.approx(3.0, abs=0.2)
    refused = run(trace, *of, "--pod", "gpu=1")
    assert refused.exit_code == 2
    assert "--pod needs a simulation that ends with a full cluster, and" in refused.stderr


def test_several_lists_of_pods_and_plots_of_each(trace, tmp_path):
    smalltraces.write_trace(tmp_path / "openb", "other", list(smalltraces.rows(((30, 1, 500, ""),))))
    folder = tmp_path / "plots"
    of = ("--pods", "default", "--pods", "other", "--seeds", "1", "--policy", "spread", "--processes", "1")
    completed = run(trace, *of, "--plots", str(folder))
    assert completed.exit_code == 0, completed.output
    assert [row[0] for row in cells(completed.stdout, "spread")] == ["default", "other", "default", "other"]
    written = sorted(path.name for path in folder.iterdir())
    plots = ("allocated", "fragmented", "refused")
    assert written == [f"{trace}-{plot}.svg" for trace in ("default", "other") for plot in plots]
    for path in folder.iterdir():
        text = path.read_text()
        assert "spread" in text
        assert not re.search(r"(src|xlink:href)=.http", text), "nothing is fetched by who looks at it"


def test_plots_without_the_library_are_told_before_anything_runs(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygal", None)
    completed = run(trace, "--plots", str(tmp_path / "plots"))
    assert completed.exit_code == 1
    assert "pip install 'cardwise[simulate]'" in completed.stderr
    assert not (tmp_path / "plots").exists()


def test_what_more_fits_after_a_trace(trace):
    of = ("--policy", "binpack", "--seeds", "1", "--demand", "0.2", "--processes", "1")
    output = run(trace, *of, "--pod", "gpu=8,cpu=1", "--pod", "gpu-mem=100", "--add-nodes", "2x8xG2:1000,cpu=64").output
    eight, small = cells(output.partition("More pods")[2], "binpack")
    assert [int(count) for count in eight[2:]] == [int(eight[2]), int(eight[2]) + 2]
    assert int(small[3]) == int(small[2]) + 160, "ten on each added GPU"


def test_nodes_that_are_added_to_a_trace(trace):
    of = ("--policy", "binpack", "--seeds", "1", "--demand", "1.0", "--processes", "1", "-o", "json")
    alone = json.loads(run(trace, *of).output)["runs"][0]
    enlarged = json.loads(run(trace, *of, "--add-nodes", "2x8xG2:1000").output)["runs"][0]
    assert sum(row["arrived"] for row in enlarged["refused"]) > sum(row["arrived"] for row in alone["refused"])


def test_nobody_else_waits_for_numpy():
    code = "import sys, cardwise.cli.main; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# The live cluster.


def test_how_many_more_fit_now_and_with_nodes_added(monkeypatch):
    completed = live(monkeypatch, lists(), "--pod", "gpu-mem=4000", "--add-nodes", f"1x2xTesla-P100:{P100}")
    assert completed.exit_code == 0, completed.output
    # Free: 8441 on n1's K80, 12207 on its P100; n2 has a sick card and one that is held whole.
    assert [row[2:] for row in cells(completed.output, "binpack")] == [["5", "13"]]
    assert [row[2:] for row in cells(completed.output, "priced")] == [["5", "13"]]


def test_a_class_holds_for_nodes_that_are_added_under_another_spelling(monkeypatch):
    of = ("--pod", "gpu-mem=4000,class=nvidia.tesla.p100", "--policy", "binpack")
    assert cells(live(monkeypatch, lists(), *of, "--add-nodes", f"1x1xtesla-p100:{P100}").output, "binpack") == [
        ["gpu-mem=4000,class=nvidia.tesla.p100", "binpack", "3", "7"]
    ]
    output = live(monkeypatch, lists(), *of, "--add-nodes", f"1x1xTesla-K80:{K80}").output
    assert cells(output, "binpack")[0][2:] == ["3", "3"]


def test_cpu_and_memory_of_nodes_and_cordons_count(monkeypatch):
    api = lists()
    room = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    plain = {"metadata": {"namespace": "x", "name": "plain", "uid": "plain"}, "status": {"phase": "Running"}}
    asks = {"resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}}}
    api.add("pods", {**plain, "spec": {"nodeName": "n1", "containers": [{"name": "main", **asks}]}})
    api.replace("nodes", {"metadata": {"name": "n1"}, "status": {"allocatable": room}})
    of = ("--pod", "gpu-mem=100,cpu=1", "--policy", "spread", "-o", "json")
    assert json.loads(live(monkeypatch, api, *of).output)["runs"] == [
        {"pod": "gpu-mem=100,cpu=1", "policy": "spread", "now": 2}
    ]
    api.change("nodes", "n1", spec={"unschedulable": True})
    assert json.loads(live(monkeypatch, api, *of).output)["runs"][0]["now"] == 0


def test_pods_of_a_file_of_manifests(monkeypatch, tmp_path):
    container = {"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "4000", "cpu": "1"}}}
    template = {"metadata": {}, "spec": {"containers": [container]}}
    objects = [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "serve"}, "spec": {"template": template}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "serve"}, "spec": {}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [container]}},
    ]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    output = live(monkeypatch, lists(), "--pod", str(path), "--policy", "binpack").output
    assert [row[0] for row in cells(output, "binpack")] == ["deployment/serve", "pod/one"]
    assert {row[2] for row in cells(output, "binpack")} == {"5"}


def test_bare_numbers_of_manifests_count_the_unit_that_is_said(monkeypatch, tmp_path):
    def fits(unit: str, **limits: str) -> str:
        pod = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"resources": {"limits": limits}}]}}
        (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
        of = ("--pod", str(tmp_path / "pod.yaml"), "--gpu-mem-unit", unit, "--policy", "binpack")
        ((_, _, more_pods),) = cells(live(monkeypatch, lists(), *of).output, "binpack")
        return more_pods

    gib = fits("GiB", **{"aliyun.com/gpu-mem": "4"})
    assert gib == fits("MiB", **{"aliyun.com/gpu-mem": "4096"}) == fits("GiB", **{"aliyun.com/gpu-mem": "4Gi"})
    of_a_running_pod = {"aliyun.com/gpu-mem": "4096", "cardwise.dev/share": "1"}
    assert gib == fits("GiB", **of_a_running_pod) != fits("GiB", **{"aliyun.com/gpu-mem": "8"})


def test_a_bare_name_of_a_class_is_the_class(monkeypatch, tmp_path):
    limits = {"aliyun.com/gpu-mem": "4000", "nvidia.tesla.k80": "1"}
    pod = {"kind": "Pod", "metadata": {"name": "k80"}, "spec": {"containers": [{"resources": {"limits": limits}}]}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    of = ("--pod", str(tmp_path / "pod.yaml"), "--policy", "binpack", "--add-nodes", f"1x1xTesla P100:{P100}")
    assert cells(live(monkeypatch, lists(), *of).output, "binpack") == [["pod/k80", "binpack", "2", "2"]]


def test_pods_that_wait_are_said_and_come_where_the_cluster_is_replayed(monkeypatch):
    api = lists()
    api.replace("pods", *(waiting("team-a", f"w{i}", {"aliyun.com/gpu-mem": "8000"}) for i in range(3)))
    completed = live(monkeypatch, api, "--pod", "gpu-mem=8000", "--policy", "binpack")
    assert "note: 3 pending pods" in completed.stderr
    replayed = live(monkeypatch, api, "--policy", "binpack", "--seeds", "1", "--processes", "1")
    (_, refused) = cells(replayed.output, "binpack")
    # The sick card takes none of them: 16276 MiB hold two, each K80 one.
    assert [cell for cell in refused[2:] if cell != "-"] == ["0.00"]


def test_what_the_extender_has_learned_is_what_its_policies_know(monkeypatch):
    asks = [[1, 4000, 0, "", 0, 0, 90.0], [1, 8000, 0, "", 0, 0, 10.0]]
    metadata = {"namespace": "cardwise-system", "name": "cardwise-workload"}
    saved = {"metadata": metadata, "data": {"workload.json": json.dumps({"version": 1, "requests": asks})}}
    completed = live(monkeypatch, lists(configmaps=[saved]), "--pod", "gpu-mem=4000")
    assert {row[2] for policy in CARD_POLICIES for row in cells(completed.output, policy)} == {"5"}
    for spoilt in ("{}", '{"version":1,"requests":[[1,4000,0,"",0,0,NaN]]}', "[" * 200_000):
        saved["data"]["workload.json"] = spoilt
        without_learning = live(monkeypatch, lists(configmaps=[saved]), "--pod", "gpu-mem=4000", "--policy", "priced")
        assert "note: the ConfigMap cardwise-workload is not used" in without_learning.stderr
        assert cells(without_learning.stdout, "priced")[0][2] == "5"


def test_a_cluster_without_pods(monkeypatch):
    completed = live(monkeypatch, lists(pods=[]), "--pod", "gpu-mem=8000")
    # The sick card takes none: 16276 MiB hold two, each K80 one.
    assert {row[2] for policy in CARD_POLICIES for row in cells(completed.output, policy)} == {"4"}
    completed = live(monkeypatch, lists(pods=[]))
    assert completed.exit_code == 1
    assert "no pod of the cluster uses or waits for GPUs: use --pod to see what would fit" in completed.stderr


def test_running_pods_are_replayed_with_what_they_ask(monkeypatch):
    api = lists()
    running = placed("team-a", "train", "n1", 0, 8000)
    running["spec"]["containers"][0]["resources"] = {
        "limits": {"aliyun.com/gpu-mem": "8000", "cardwise.dev/share": "1"}
    }
    api.replace("pods", running)
    (simulated,) = json.loads(
        live(monkeypatch, api, "--policy", "spread", "--seeds", "1", "--processes", "1", "-o", "json").output
    )["runs"]
    assert [row["arrived"] for row in simulated["refused"]] == [1]
    assert simulated["points"][-1]["allocated"] == pytest.approx(100 * 8000 / (3 * K80 + P100))


def test_without_the_right_to_read_nodes_cpu_counts_as_unlimited(monkeypatch):
    api = lists()
    api.forbid("nodes")
    completed = live(monkeypatch, api, "--pod", "gpu-mem=4000,cpu=1000", "--policy", "binpack")
    assert "note: assuming unlimited cpu and memory of nodes" in completed.stderr
    assert cells(completed.stdout, "binpack")[0][2] == "5"


def test_a_cluster_without_cards(monkeypatch):
    completed = live(monkeypatch, lists(extendedresources=[]))
    assert completed.exit_code == 1
    assert "has no GPU that Cardwise shares" in completed.stderr
    asks = waiting("team-a", "w", {"cardwise.dev/rdma": "1"}, devices="rdma")
    completed = live(monkeypatch, lists(extendedresources=[device("n3", 0)], pods=[asks]))
    assert completed.exit_code == 1
    assert "the cluster has no GPU to replay pods on: use --pod to see how" in completed.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--pod", "gpu-mem=0"),
            "--pod gpu-mem=0: spec.containers[0].resources.limits[aliyun.com/gpu-mem]: 0 must be above",
        ),
        (("--pod", "gpu=1,colour=red"), "'colour' is unknown; write gpu-mem, gpu-count, gpu, core, cpu, memory, class"),
        (("--pod", "cpu=2"), "the pod requests no GPU; write, for example, gpu-mem=8138"),
        (("--pod", "gpu=1,cpu=lots"), "cpu: 'lots' is not a quantity; write for example cpu=2"),
        (
            ("--pod", "nothing.yaml"),
            "--pod nothing.yaml: is neither a file nor a list of KEY=AMOUNT; write, for example, gpu-mem=8138",
        ),
        (
            ("--pod", "gpu=1,class=k80"),
            "no GPU or device matches class k80; write one of: big, nvidia.tesla.k80, nvidia.t",
        ),
        (("--pod", "cardwise.dev/big=2"), "one of this class is a share of 4069 MiB; write gpu-mem=8138,class=big"),
        (("--add-nodes", "4x8xT4"), "--add-nodes 4x8xT4: cannot be read; write NODES x GPUS x MODEL : MIB"),
        (("--add-nodes", "0x8xT4:16Gi"), "0 nodes of 8 GPUs are out of range; write 1 to 10000 x 1 to 1024"),
        (("--add-nodes", "1x8xT4:lots"), "'lots' is not a quantity"),
        (("--add-nodes", "1x8xT4:16Gi,disk=2"), "'disk' is unknown; write cpu and memory after the GPUs"),
        (("--add-nodes", "1x8xT4:16Gi,cpu=-1"), "--add-nodes 1x8xT4:16Gi,cpu=-1: cpu: -1 is below zero; write for"),
        (("--pod", "gpu-mem=100,cpu=-4"), "--pod gpu-mem=100,cpu=-4: cpu: -4 is below zero; write for example cpu=2"),
        (("--pod", "gpu-mem=100,memory=10GiB"), "memory: '10GiB' is not a quantity; write for example cpu=2 or mem"),
    ],
)
def test_mistakes_are_told_with_a_remedy(monkeypatch, args, message):
    refused = live(monkeypatch, lists(), *args)
    assert refused.exit_code == 1
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--load", "2"), "--load changes nothing: it has an effect only with --churn"),
        (("--lifetimes", "3"), "--lifetimes changes nothing: it has an effect only with --churn"),
        (("--churn", "--demand", "2"), "--demand changes nothing: do not give it with --churn"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(monkeypatch, args, message):
    refused = live(monkeypatch, lists(), *args)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_file_that_holds_no_pod(monkeypatch, tmp_path):
    path = tmp_path / "class.yaml"
    path.write_text(yaml.safe_dump(resource_class("k80", selector={})))
    assert "contains no Pod and no object with a pod template" in live(monkeypatch, lists(), "--pod", str(path)).stderr
    path.write_text("a: [")
    assert "class.yaml: cannot be read" in live(monkeypatch, lists(), "--pod", str(path)).stderr


_ASKS = {"resources": {"limits": {"aliyun.com/gpu-mem": "4000"}}}


def _asking(**limits: object) -> dict[str, object]:
    return {"containers": [_ASKS, {"resources": {"limits": limits}}]}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"spec": _asking(cpu="foo")}, "spec.containers[1].resources.limits[cpu]: 'foo' is not a quantity; write"),
        ({"spec": _asking(memory=-1)}, "spec.containers[1].resources.limits[memory]: -1 is below zero; write"),
        ({"spec": {"containers": [_ASKS], "overhead": {"cpu": "-1"}}}, "spec.overhead[cpu]: -1 is below zero; write"),
        ({"spec": {"containers": 5}}, "spec.containers: 5 is not a list; write it as in a Kubernetes manifest"),
        ({"spec": {"containers": [None]}}, "spec.containers[0]: None is not a map; write"),
        ({"spec": {"containers": [{"resources": {"limits": [1]}}]}}, "spec.containers[0].resources.limits: [1] is no"),
        (
            {"spec": {"containers": [{"resources": {"limits": {5: 1}}}]}},
            "limits: {5: 1} is not a map; write",
        ),
        ({"spec": {"containers": [_ASKS], "securityContext": 5}}, "spec.securityContext: 5 is not a map"),
        ({"spec": {"containers": [_ASKS], "priority": "high"}}, "spec: Expected `int | null`, got `str`"),
        ({"spec": [1]}, "spec: [1] is not a map; write it as in a Kubernetes manifest"),
        ({"metadata": 5}, "metadata: 5 is not a map; write it as in a Kubernetes manifest"),
        ({"metadata": {"annotations": {"a": 1}}}, "metadata.annotations[a]: 1 is not a string; write it in quotes"),
        ({"kind": "List", "items": 5}, "List: items: 5 is not a list; write it as in a Kubernetes manifest"),
    ],
)
def test_manifests_that_are_none_of_kubernetes(monkeypatch, tmp_path, manifest, message):
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump({"kind": "Pod", "spec": {"containers": [_ASKS]}, **manifest}))
    refused = live(monkeypatch, lists(), "--pod", str(path))
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: pod.yaml: ")
    assert message in refused.stderr


def test_the_pods_of_a_list(monkeypatch, tmp_path):
    pods = [{"kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [_ASKS]}} for name in ("a", "b")]
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": pods}))
    output = live(monkeypatch, lists(), "--pod", str(tmp_path / "pods.yaml"), "--policy", "binpack").output
    assert [row[0] for row in cells(output, "binpack")] == ["pod/a", "pod/b"]


@pytest.mark.parametrize("option", ["--demand", "--load", "--lifetimes"])
@pytest.mark.parametrize("number", ["nan", "inf", "0"])
def test_numbers_that_are_none(trace, option, number):
    refused = run(trace, "--churn", option, number)
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}'" in refused.stderr


def test_what_is_named_twice_counts_once(trace):
    of = ("--demand", "0.2", "--seeds", "2", "--processes", "1", "-o", "json")
    once = run(trace, *of, "--policy", "binpack", "--pods", "default").output
    twice = run(trace, *of, *("--policy", "binpack", "--pods", "default") * 2).output
    assert len(json.loads(once)["runs"]) == 2
    assert twice == once


def test_a_folder_for_plots_that_cannot_be_made_is_told_before_anything_runs(trace, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refused = run(trace, "--plots", str(tmp_path / "file" / "plots"))
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert "cannot be written (Not a directory); name a folder in which you may write" in refused.stderr
    fits = live(monkeypatch, lists(), "--pod", "gpu-mem=4000", "--plots", str(tmp_path / "plots"))
    assert fits.exit_code == 0
    assert "note: ignoring --plots: there is no plot of what fits in a cluster" in fits.stderr
    assert not (tmp_path / "plots").exists(), "nothing is drawn"


def test_a_trace_and_the_cluster_are_one_or_the_other(trace):
    assert "name the folder of a trace, or give --from-cluster" in run().stderr
    assert "name the folder of a trace, or give --from-cluster" in run(trace, "--from-cluster").stderr
    refused = run("--from-cluster", "--pods", "default")
    assert refused.exit_code == 2
    assert "--pods names a list of a trace, which --from-cluster does not" in refused.stderr


def test_a_trace_that_is_not_there_is_told_with_those_that_are(trace):
    completed = run(trace, "--pods", "gpuspec33")
    assert completed.exit_code == 1
    assert "has no file openb_pod_list_gpuspec33.csv; name one of these: default" in completed.stderr


def test_a_card_of_another_cluster_is_simulated_by_its_size(monkeypatch):
    api = lists(extendedresources=[card("n1", 0), card("n2", 0, "Tesla P100", P100)], pods=[])
    assert (
        cells(live(monkeypatch, api, "--pod", f"gpu-mem={P100}", "--policy", "binpack").output, "binpack")[0][2] == "1"
    )
