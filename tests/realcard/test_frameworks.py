"""Frameworks on a real card, in the environment of a container with a share: what they take, and that they compute."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cardwise.core.api import names
from cardwise.core.api.assignment import CardShare
from cardwise.core.values.quantity import MiB, Percent
from deviceplugin.grants import environment
from deviceplugin.grants.grants import Grant
from tests.share.container import Container

PYTHON = os.environ.get("CARDWISE_GPU_PYTHON", sys.executable)
SHARE = 8138  # MiB
PIECE = 64  # MiB
MOST = 3 * SHARE // PIECE  # pieces of a program that nothing stops

# Each says what it could have (MiB), a sum of 1000 ones, and what of the card is in use then; JAX: of its pool.
PROGRAMS = {
    "torch": f"""
        import json, torch
        assert torch.cuda.is_available()
        taken = []
        try:
            while len(taken) < {MOST}:
                taken.append(torch.ones({PIECE} << 18, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        mib, result = len(taken) * {PIECE}, float(taken[-1][:1000].sum())
        free, total = torch.cuda.mem_get_info()
        print(json.dumps({{"mib": mib, "result": result, "used": (total - free) >> 20}}))
    """,
    "jax": """
        import json, jax
        device = jax.devices()[0]
        assert device.platform == "gpu", device
        result = float(jax.numpy.ones(1000).sum())
        stats = device.memory_stats()
        mib, used = stats["bytes_limit"] >> 20, stats["pool_bytes"] >> 20
        print(json.dumps({"mib": mib, "result": result, "used": used}))
    """,
    "cupy": f"""
        import json, cupy
        taken = []
        try:
            while len(taken) < {MOST}:
                taken.append(cupy.ones({PIECE} << 18, dtype=cupy.float32))
        except cupy.cuda.memory.OutOfMemoryError:
            pass
        mib, result = len(taken) * {PIECE}, float(cupy.asnumpy(taken[-1][:1000]).sum())
        free, total = cupy.cuda.runtime.memGetInfo()
        print(json.dumps({{"mib": mib, "result": result, "used": (total - free) >> 20}}))
    """,
}
CUDA = {
    "torch": "import torch; assert torch.version.cuda",
    "jax": "import jax_plugins.xla_cuda13",
    "cupy": "import cupy",
}


@pytest.fixture(scope="module", params=PROGRAMS)
def framework(request):
    """Those that are there with a CUDA build."""
    skip_without(request.param)
    return request.param


def skip_without(name: str) -> None:
    done = subprocess.run([PYTHON, "-c", CUDA[name]], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PYTHON} has no {name} for CUDA: {(done.stderr.splitlines() or ['?'])[-1]}")


def container(machine, folder: Path, *, through: bool) -> Container:
    """One with a share of the card and all that a grant sets; its files are where they are here."""
    card = machine.card
    share = CardShare(card.index, card.uuid, MiB(SHARE), Percent(0), card.memory)
    about = {"pod_uid": "uid", "namespace": "default", "name": "pod", "container": "main"}
    grant = Grant(
        **about, shares=(share,), pod_shares=(share,), pod_keys=("0",), mps=(str(machine.home),) if through else ()
    )
    folder.mkdir()
    new_container = Container(folder, PYTHON)
    new_container.path = [new_container.mount]
    kept = {name: variable for name, variable in new_container.env.items() if not name.startswith(("CUDA_", "XLA_"))}
    new_container.env = kept | environment.container_env(grant) | machine.visible(through=through)
    return new_container


def test_it_keeps_to_its_share_by_the_environment(machine, tmp_path, framework, measured):
    answer = container(machine, tmp_path / "c", through=False).json_of(PROGRAMS[framework])
    assert answer["result"] == 1000.0
    assert SHARE * 0.95 <= answer["mib"] <= SHARE
    measured(f"{framework} with a share of {SHARE} MiB", f"{answer['mib']} MiB, {answer['used']} in use")


def test_without_the_hook_it_takes_more(machine, tmp_path, framework):
    """So it is the hook that the test above sees. CuPy reads the variable by itself."""
    outside = container(machine, tmp_path / "c", through=False)
    del outside.env[names.ENV_CUPY_LIMIT]
    answer = outside.json_of(PROGRAMS[framework], CARDWISE_FRAMEWORKS="off")
    assert answer["mib"] > SHARE * 1.5


def test_through_mps_it_has_nearly_all_of_its_share(machine, tmp_path, framework, measured):
    """The limit of MPS counts the client's own context too."""
    machine.share("pod", SHARE)
    answer = container(machine, tmp_path / "c", through=True).json_of(PROGRAMS[framework])
    assert answer["result"] == 1000.0
    assert SHARE * 0.85 <= answer["mib"] <= SHARE
    measured(f"{framework} with a share of {SHARE} MiB through MPS", f"{answer['mib']} MiB")


def test_two_pods_of_one_card_compute_at_the_same_time(machine, tmp_path, measured):
    frameworks = ["torch", "jax"]
    for name in frameworks:
        skip_without(name)
    machine.bind(frameworks[0], SHARE)
    machine.share(frameworks[1], SHARE)
    pods = [container(machine, tmp_path / name, through=True) for name in frameworks]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda pod, name: pod.json_of(PROGRAMS[name]), pods, frameworks))
    assert [answer["result"] for answer in answers] == [1000.0, 1000.0]
    assert all(answer["mib"] <= SHARE for answer in answers)
    had = " and ".join(f"{name} {answer['mib']} MiB" for name, answer in zip(frameworks, answers, strict=True))
    measured(f"two pods of {SHARE} MiB on one card through MPS", had)


def test_mps_holds_a_framework_that_is_told_nothing(machine, tmp_path, framework, measured):
    machine.share("pod", SHARE)
    inside = container(machine, tmp_path / "c", through=True)
    del inside.env[names.ENV_CUPY_LIMIT]
    answer = inside.json_of(PROGRAMS[framework], CARDWISE_FRAMEWORKS="off")
    assert answer["result"] == 1000.0
    if framework != "jax":  # it says what it may have by its own settings
        assert answer["mib"] <= SHARE
    measured(f"{framework} through MPS without the hook", f"{answer['mib']} MiB")
