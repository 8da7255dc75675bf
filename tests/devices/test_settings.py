"""The file of `--devices`: its meaning, and the errors about it."""

import pytest

from cardwise.core.values.invalid import InvalidRequest
from cardwise.devices.settings import DeviceRule, PciFacts, parse_rules

CX5 = PciFacts("15b3", "1017", "020700")


def test_the_entries_of_the_design():
    text = """
    devices:
      - {kind: rdma}
      - {kind: nic, pci: {vendor: "15B3", device: "0x1018"}}
      - {kind: fpga, pci: {class: "1200"}}
    """
    assert parse_rules(text, "f") == (
        DeviceRule(kind="rdma"),
        DeviceRule(kind="nic", vendor="15b3", device="1018"),
        DeviceRule(kind="fpga", class_code="1200"),
    )


@pytest.mark.parametrize(
    ("offer", "matches"),
    [
        (DeviceRule(kind="nic", vendor="15b3"), True),
        (DeviceRule(kind="nic", vendor="15b3", device="1017", class_code="02"), True),
        (DeviceRule(kind="nic", vendor="15b3", device="1018"), False),
        (DeviceRule(kind="nic", vendor="8086", device="1017"), False),
        (DeviceRule(kind="nic", class_code="0207"), True),
        (DeviceRule(kind="nic", class_code="0200"), False),
    ],
)
def test_all_fields_of_a_rule_must_match(offer, matches):
    assert offer.matches(CX5) is matches


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("devices: [", "f:1", "not YAML"),
        ("- kind: rdma", "f", "no list `devices`"),
        ("devices: {kind: rdma}", "f", "no list `devices`"),
        ("devices: []\nmore: 1", "f: more", "write devices"),
        ("devices: [rdma]", "f: devices[0]", "not an entry"),
        ("devices: [{kind: rdma}, {pci: {vendor: '15b3'}}]", "f: devices[1].kind", "is missing"),
        ("devices: [{kind: My_NIC, pci: {vendor: '15b3'}}]", "f: devices[0].kind", "not a DNS label"),
        ("devices: [{kind: nvidia-gpu, pci: {vendor: '10de'}}]", "f: devices[0].kind", "found by their driver"),
        ("devices: [{kind: nic}]", "f: devices[0].pci", "is missing; write vendor or device or class"),
        ("devices: [{kind: nic, pci: {}}]", "f: devices[0].pci", "every device"),
        ("devices: [{kind: nic, pci: {Vendor: '15b3'}}]", "f: devices[0].pci.Vendor", "not a known field"),
        ("devices: [{kind: nic, pci: {vendor: 8086}}]", "f: devices[0].pci.vendor", "in quotes"),
        ("devices: [{kind: nic, pci: {device: '10189'}}]", "f: devices[0].pci.device", "four hexadecimal digits"),
        ("devices: [{kind: nic, pci: {device: ''}}]", "f: devices[0].pci.device", "four hexadecimal digits"),
        ("devices: [{kind: nic, pci: {class: null}}]", "f: devices[0].pci.class", "hexadecimal"),
        ("devices: [{kind: nic, pci: {class: '0200000'}}]", "f: devices[0].pci.class", "six hexadecimal digits"),
    ],
)
def test_invalid_rule_error_names_field_and_remedy(text, field, says):
    with pytest.raises(InvalidRequest) as caught:
        parse_rules(text, "f")
    assert caught.value.field == field
    assert says in str(caught.value)
