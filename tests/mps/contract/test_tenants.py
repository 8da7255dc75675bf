"""What root in a container can do to the daemon of its card, and through it to the node: nothing that outlasts it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cardwise.core.api import mps
from cardwise.core.api.assignment import CardShare
from deviceplugin.grants import cdi
from mps.daemon import directories
from tests.deviceplugin.records import grant
from tests.mps.contract.programs import World

TENANT = Path(__file__).parent / "tenant.py"
ROUNDS = 20
# What containerd leaves to root in a container.
CAPABILITIES = (
    "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod,audit_write"
)


@pytest.fixture
def tenant(folder: Path) -> Iterator[Callable[[Path, Path], subprocess.Popen[str]]]:
    """A container with the daemon's folders mounted as the device plugin has them mounted; it attacks from now on."""
    inside = folder / "inside"
    inside.mkdir()
    started = []

    def start(home: Path, target: Path) -> subprocess.Popen[str]:
        share = CardShare(index=0, uuid="GPU-0", mem=1000, core=0, total=16276)
        (mount,) = cdi.mps_edits(grant("u", share, mps=(str(home),)))["mounts"]
        assert mount["containerPath"] == mps.CONTAINER_PIPE
        options = ",".join(["remount", *mount["options"]])
        bounds = ",".join(["-all", *(f"+{name}" for name in CAPABILITIES.split(","))])
        attack = f"exec setpriv --bounding-set={bounds} {sys.executable} -IS {TENANT} {inside} {target} {ROUNDS}"
        script = f"mount --bind {mount['hostPath']} {inside} && mount -o {options} {inside} && {attack}"
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be root in a container")
class TestTenants:
    def test_links_and_locks_that_root_in_a_container_plants_reach_no_daemon(
        self, program: World, folder: Path, tenant: Callable[[Path, Path], subprocess.Popen[str]]
    ) -> None:
        precious = folder / "node" / "precious"
        precious.parent.mkdir()
        precious.write_text("the node's")
        untouched = precious.stat()
        directories.prepare_folders(folder)
        program.start()
        directories.open_to_clients(folder)
        attacker = tenant(folder, precious)
        assert attacker.stdout.readline() == "connected\n", "a container needs no more"
        for _ in range(50 if program.real else 3):
            program.kill()
            directories.reset_pipe(folder)
            program.start()
            directories.open_to_clients(folder)
            assert program.control.servers() == []
        assert attacker.poll() is None
        assert precious.read_text() == "the node's", "a daemon writes where links lead"
        status = precious.stat()
        assert (status.st_mtime_ns, status.st_ctime_ns, status.st_mode) == (
            untouched.st_mtime_ns,
            untouched.st_ctime_ns,
            untouched.st_mode,
        )
        assert list(precious.parent.iterdir()) == [precious]
        assert not any(path.is_symlink() for path in program.pipe.iterdir())
        assert [path.name for path in (folder / mps.CLIENTS_FOLDER).iterdir()] == [mps.CONTROL_SOCKET]
        assert size(program.pipe) < 1000, "and the node's memory is not filled"
