"""What of the Dockerfile can be held without an engine: it copies what there is, and the small image lacks nothing."""

import os
import re
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest

from cardwise.core.api import shareagent
from release import agentroot
from tests.cluster.processes import wait_for
from tests.helm.rendering import ALL, Render
from tests.helm.test_workloads import workloads
from tests.mps.agent.pods import assignment, share

ROOT = Path(__file__).parents[2]


def stages() -> dict[str, list[str]]:
    """Instructions by the name of their stage."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines_by_stage: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("FROM "):
            name = line.split(" AS ")[1]
        elif line and not line.startswith("#"):
            lines_by_stage.setdefault(name, []).append(line)
    return lines_by_stage


def copies(stage: str) -> list[tuple[list[str], str]]:
    """Sources and target of each COPY."""
    lines = [line.split()[1:] for line in stages()[stage] if line.startswith("COPY ")]
    words = [[word for word in line if not word.startswith("--")] for line in lines]
    return [(line[:-1], line[-1]) for line in words]


def test_what_it_copies_is_there_and_gets_to_the_engine() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for stage in ("build", "agentroot") for sources, _ in copies(stage) for source in sources]
    assert all((ROOT / source).exists() for source in copied)
    assert sorted(copied) == sorted(allowed)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(packages["packages"]) <= set(copied)


def test_nobody_is_root_by_default_and_everything_is_pinned() -> None:
    for stage in ("agent", "cardwise"):
        assert "USER 65532:65532" in stages()[stage]
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=3\.11\.\d+$", text, re.MULTILINE)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) == {"python:${PYTHON}-slim-bookworm", "scratch"}, "and no registry is named"
    assert "--require-hashes" in text


def test_the_image_is_the_locked_packages_and_our_wheel_whole() -> None:
    installs = [
        line for line in stages()["build"] if line.startswith("RUN ") and "/opt/cardwise/bin/pip install" in line
    ]
    assert ["--require-hashes --requirement requirements/run.lock" in line for line in installs] == [True, False]
    assert "--no-deps /tmp/wheel/*.whl" in installs[1], "the wheel brings every command, and nothing that is not locked"
    assert (["/opt/cardwise"], "/opt/cardwise") in copies("cardwise")
    assert any(line.startswith("ENV PATH=/opt/cardwise/bin:") for line in stages()["cardwise"])


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the small image has, with the Python of this machine."""
    root = tmp_path_factory.mktemp("agent")
    agentroot.build_root(root, ROOT)
    for library in root.glob("lib/*/libpython*"):  # those of the image are without symbols
        subprocess.run(["strip", "--strip-unneeded", library], check=True)
    return root


def inside(root: Path, *lines: str) -> str:
    """Those lines in its interpreter, alone with its files."""
    command = ["chroot", root, "/usr/local/bin/python3", "-ESs", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot is root's")
def test_the_agent_s_image_has_all_that_the_agent_imports(agent: Path) -> None:
    lines = ["import sys", "sys.path.append('/opt/agent')", "sys.modules['_hashlib'] = None"]
    lines += [
        "from mps.agent import probe, running",
        "from cardwise.share import installation",
        "print(len(installation.list_container_files()))",
    ]
    assert int(inside(agent, *lines)) > 5, "the frameworks' hook comes from here"
    assert inside(agent, "import hashlib; print(hashlib.sha256(b'x').hexdigest()[:4])") == "2d71\n"
    completed = subprocess.run(
        ["chroot", agent, "cardwise-agent", "--help"], capture_output=True, text=True, check=True
    )
    assert completed.stdout.startswith("Usage: cardwise-agent")


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot is root's")
def test_the_agent_in_its_image_uses_less_than_16_mib(agent: Path) -> None:
    folder = agent / "tmp" / "pod"
    folder.mkdir()
    env = {
        "PATH": "/usr/local/bin",
        shareagent.ASSIGNMENT_ENV: assignment(c0=[share()]),
        shareagent.WAIT_ENV: "Ready",
        shareagent.FOLDER_ENV: "/tmp/pod",
    }
    command = [shutil.which("chroot") or "chroot", agent, "cardwise-agent"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert "does not serve" in process.stderr.readline(), "it has checked the card, which needs a hash"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(10.0)
                # The file is there a moment before the agent listens.
                assert wait_for(lambda: client.connect_ex(str(folder / shareagent.SOCKET_FILE)) == 0)
                client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 503"), "it waits for MPS"
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
            shutil.rmtree(folder)
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    assert int(peak_kib) < 16 * 1024


def test_the_agent_s_image_is_small_and_has_nothing_to_break_out_with(agent: Path) -> None:
    files = [path for path in agent.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 25_000_000
    assert {path.name for path in (agent / "usr/local/bin").iterdir()} == {"python3", "cardwise-agent"}
    assert not {"bin", "sbin", "root"} & {path.name for path in agent.iterdir()}
    words = ("grpc", "kubernetes", "flask", "ssl", "webhook", "extender", "deviceplugin")
    assert [path for path in files if any(word in path.relative_to(agent).as_posix() for word in words)] == []


def test_the_chart_runs_commands_that_the_image_has(render: Render) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, spec in workloads(render(*ALL)).items():
        (container,) = spec["containers"]
        if container["image"].startswith("cardwise:"):
            assert container["command"][0] in {*scripts, "python3"}, name
