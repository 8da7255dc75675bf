"""Which devices a node offers: the file behind the device plugin's `--devices`.

    devices:
      - kind: rdma                                   # all RDMA devices
      - kind: nic
        pci: {vendor: "15b3", device: "1018"}        # as `lspci -nn` shows them
      - kind: fpga
        pci: {class: "1200"}                         # the first digits of the six

All that an entry says must hold of a device; the first entry that matches has it. Nothing is offered that is not
written here: most PCI devices of a machine are its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from cardwise.core.values import objectnames
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quoted
from cardwise.devices.protocol import RDMA

_GPU = "nvidia-gpu"  # the kind of cards, which come from their driver
_PCI_FIELDS = ("vendor", "device", "class")
_ID = re.compile(r"[0-9a-f]{4}")
_CLASS = re.compile(r"[0-9a-f]{1,6}")
_EXAMPLE = '{kind: nic, pci: {vendor: "15b3", device: "1018"}}'


@dataclass(frozen=True, slots=True)
class PciFacts:
    """What a PCI device is: hexadecimal digits in lower case, without 0x; `code` has the six of its class."""

    vendor: str
    device: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRule:
    """One entry. "" matches anything; `code` is the beginning of a device's class."""

    kind: str
    vendor: str = ""
    device: str = ""
    code: str = ""

    @property
    def any_pci(self) -> bool:
        """Whether it says nothing of PCI, so that a device without a PCI address matches as well."""
        return not (self.vendor or self.device or self.code)

    def matches(self, found: PciFacts) -> bool:
        return (
            self.vendor in ("", found.vendor) and self.device in ("", found.device) and found.code.startswith(self.code)
        )


def parse(text: str, source: str) -> tuple[DeviceRule, ...]:
    """The entries of a file's text; `source` names it. Raises InvalidRequest."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        remedy = f"write `devices:` and a list of entries such as {_EXAMPLE}"
        raise InvalidRequest(where, f"not YAML: {getattr(error, 'problem', None) or error}", remedy) from error
    if not isinstance(document, Mapping) or not isinstance(document.get("devices"), list):
        raise InvalidRequest(source, "has no list `devices`", f"write `devices:` and entries such as {_EXAMPLE}")
    _only(document, ("devices",), f"{source}: ")
    return tuple(_offer(entry, f"{source}: devices[{i}]") for i, entry in enumerate(document["devices"]))


def _offer(entry: object, field: str) -> DeviceRule:
    if not isinstance(entry, Mapping):
        raise InvalidRequest(field, f"{quoted(entry)} is no entry", f"write a map such as {_EXAMPLE}")
    _only(entry, ("kind", "pci"), f"{field}.")
    kind = entry.get("kind")
    if not isinstance(kind, str) or not objectnames.is_label(kind):
        problem = "is missing" if kind is None else f"{quoted(kind)} is no DNS label"
        raise InvalidRequest(f"{field}.kind", problem, "write rdma, or a word of your own such as nic or fpga")
    if kind == _GPU:
        remedy = "leave it out, or choose another word for devices that are none"
        raise InvalidRequest(f"{field}.kind", f"{kind} are found by their driver and need no entry", remedy)
    pci = entry.get("pci")
    if pci is None and kind == RDMA:
        return DeviceRule(kind=kind)
    if not isinstance(pci, Mapping) or not pci:
        problem = "is missing" if pci is None else "would be every device" if pci == {} else f"{quoted(pci)} is no map"
        raise InvalidRequest(f"{field}.pci", problem, f"write {' or '.join(_PCI_FIELDS)}, such as {_EXAMPLE}")
    _only(pci, _PCI_FIELDS, f"{field}.pci.")
    return DeviceRule(
        kind=kind,
        vendor=_digits(pci, "vendor", _ID, field, 'four hexadecimal digits in quotes, such as "15b3"'),
        device=_digits(pci, "device", _ID, field, 'four hexadecimal digits in quotes, such as "1018"'),
        code=_digits(pci, "class", _CLASS, field, 'the first of its six hexadecimal digits in quotes, such as "1200"'),
    )


def _digits(pci: Mapping[str, object], name: str, pattern: re.Pattern[str], field: str, wanted: str) -> str:
    value = pci.get(name)
    if value is None and name not in pci:
        return ""
    # No numbers: YAML reads 0018 as octal and 1018 as decimal, and nobody could say what was meant.
    digits = value.lower().removeprefix("0x") if isinstance(value, str) else ""
    if not pattern.fullmatch(digits):
        raise InvalidRequest(f"{field}.pci.{name}", f"{quoted(value)} is not that", f"write {wanted}")
    return digits


def _only(given: Mapping[object, object], fields: tuple[str, ...], prefix: str) -> None:
    for name in given:
        if name not in fields:
            raise InvalidRequest(f"{prefix}{name}", "is no field here", f"write {' or '.join(fields)}")
