import pytest

from cardwise.core.values import quantity
from cardwise.core.values.quantity import InvalidQuantity, Unit, with_unit


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("8138", 8138),
        (8138, 8138),
        ("8k", 8000),  # how the API server prints 8000
        ("8Gi", 8192),
        ("8192Mi", 8192),
        ("0.5Gi", 512),
        ("512Mi", 512),
        ("1048576Ki", 1024),
        ("8e3", 8000),
        ("1024.0", 1024),
        ("1.3Gi", 1332),  # rounded up: 1331.2
        ("1395864371200m", 1332),  # 1.3Gi, as the API server prints it
        ("322122547200m", 308),  # 0.3Gi
        ("1.5Mi", 2),
        ("+5", 5),
    ],
)
def test_memory_reads_mib(text, mib):
    assert quantity.parse_mib(text) == mib


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "above zero"),
        ("-1", "above zero"),
        ("-8Gi", "above zero"),
        ("1.5", "write 1 or 2, or 1536 for 1.5Gi$"),
        ("300m", "^300m is not a whole number of MiB: write 308 for 0.3Gi$"),  # 0.3
        ("8500m", "write 8 or 9, or 8704 for 8.5Gi$"),  # 8.5
        ("8138500m", "write 8138 or 8139$"),
        ("0.3Mi", "^0.3Mi is less than 1 MiB: write a whole number of MiB, such as 512Mi$"),
        ("314572800m", r"^314572800m \(0.3Mi\) is less than 1 MiB: write a whole number"),  # 0.3Mi from the API server
        ("107374183m", r"\(0.1024Mi\) is less than 1 MiB"),  # 0.0001Gi, as the API server prints it
        ("512Ki", r"512Ki \(0.5Mi\) is less than 1 MiB"),
        ("8589934592", "more than any GPU has: without Mi or Gi it means MiB; write 8192 if you mean bytes"),
        ("8G", "8000000000 MiB, more than any GPU has: without .*; write 7629 if you mean bytes, or 8Gi$"),
        ("1e30", "more than any GPU has: write MiB, or a suffix as in 8Gi"),
        ("eight", "is not a quantity"),
        ("8 Gi", "is not a quantity"),
        ("8GiB", "is not a quantity"),
        ("", "is not a quantity"),
        ("٣", "is not a quantity"),
        ("1e9999", "is not a quantity"),
        ("9" * 5000, rf"'{'9' * 32}\.\.\.{'9' * 16}' \(5000 characters\) is not a quantity"),
        ("1e999", "1e999 is too many MiB"),
    ],
)
def test_memory_error_names_the_remedy(text, says):
    with pytest.raises(quantity.InvalidQuantity, match=says):
        quantity.parse_mib(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1395864371200m", "1395864371200m (1.3Gi) is not a whole number of MiB and counts as 1332Mi"),
        ("1.3Gi", "1.3Gi is not a whole number of MiB and counts as 1332Mi"),
        ("1.5Mi", "1.5Mi is not a whole number of MiB and counts as 2Mi"),
        ("8Gi", None), ("8138", None), (8138, None), ("1.5", None), ("0.3Mi", None), ("eight", None), ("0", None),
    ],
)  # fmt: skip
def test_rounding_up_is_described(text: str | int, says: str | None) -> None:
    assert quantity.describe_rounding(text) == says


def test_count_names_its_range():
    with pytest.raises(quantity.InvalidQuantity, match="from 1 to 100"):
        quantity.parse_count("101", maximum=100)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2", "2Gi"), (2, "2Gi"), ("1e1", "10Gi"), ("0.5", "512Mi"), ("1500m", "1536Mi"), ("8k", "8000Gi"),
        ("0.3", "307.2Mi"), ("1300m", "1331.2Mi"),
        ("8Gi", "8Gi"), ("8138Mi", "8138Mi"), ("1Ti", "1Ti"), ("322122547200m", "322122547200m"),
        ("0", "0"), ("-2", "-2"), ("x", "x"), ("", ""),
    ],
)  # fmt: skip
def test_bare_gib_numbers_get_a_unit_and_other_amounts_stay(text: str | int, means: str) -> None:
    assert with_unit(text, Unit.GIB) == means
    assert with_unit(means, Unit.GIB) == means
    assert with_unit(text, Unit.MIB) == str(text)


@pytest.mark.parametrize("text", ["1e-4", "3M", "1e999", "16777216"])
def test_invalid_bare_gib_number_error_suggests_a_unit(text: str) -> None:
    with pytest.raises(InvalidQuantity, match=r"means GiB here.*write a unit, as in (8138Mi or 8Gi|512Mi)$"):
        with_unit(text, Unit.GIB)
