"""Specs of CDI: when they are used, what NVIDIA's and ours say, and which are stale."""

import os
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from structlog.testing import capture_logs

from cardwise.core.api.assignment import CardShare
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import DevicePath, GpuCard
from deviceplugin.grants import cdi, environment
from deviceplugin.grants.access import Access, Delivery, choose_access
from deviceplugin.sources.containers import RuntimeFacts
from tests.deviceplugin.records import grant


@pytest.mark.parametrize(
    ("facts", "access"),
    [
        (RuntimeFacts("containerd", "v2.1.4", None, ()), Access.CDI),
        (RuntimeFacts("containerd", "2.0.0-rc.1", None, ()), Access.CDI),
        (RuntimeFacts("containerd", "v2.1.4", False, ()), Access.ENV),
        (RuntimeFacts("containerd", "1.7.20", None, ()), Access.ENV),
        (RuntimeFacts("containerd", "1.7.20", True, ()), Access.CDI),
        (RuntimeFacts("containerd", "1.6.20~ds1", None, ()), Access.ENV),
        (RuntimeFacts("cri-o", "1.28.0", None, ()), Access.CDI),
        (RuntimeFacts("cri-o", "1.27.8", None, ()), Access.ENV),
        (RuntimeFacts("docker", "28", None, ()), Access.ENV),
    ],
)
def test_card_access_is_the_runtimes_alone(facts, access):
    assert choose_access(facts)[0] is access


class TestNvidiaSpecs:
    SPEC: ClassVar = {
        "cdiVersion": "0.7.0",
        "kind": "nvidia.com/gpu",
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": "/dev/nvidiactl"}],
            "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook"}],
            "mounts": [{"hostPath": "/lib/libcuda.so", "containerPath": "/lib/libcuda.so"}],
        },
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}},
            {
                "name": "GPU-1",
                "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}, {"path": "/dev/nvidiactl"}]},
            },
            {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidia1"}]}},
        ],
    }

    def card(self, index: int, minor: int | None = None) -> GpuCard:
        node = f"/dev/nvidia{index if minor is None else minor}"
        return GpuCard(index=index, uuid=f"GPU-{index}", model="m", memory=MiB(1), devices=(DevicePath(node, node),))

    def spec(self, **nodes: list[str]) -> str:
        """A spec with the device nodes of each device, and a mark by which to know it: the paths of all of them."""
        devices = [
            {
                "name": name.replace("_", "-").removeprefix("index-"),
                "containerEdits": {
                    "deviceNodes": [{"path": f"/dev/{node}", "hostPath": f"/root/dev/{node}"} for node in paths]
                },
            }
            for name, paths in nodes.items()
        ]
        return yaml.safe_dump({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices})

    def folders(self, tmp_path) -> tuple[Path, Path]:
        """As those of a node: /etc/cdi and /var/run/cdi."""
        etc, run = tmp_path / "etc", tmp_path / "run"
        etc.mkdir()
        run.mkdir()
        return etc, run

    def paths(self, specs: cdi.NvidiaSpecs, card: GpuCard) -> list[str]:
        return [node["path"] for node in specs.card_edits(card)[0]["deviceNodes"]]

    def test_the_later_folder_wins_as_in_cdi(self, tmp_path):
        etc, run = self.folders(tmp_path)
        specs = cdi.NvidiaSpecs([etc, run])
        (etc / "nvidia.yaml").write_text(self.spec(GPU_0=["nvidia0", "of-etc"]))
        assert self.paths(specs, self.card(0)) == ["/dev/nvidia0", "/dev/of-etc"]
        (run / "nvidia.yaml").write_text(self.spec(GPU_0=["nvidia0", "of-run"]))
        assert self.paths(specs, self.card(0)) == ["/dev/nvidia0", "/dev/of-run"]

    def test_a_uuid_names_a_card_and_an_index_only_where_no_spec_has_the_uuid(self, tmp_path):
        etc, run = self.folders(tmp_path)
        (etc / "nvidia.yaml").write_text(self.spec(GPU_0=["nvidia0", "by-uuid"]))
        (run / "nvidia.yaml").write_text(self.spec(index_0=["nvidia0", "by-index"], index_1=["nvidia1"]))
        specs = cdi.NvidiaSpecs([etc, run])
        assert self.paths(specs, self.card(0)) == ["/dev/nvidia0", "/dev/by-uuid"]
        assert self.paths(specs, self.card(1)) == ["/dev/nvidia1"]

    def test_two_specs_of_one_folder_that_name_the_card_are_told_as_cdi_takes_neither(self, tmp_path):
        for name in ("a.yaml", "b.json"):
            (tmp_path / name).write_text(self.spec(GPU_0=["nvidia0"]))
        with pytest.raises(cdi.NoDevice, match=r"nvidia.com/gpu=GPU-0 is in \S*a.yaml and \S*b.json; remove one"):
            cdi.NvidiaSpecs([tmp_path]).card_edits(self.card(0))

    @pytest.mark.parametrize(
        ("nodes", "node_names"),
        [
            (["nvidia1", "nvidiactl"], "nvidia1"),
            (["nvidia0", "nvidia1"], "nvidia0, nvidia1"),
            (["nvidiactl", "nvidia-uvm"], "none"),
        ],
        ids=["another card's node", "one more card", "no card"],
    )
    @pytest.mark.parametrize("name", ["GPU_0", "index_0"])
    def test_the_cards_own_node_and_no_other_cards_must_be_given(self, tmp_path, name, nodes, node_names):
        """As after a card was taken out: the driver counts anew, and the spec has the old numbers."""
        (tmp_path / "nvidia.yaml").write_text(self.spec(**{name: nodes}))
        delivery = Delivery(tmp_path / "cdi", cdi.NvidiaSpecs([tmp_path]))
        reason = delivery.undeliverable_reasons_by_uuid([self.card(0)])["GPU-0"]
        assert (
            f"card 0 (GPU-0) is nvidia0, but {tmp_path}/nvidia.yaml has {node_names} for it; create the spec again"
            in reason
        )

    def test_a_card_is_told_by_its_minor_number_whatever_its_index(self, tmp_path):
        (tmp_path / "nvidia.yaml").write_text(self.spec(index_0=["nvidia3"]))
        assert self.paths(cdi.NvidiaSpecs([tmp_path]), self.card(0, minor=3)) == ["/dev/nvidia3"]

    def test_a_card_by_uuid_or_index_with_the_common_edits(self, tmp_path):
        (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(self.SPEC))
        (tmp_path / "other.json").write_text('{"kind": "vendor.com/nic", "cdiVersion": "0.6.0", "devices": []}')
        (tmp_path / "broken.yaml").write_text("{")
        specs = cdi.NvidiaSpecs([tmp_path / "none", tmp_path])
        edits, version = specs.card_edits(self.card(1))
        assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia1"]
        assert version == "0.7.0"
        edits, _ = specs.card_edits(self.card(0))
        assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia0"]
        assert edits["hooks"] == self.SPEC["containerEdits"]["hooks"]
        assert edits["mounts"] == self.SPEC["containerEdits"]["mounts"]
        with pytest.raises(cdi.NoDevice, match="nvidia-ctk cdi generate"):
            specs.card_edits(self.card(7))

    def test_our_environment_replaces_theirs(self, tmp_path):
        (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(self.SPEC))
        edits, version = cdi.NvidiaSpecs([tmp_path]).card_edits(self.card(1))
        spec = cdi.build_spec("s001", grant(), edits | {"env": ["NVIDIA_VISIBLE_DEVICES=all", "KEPT=1"]}, version)
        env = spec["devices"][0]["containerEdits"]["env"]
        assert "KEPT=1" in env
        assert [entry for entry in env if entry.startswith("NVIDIA_VISIBLE")] == ["NVIDIA_VISIBLE_DEVICES=void"]
        assert spec["cdiVersion"] == "0.7.0"
        assert cdi.build_spec("s001", grant(), {}, "0.3.0")["cdiVersion"] == "0.6.0"

    def test_a_changed_spec_is_read_again(self, tmp_path):
        path = tmp_path / "nvidia.yaml"
        specs = cdi.NvidiaSpecs([path])
        with pytest.raises(cdi.NoDevice):
            specs.card_edits(self.card(1))
        path.write_text(yaml.safe_dump(self.SPEC))
        assert specs.card_edits(self.card(1))

    def test_a_spec_that_has_changed_in_no_more_than_its_words_is_read_again(self, tmp_path):
        path = tmp_path / "nvidia.yaml"
        specs = cdi.NvidiaSpecs([path])
        path.write_text(self.spec(GPU_1=["nvidia1"], GPU_0=["nvidia0"]))
        assert self.paths(specs, self.card(1)) == ["/dev/nvidia1"]
        path.write_text(self.spec(GPU_1=["nvidia0"], GPU_0=["nvidia1"]))  # as many bytes
        os.utime(path, (1, 1))
        assert self.paths(specs, self.card(1, minor=0)) == ["/dev/nvidia0"]

    @pytest.mark.parametrize(
        "bad",
        [
            "devices: [1]",
            "devices: {GPU-0: {}}",
            'devices: [{name: GPU-0, containerEdits: {deviceNodes: ["/dev/nvidia0"]}}]',
            'devices: [{name: GPU-0, containerEdits: {deviceNodes: [{path: /dev/nvidia0}], env: ["A=\\ud800"]}}]',
            "x: " + "[" * 2000 + "]" * 2000,
        ],
    )
    def test_a_spec_of_another_shape_hides_no_card_of_the_others(self, tmp_path, bad):
        """Each pass over the cards failed on it, and no card of the node was published."""
        (tmp_path / "bad.yaml").write_text(f'cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\n{bad}\n')
        (tmp_path / "nvidia.yaml").write_text(self.spec(GPU_1=["nvidia1"]))
        delivery = Delivery(tmp_path / "ours", cdi.NvidiaSpecs([tmp_path]))
        assert list(delivery.undeliverable_reasons_by_uuid([self.card(0), self.card(1)])) == ["GPU-0"]

    @pytest.mark.parametrize(
        "bad",
        [b"{", b"\xff\xfe", b"- list", b"kind: nvidia.com/gpu\ndevices: 1", b'kind: nvidia.com/gpu\nx: "\\ud800"'],
        ids=["syntax", "encoding", "a list", "another shape", "a lone surrogate"],
    )
    def test_a_file_that_cannot_be_read_is_parsed_and_logged_once(self, tmp_path, monkeypatch, bad):
        file = tmp_path / "bad.yaml"
        file.write_bytes(bad)
        (tmp_path / "nic.yaml").write_text("kind: vendor.com/nic")
        parsed: list[str] = []
        load = yaml.safe_load
        monkeypatch.setattr(yaml, "safe_load", lambda content: parsed.append(content) or load(content))
        delivery = Delivery(tmp_path / "ours", cdi.NvidiaSpecs([tmp_path]))
        with capture_logs() as lines:
            for _ in range(3):
                assert delivery.undeliverable_reasons_by_uuid([self.card(0)])
        assert len(parsed) <= 2
        assert [line["file"] for line in lines] == [str(file)], "a spec of another vendor is no fault"
        other = tmp_path / "new"
        other.write_bytes(bad)
        os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        other.replace(file)
        with capture_logs() as lines:
            for _ in range(3):
                assert delivery.undeliverable_reasons_by_uuid([self.card(0)])
        assert len(lines) == 1, "another file of the same size and time is read"

    def test_a_card_without_edits_cannot_be_given_until_they_appear(self, tmp_path):
        delivery = Delivery(tmp_path, cdi.NvidiaSpecs([tmp_path]))
        cards = [self.card(1), self.card(7)]
        assert list(delivery.undeliverable_reasons_by_uuid(cards)) == ["GPU-1", "GPU-7"]
        (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(self.SPEC))
        assert list(delivery.undeliverable_reasons_by_uuid(cards)) == ["GPU-7"]
        assert "nvidia-ctk cdi generate" in delivery.undeliverable_reasons_by_uuid(cards)["GPU-7"]


def test_a_simulated_card_must_be_a_device_node(tmp_path):
    (tmp_path / "file").write_text("")
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path / "file", "mknod")):
        card = GpuCard(
            index=0, uuid="GPU-0", model="m", memory=MiB(1), devices=(DevicePath(str(path), "/dev/nvidia0"),)
        )
        with pytest.raises(cdi.NoDevice, match=says):
            cdi.card_node_edits(card)


def test_the_fraction_is_of_the_tightest_card():
    two = (CardShare(0, "GPU-0", 4000, 0, 16000), CardShare(1, "GPU-1", 4000, 0, 80000))
    env = environment.container_env(grant("u", *two))
    assert env["CARDWISE_MEM_FRACTION"] == "0.0500"
    assert env["CARDWISE_MEM_LIMIT_MIB"] == "4000"
    assert env["ALIYUN_COM_GPU_MEM_IDX"] == "0,1"
    assert env["ALIYUN_COM_GPU_MEM_CONTAINER"] == "8000"


def test_specs_of_no_living_slot_are_found(tmp_path):
    for slot in ("s001", "s002"):
        cdi.write_spec(tmp_path, slot, {"a": 1})
    (tmp_path / ".cardwise.dev-share-s003.json.1.ab").write_text("")
    (tmp_path / "nvidia.yaml").write_text("")
    assert {path.name for path in cdi.find_stale_specs(tmp_path, {"s001"})} == {
        "cardwise.dev-share-s002.json",
        ".cardwise.dev-share-s003.json.1.ab",
    }
