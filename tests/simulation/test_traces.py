"""Reading a trace: what the rows mean, and the errors for rows that cannot be read."""

import pytest

from cardwise.core.values.invalid import InvalidRequest
from cardwise.simulation import traces
from tests.simulation import smalltraces


def test_trace_rows_are_read(tmp_path):
    workload = traces.read_trace(smalltraces.write_trace(tmp_path), "tiny")
    assert [len(node.cards) for node in workload.nodes] == [8, 8, 2, 2, 2, 0]
    assert workload.capacity == 22_000
    assert workload.mean_card_size == 1000
    assert len(workload.pods) == 62
    assert workload.nodes[0].free_load[:2] == (64_000, 262_144 << 20)
    by_size = {(workload.size_in_cards(pod.shape), pod.shape.request is not None) for pod in workload.pods}
    assert by_size == {(0.25, True), (0.5, True), (0.7, True), (1.0, True), (4.0, True), (0.0, False)}


def test_pod_with_card_models_requests_a_class_of_these_models(tmp_path):
    workload = traces.read_trace(smalltraces.write_trace(tmp_path), "tiny")
    assert traces.requested_classes(workload) == {"T4|P100", "G2"}
    classes_of_node = {node.name: node.cards[0].classes for node in workload.nodes if node.cards}
    assert classes_of_node["small-0"] == classes_of_node["small-2"] == {"T4|P100"}
    assert classes_of_node["big-0"] == {"G2"}


def test_pods_with_equal_requests_share_one_shape(tmp_path):
    workload = traces.read_trace(smalltraces.write_trace(tmp_path), "tiny")
    assert len({id(pod.shape) for pod in workload.pods}) == len({pod.shape for pod in workload.pods})


def test_the_columns_that_some_lists_lack_are_not_needed(tmp_path):
    smalltraces.write_trace(tmp_path)
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1000,1024,2,1000\n"
    (tmp_path / "openb_pod_list_short.csv").write_text(text)
    (pod,) = traces.read_trace(tmp_path, "short").pods
    assert pod.shape.request is not None
    assert pod.shape.request.containers[0].whole
    assert traces.pod_list_names(tmp_path) == ["short", "tiny"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,1000,1024,1,half,", "openb_pod_list_bad.csv line 2, gpu_milli: 'half' is wrong"),
        ("a,-1,1024,1,500,", "openb_pod_list_bad.csv line 2, cpu_milli: '-1' is wrong"),
        ("a,1000,1024,1,1001,", "openb_pod_list_bad.csv line 2, gpu_milli: '1001' is wrong"),
        ("a,1000,1024,1,0,", "openb_pod_list_bad.csv line 2, gpu_milli: is 0, and num_gpu 1"),
        ("a,1000,1024", "openb_pod_list_bad.csv line 2, num_gpu: is missing"),
        ("a,1000,1024,1,500,,,,,,,x,y", "openb_pod_list_bad.csv line 2: has 2 cells more than the header; remove them"),
    ],
)
def test_invalid_row(tmp_path, line, message):
    smalltraces.write_trace(tmp_path, "bad", [line])
    with pytest.raises(InvalidRequest) as caught:
        traces.read_trace(tmp_path, "bad")
    assert str(caught.value).startswith(message)
    assert caught.value.remedy


def test_a_line_number_is_that_of_the_file(tmp_path):
    smalltraces.write_trace(tmp_path, "bad", [*smalltraces.rows(), "a,x,1024,1,500,"])
    with pytest.raises(InvalidRequest, match=r"bad\.csv line 64, cpu_milli: 'x' is wrong"):
        traces.read_trace(tmp_path, "bad")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"name,cpu_milli,memory_mib,num_gpu\na,1,1,1\n",
                     r"openb_pod_list_bad\.csv line 1: has no column gpu_milli; write", id="without a column"),
        pytest.param(b"\xff\xfe\x00", r"openb_pod_list_bad\.csv: cannot be read", id="binary"),
        pytest.param(None, r"has no file openb_pod_list_bad\.csv; name one of these: tiny", id="not there"),
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_read(tmp_path, content, message):
    smalltraces.write_trace(tmp_path)
    if content is not None:
        (tmp_path / "openb_pod_list_bad.csv").write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        traces.read_trace(tmp_path, "bad")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("pod_list_tiny", smalltraces.HEAD, "openb_pod_list_tiny.csv: has no rows below its header; write the rows"),
        (
            "node_list_gpu_node",
            "sn,cpu_milli,memory_mib,gpu,model\n",
            "openb_node_list_gpu_node.csv: has no rows below",
        ),
        (
            "node_list_gpu_node",
            "sn,cpu_milli,memory_mib,gpu,model\na,1000,1024,0,\n",
            "openb_node_list_gpu_node.csv, gpu: no node has a GPU; write the number of GPUs of each",
        ),
        (
            "node_list_gpu_node",
            smalltraces.NODES + "big-0,64000,262144,8,G2\n",
            "openb_node_list_gpu_node.csv line 8, sn: 'big-0' is the name in openb_node_list_gpu_node.csv line 2 too",
        ),
    ],
)
def test_lists_without_anything_to_simulate(tmp_path, file, text, message):
    smalltraces.write_trace(tmp_path)
    (tmp_path / f"openb_{file}.csv").write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        traces.read_trace(tmp_path, "tiny")
    assert str(caught.value).startswith(message)


def test_file_written_by_a_spreadsheet(tmp_path):
    smalltraces.write_trace(tmp_path)
    for path in tmp_path.iterdir():
        path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(traces.read_trace(tmp_path, "tiny").pods) == 62


def test_empty_folder_error_names_the_source_of_the_trace(tmp_path):
    with pytest.raises(InvalidRequest, match="cluster-trace-gpu-v2023"):
        traces.pod_list_names(tmp_path)
