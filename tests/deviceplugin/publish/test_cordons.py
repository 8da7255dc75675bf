"""The cordons that are saved on the node's disk."""

import pytest
from structlog.testing import capture_logs

from deviceplugin.publish.cordons import Cordons


def test_the_first_start_on_a_node_is_no_error(tmp_path):
    with capture_logs() as logs:
        assert Cordons(tmp_path / "cordons.json").spec_fields("GPU-0") == {}
    assert logs == []


@pytest.mark.parametrize("text", [b"{", b'{"GPU-0": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"], ids=["cut", "deep"])
def test_a_file_that_cannot_be_read_is_an_error_and_kept(tmp_path, text):
    path = tmp_path / "cordons.json"
    path.write_bytes(text)
    with capture_logs() as logs:
        Cordons(path)
    assert [line["log_level"] for line in logs] == ["error"]
    assert path.with_name("cordons.json.unreadable").read_bytes() == text
