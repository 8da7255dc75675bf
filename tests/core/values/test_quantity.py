import pytest

from cardwise.core.values import quantity


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
        ("+5", 5),
    ],
)
def test_memory_reads_mib(text, mib):
    assert quantity.memory(text) == mib


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "above zero"),
        ("-1", "above zero"),
        ("-8Gi", "above zero"),
        ("1.5", "write 1 or 2"),
        ("8138500m", "write 8138 or 8139 for MiB"),
        ("107374183m", "0.0005Gi, is written 1Mi"),  # 0.0001Gi, as the API server prints it
        ("1500m", "write 1 or 2$"),
        ("512Ki", "write 1Mi"),
        ("1.5Mi", "write 1Mi or 2Mi"),
        ("322122547200m", "write 307Mi or 308Mi"),  # 0.3Gi, as the API server prints it
        ("8589934592", "more than any card has"),
        ("1e30", "more than any card has"),
        ("eight", "is not a quantity"),
        ("8 Gi", "is not a quantity"),
        ("8GiB", "is not a quantity"),
        ("", "is not a quantity"),
        ("٣", "is not a quantity"),
        ("1e9999", "is not a quantity"),
        ("9" * 5000, "'99999999999999999999...99999' is not a quantity"),
        ("1e999", "1e999 is too many MiB"),
    ],
)
def test_memory_refuses_and_says_what_to_write(text, says):
    with pytest.raises(quantity.InvalidQuantity, match=says):
        quantity.memory(text)


def test_count_names_its_range():
    with pytest.raises(quantity.InvalidQuantity, match="from 1 to 100"):
        quantity.count("101", most=100)
