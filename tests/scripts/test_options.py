"""Options of scripts/lab: sizes, rates, hosts, specs, names, folders."""

import argparse
from pathlib import Path

import pytest

from laboratory import options


def test_sizes_are_read_as_people_write_them() -> None:
    assert [options.size(text) for text in ("16.8M", "500k", "1000")] == [16_800_000, 500_000, 1000]
    for text in ("", "1G", "999", "-5k", "3000M", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
            options.size(text)


def test_rates_are_those_of_the_cluster() -> None:
    assert options.rates("1gbit, 100MBIT,none") == ["1gbit", "100mbit", "none"]
    for text in ("fast", "0gbit", "1gbit,", "100"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a rate"):
            options.rates(text)


def test_specs_are_separated_by_commas_or_semicolons() -> None:
    found = ["dense", "topk:ratio=0.01,momentum=0.9", "half", "topk:ratio=0.001"]
    assert options.specs("dense,topk:ratio=0.01,momentum=0.9,half,topk:ratio=0.001") == found
    assert options.specs("dense;topk:ratio=0.01,momentum=0.9; half;topk:ratio=0.001") == found
    assert options.specs("dense,topk:ratio=0.1,wire=exact") == ["dense", "topk:ratio=0.1,wire=exact"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpk", "did you mean 'topk'"),
        ("topk:raito=1", "did you mean 'ratio'"),
        ("dense,dense", "twice"),
        ("", "nothing is given"),
        ("stock", "there is no compressor 'stock'"),
    ],
)
def test_a_wrong_spec_is_refused_before_ranks_are_launched(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        options.specs(text)


def test_hosts_are_numbers_that_differ() -> None:
    assert options.hosts("2, 4,8") == [2, 4, 8]
    for text in ("1", "2,300", "two", "2,", "4,4"):
        with pytest.raises(argparse.ArgumentTypeError):
            options.hosts(text)


def test_a_name_is_part_of_a_files_name() -> None:
    assert options.name("my-run-2") == "my-run-2"
    for text in ("", "../x", "Upper", "a b"):
        with pytest.raises(argparse.ArgumentTypeError, match="part of a file's name"):
            options.name(text)


def test_a_folder_need_not_exist(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "folder", Path("new")):
        assert options.folder(str(path)) == path
