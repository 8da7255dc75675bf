"""Whatever somebody wrote into a pod, the extender reads a record of it. Were one not read, a new extender would begin
without it, and without its share.
"""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from extender.records import podinfo
from tests.examples import examples

KEYS = sorted({text for text in vars(names).values() if isinstance(text, str) and ("/" in text or "ALIYUN" in text)})
HOSTILE = [
    "", "0", "-1", "1e400", "9" * 24, "NaN", "null", "[]", "{}", '{"a":', "[" * 5000, '{"a":' * 5000,
    '{"v":1}', '{"v":1,"containers":{"0":[[1e30,"g",-5,0,0]]}}', '{"v":1,"containers":[]}', "a,b", "1Gi", "٤", " 5",
]  # fmt: skip
QUANTITIES = ["1", "0", "-1", "1e3", "9223372036854775807", "1e30", "0.0000000001", "100m", "5Gi", "9" * 20 + "Ei"]
RESOURCES = ["cpu", "memory", names.GPU_MEM, names.GPU_COUNT, names.SHARE, f"{names.CLASS_PREFIX}x", "example.com/y"]

texts = st.sampled_from(HOSTILE) | st.text(max_size=8)
by_key = st.dictionaries(st.sampled_from(KEYS), texts, max_size=5)
amounts = st.dictionaries(st.sampled_from(RESOURCES), st.sampled_from(QUANTITIES), max_size=5)


@st.composite
def pods(draw: st.DrawFn) -> Json:
    """As the API server may have it: of the right types, whatever they say."""
    container = {"name": "main", "image": "x", "resources": {"limits": draw(amounts), "requests": draw(amounts)}}
    spec: Json = {
        "containers": [container] * draw(st.integers(1, 2)),
        "priority": draw(st.integers(-(2**31), 2**31 - 1)),
    }
    if draw(st.booleans()):
        spec["initContainers"] = [container]
    if draw(st.booleans()):
        spec["overhead"] = draw(amounts)
    if draw(st.booleans()):
        spec["nodeName"] = "n1"
    if draw(st.booleans()):
        spec["tolerations"] = [{"key": draw(texts), "operator": "Exists"}]
    condition = {"type": "PodScheduled", "status": "False", "reason": draw(st.sampled_from(["Unschedulable", "Odd"]))}
    status = {"phase": draw(st.sampled_from(["Pending", "Running", "Failed"])), "conditions": [condition]}
    status["nominatedNodeName"] = draw(st.sampled_from(["", "n1"]))
    metadata = {"name": "a", "namespace": "n", "uid": "u", "annotations": draw(by_key), "labels": draw(by_key)}
    return {"metadata": metadata, "spec": spec, "status": status}


@given(pods())
@settings(max_examples=examples(150, soak=3000))
def test_a_pod_is_read_whatever_it_says(pod: Json) -> None:
    read = podinfo.decode_pod(json.dumps(pod).encode())
    if read is None:
        assert "nodeName" not in pod["spec"] or pod["status"]["phase"] == "Failed"
        return
    _, record = read
    counts = bool(record.node) and not getattr(record, "finished", False)
    runs = "nodeName" in pod["spec"] and pod["status"]["phase"] != "Failed"
    assert counts == runs, "it counts on its node while it runs there"
