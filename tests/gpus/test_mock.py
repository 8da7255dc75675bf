"""The NVML implementation with NVIDIA's own mock of NVML: the contract, and injected faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = os.environ.get("CARDWISE_NVML_MOCK", "")
HERE = Path(__file__).parent
PROFILES = sorted(Path(FOLDER, "configs").glob("*.yaml")) if FOLDER else []
CARDS = """
import json
from cardwise.gpus.nvml import NvmlGpus
gpus = NvmlGpus()
cards = [[card.uuid, card.model, card.memory, card.properties["computeCapability"]] for card in gpus.cards()]
print(json.dumps([cards, sorted(state.reason for state in gpus.health().values())]))
gpus.close()
"""

pytestmark = pytest.mark.skipif(
    not FOLDER, reason="CARDWISE_NVML_MOCK names no folder with NVIDIA's mock of NVML: CONTRIBUTING.md, Tests with NVML"
)


@pytest.mark.parametrize(
    ("profile", "files"), [("h100", ["test_contract.py", "on_mock.py"]), ("t4", ["test_contract.py"])]
)
def test_on_nvidias_mock(profile, files, tmp_path):
    (tmp_path / "overrides.yaml").write_text("version: 1\n")
    environment = os.environ | {
        "LD_LIBRARY_PATH": FOLDER,
        "MOCK_NVML_CONFIG": f"{FOLDER}/configs/mock-nvml-config-{profile}.yaml",
        "MOCK_NVML_OVERRIDES": str(tmp_path / "overrides.yaml"),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            *(str(HERE / file) for file in files),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "no NVIDIA driver" not in done.stdout, "it was not found"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_cards_match_the_mock_profiles(profile):
    environment = os.environ | {"LD_LIBRARY_PATH": FOLDER, "MOCK_NVML_CONFIG": str(profile)}
    done = subprocess.run([sys.executable, "-c", CARDS], env=environment, capture_output=True, text=True, check=True)
    cards, reasons = json.loads(done.stdout)
    document = yaml.safe_load(profile.read_text())
    common = document["device_defaults"]
    capability = common["compute_capability"]
    assert cards == [
        [
            device["uuid"],
            common["name"],
            common["memory"]["total_bytes"] >> 20,
            f"{capability['major']}.{capability['minor']}",
        ]
        for device in document["devices"]
    ]
    assert set(reasons) == {""}
