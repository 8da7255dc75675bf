"""The share as a container reads it: by environment, by the agent's file, by the command."""

import json

import pytest

from cardwise.share import reading
from tests.share.container import HALF

FILE = {
    "card": 1,
    "uuid": "GPU-5c5b",
    "limitMiB": 8138,
    "totalMiB": 16276,
    "fraction": 0.5,
    "enforced": "mps",
}


def environ(tmp_path, file=None, **env):
    path = tmp_path / "share.json"
    if file is not None:
        path.write_text(file if isinstance(file, str) else json.dumps(file))
    return {"CARDWISE_SHARE_FILE": str(path), **env}


def test_environment_alone(tmp_path):
    share = reading.read(environ(tmp_path, **HALF, ALIYUN_COM_GPU_MEM_DEV="16276", ALIYUN_COM_GPU_MEM_IDX="0,2"))
    assert (share.limit_mib, share.total_mib, share.fraction, share.card) == (8138, 16276, "0.5", "0,2")
    assert share.enforced == ""


def test_file_alone(tmp_path):
    share = reading.read(environ(tmp_path, FILE))
    assert share.as_json() == {**FILE, "card": "1"}


def test_environment_goes_before_the_file_and_the_file_adds(tmp_path):
    share = reading.read(environ(tmp_path, FILE, CARDWISE_MEM_LIMIT_MIB="4069", CARDWISE_MEM_FRACTION="0.25"))
    assert (share.limit_mib, share.fraction) == (4069, "0.25")
    assert (share.uuid, share.enforced, share.total_mib) == ("GPU-5c5b", "mps", 16276)


def test_uuids_by_the_environment_where_it_names_them(tmp_path):
    named = environ(tmp_path, **HALF, NVIDIA_VISIBLE_DEVICES="GPU-1,GPU-2")
    assert reading.read(named).uuid == "GPU-1,GPU-2"
    assert reading.read({**named, "NVIDIA_VISIBLE_DEVICES": "void"}).uuid == ""


@pytest.mark.parametrize(
    ("limit", "total", "fraction"),
    [(8138, 16276, "0.5000"), (1, 3, "0.3333"), (2, 3, "0.6666"), (16276, 16276, "1.0000")],
)
def test_a_fraction_that_nobody_tells_is_rounded_down(tmp_path, limit, total, fraction):
    share = reading.read(environ(tmp_path, {"limitMiB": limit, "totalMiB": total}))
    assert share.fraction == fraction


def test_no_share_says_how_to_get_one(tmp_path):
    with pytest.raises(reading.NoShare, match="request one with a limit"):
        reading.read(environ(tmp_path))


@pytest.mark.parametrize(
    ("file", "env", "field"),
    [
        (None, {"CARDWISE_MEM_LIMIT_MIB": "8Gi"}, "CARDWISE_MEM_LIMIT_MIB"),
        (None, {"CARDWISE_MEM_LIMIT_MIB": "-1"}, "CARDWISE_MEM_LIMIT_MIB"),
        (None, {"CARDWISE_MEM_LIMIT_MIB": "²"}, "CARDWISE_MEM_LIMIT_MIB"),
        (None, {**HALF, "CARDWISE_MEM_FRACTION": "half"}, "CARDWISE_MEM_FRACTION"),
        (None, {**HALF, "CARDWISE_MEM_FRACTION": "1.5"}, "CARDWISE_MEM_FRACTION"),
        (None, {**HALF, "CARDWISE_MEM_FRACTION": "nan"}, "CARDWISE_MEM_FRACTION"),
        ({**FILE, "limitMiB": True}, {}, "limitMiB"),
        ({**FILE, "limitMiB": 0.5}, {}, "limitMiB"),
        ({**FILE, "enforced": "maybe"}, {}, "enforced"),
        ("[]", {}, "share.json"),
        ('{"limitMiB": 81', HALF, "share.json"),
    ],
)
def test_damage_is_named_with_its_place_and_what_to_do(tmp_path, file, env, field):
    with pytest.raises(reading.UnreadableShare) as caught:
        reading.read(environ(tmp_path, file, **env))
    assert field in caught.value.field
    assert caught.value.remedy


def test_command_prints_units(container):
    done = container.start(["-m", "cardwise.share"], **HALF, ALIYUN_COM_GPU_MEM_DEV="16276", ALIYUN_COM_GPU_MEM_IDX="3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8138 MiB (7.95 GiB) of 16276 MiB\n" in done.stdout
    assert "card       3\n" in done.stdout


def test_command_says_who_enforces(container):
    container.share_file.write_text(json.dumps(FILE))
    done = container.start(["-m", "cardwise.share"])
    assert "by MPS" in done.stdout


def test_command_prints_json(container):
    container.share_file.write_text(json.dumps(FILE))
    done = container.start(["-m", "cardwise.share", "-o", "json"])
    assert json.loads(done.stdout) == {**FILE, "card": "1"}


def test_command_prints_variables_that_it_can_read_again(container, tmp_path):
    container.share_file.write_text(json.dumps(FILE))
    done = container.start(["-m", "cardwise.share", "-o", "env"])
    printed = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    assert printed["CUPY_GPU_MEMORY_LIMIT"] == str(8138 * 1024 * 1024)
    share = reading.read({**printed, "CARDWISE_SHARE_FILE": str(tmp_path / "none")})
    assert (share.limit_mib, share.total_mib, share.card) == (8138, 16276, "1")


def test_command_exit_statuses(container):
    assert container.start(["-m", "cardwise.share"]).returncode == 1
    assert container.start(["-m", "cardwise.share", "-o", "yaml"]).returncode == 2
    damaged = container.start(["-m", "cardwise.share"], CARDWISE_MEM_LIMIT_MIB="lots")
    assert damaged.returncode == 3
    assert "CARDWISE_MEM_LIMIT_MIB: 'lots' is not an amount of MiB; expected" in damaged.stderr


def test_help_names_the_exit_statuses(container):
    printed = container.start(["-m", "cardwise.share", "--help"]).stdout
    for status in ("0  the share was printed", "1  this container has no share", "2  wrong arguments", "3  the share"):
        assert status in printed
