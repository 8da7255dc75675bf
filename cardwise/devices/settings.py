"""The rules for the devices that a node offers: the file of the device plugin's `--devices`.

    devices:
      - kind: rdma                                   # all RDMA devices
      - kind: nic
        pci: {vendor: "15b3", device: "1018"}        # as `lspci -nn` shows them
      - kind: fpga
        pci: {class: "1200"}                         # the first digits of the six

A device must match every field of a rule; the first rule that matches a device offers it. Devices that match no rule
are not offered: most PCI devices of a machine are needed by the machine itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from cardwise.core.values import objectnames
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from cardwise.devices.protocol import RDMA_KIND

_GPU_KIND = "nvidia-gpu"  # the kind of GPUs: a rule may not use it, since the driver reports GPUs
_PCI_FIELDS = ("vendor", "device", "class")
_PCI_ID_PATTERN = re.compile(r"[0-9a-f]{4}")
_PCI_CLASS_PATTERN = re.compile(r"[0-9a-f]{1,6}")
_EXAMPLE = '{kind: nic, pci: {vendor: "15b3", device: "1018"}}'


@dataclass(frozen=True, slots=True)
class PciFacts:
    """The IDs of a PCI device: hexadecimal digits in lower case, without 0x. `class_code` has six digits."""

    vendor: str
    device: str
    class_code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRule:
    """A rule: an entry of the file. None matches anything; `class_code` is a prefix of a device's class."""

    kind: str
    vendor: str | None = None
    device: str | None = None
    class_code: str | None = None

    @property
    def matches_any_pci(self) -> bool:
        """Whether the rule leaves out all PCI fields. Then devices without a PCI address match as well."""
        return not (self.vendor or self.device or self.class_code)

    def matches(self, device: PciFacts) -> bool:
        return (
            self.vendor in (None, device.vendor)
            and self.device in (None, device.device)
            and device.class_code.startswith(self.class_code or "")
        )


def parse_rules(text: str, source: str) -> tuple[DeviceRule, ...]:
    """Parse the text of a file into its rules. `source` names the file in errors. Raises InvalidRequest."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        remedy = f"write `devices:` and a list of entries such as {_EXAMPLE}"
        raise InvalidRequest(place, f"not YAML: {getattr(error, 'problem', None) or error}", remedy) from error
    if not isinstance(document, Mapping) or not isinstance(document.get("devices"), list):
        raise InvalidRequest(source, "has no list `devices`", f"write `devices:` and entries such as {_EXAMPLE}")
    _check_field_names(document, ("devices",), f"{source}: ")
    return tuple(_parse_rule(entry, f"{source}: devices[{i}]") for i, entry in enumerate(document["devices"]))


def _parse_rule(entry: object, field: str) -> DeviceRule:
    if not isinstance(entry, Mapping):
        raise InvalidRequest(field, f"{quote_text(entry)} is not an entry", f"write a map such as {_EXAMPLE}")
    _check_field_names(entry, ("kind", "pci"), f"{field}.")
    kind = entry.get("kind")
    if not isinstance(kind, str) or not objectnames.is_label(kind):
        problem = "is missing" if kind is None else f"{quote_text(kind)} is not a DNS label"
        raise InvalidRequest(f"{field}.kind", problem, "write rdma, or a word of your own such as nic or fpga")
    if kind == _GPU_KIND:
        remedy = "leave the entry out, or choose another kind for devices that are not GPUs"
        raise InvalidRequest(f"{field}.kind", f"{kind} devices are found by their driver and need no entry", remedy)
    pci = entry.get("pci")
    if pci is None and kind == RDMA_KIND:
        return DeviceRule(kind=kind)
    if not isinstance(pci, Mapping) or not pci:
        problem = (
            "is missing"
            if pci is None
            else "would match every device"
            if pci == {}
            else f"{quote_text(pci)} is not a map"
        )
        raise InvalidRequest(f"{field}.pci", problem, f"write {' or '.join(_PCI_FIELDS)}, such as {_EXAMPLE}")
    _check_field_names(pci, _PCI_FIELDS, f"{field}.pci.")
    return DeviceRule(
        kind=kind,
        vendor=_parse_digits(
            pci, "vendor", _PCI_ID_PATTERN, field, 'four hexadecimal digits in quotes, such as "15b3"'
        ),
        device=_parse_digits(
            pci, "device", _PCI_ID_PATTERN, field, 'four hexadecimal digits in quotes, such as "1018"'
        ),
        class_code=_parse_digits(
            pci, "class", _PCI_CLASS_PATTERN, field, 'the first of its six hexadecimal digits in quotes, such as "1200"'
        ),
    )


def _parse_digits(
    pci: Mapping[str, object], name: str, pattern: re.Pattern[str], field: str, expected: str
) -> str | None:
    raw = pci.get(name)
    if raw is None and name not in pci:
        return None
    # No numbers: YAML reads 0018 as octal and 1018 as decimal.
    if not isinstance(raw, str) or not pattern.fullmatch(digits := raw.lower().removeprefix("0x")):
        raise InvalidRequest(f"{field}.pci.{name}", f"{quote_text(raw)} is not valid", f"write {expected}")
    return digits


def _check_field_names(mapping: Mapping[object, object], fields: tuple[str, ...], prefix: str) -> None:
    for name in mapping:
        if name not in fields:
            raise InvalidRequest(f"{prefix}{name}", "is not a known field", f"write {' or '.join(fields)}")
