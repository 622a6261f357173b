"""From a URL to a journal; what a journal promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgbus.errors import ConfigurationError, JournalOpenError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.opening import open_journal
from msgbus.journal.records import LEVELS, Promises
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import fill


async def test_a_url_names_a_file_or_memory(tmp_path: Path) -> None:
    file = open_journal(f"sqlite:///{tmp_path}/shop.db?reserve=0")
    tables = open_journal("sqlite:///:memory:")
    memory = open_journal("memory:")

    assert isinstance(file, SqliteJournal)
    assert isinstance(tables, SqliteJournal)
    assert isinstance(memory, MemoryJournal)
    assert (file.path, tables.path) == (f"{tmp_path}/shop.db", ":memory:")
    for journal in (file, tables, memory):
        assert await fill(journal, 2) == [1, 2]
        assert journal.member_ttl is None
        await journal.close()


@pytest.mark.parametrize("url", ["postgres://host/shop", "memory", "", "shop.db"])
def test_a_url_of_no_journal_is_refused(url: str) -> None:
    with pytest.raises(JournalOpenError, match="is no journal that msgbus knows") as caught:
        open_journal(url)

    assert repr(url) in str(caught.value)
    assert "sqlite:///shop.db" in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite://host/shop.db", "sqlite:", "sqlite:///"])
def test_a_url_of_no_file_is_refused(url: str) -> None:
    with pytest.raises(JournalOpenError, match="names no file"):
        open_journal(url)


@pytest.mark.parametrize(
    "option",
    ["colour=red", "adopt=yes", "lock_timeout=long", "max_count=many", "member_ttl=0", "reserve=x"],
)
def test_an_option_that_makes_no_sense_is_refused(tmp_path: Path, option: str) -> None:
    url = f"sqlite:///{tmp_path}/shop.db?{option}"
    with pytest.raises(JournalOpenError, match="an option that makes no sense") as caught:
        open_journal(url)

    assert "adopt, lock_timeout, reserve, member_ttl, max_age" in str(caught.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(JournalOpenError, match="Known are: member_ttl"):
        open_journal(f"memory:?{option}")


async def test_the_ttl_of_members_is_in_the_url(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/shop.db?reserve=0&member_ttl=2.5", "memory:?member_ttl=2.5"):
        async with open_journal(url) as journal:
            assert journal.member_ttl == 2.5
    async with MemoryJournal(member_ttl=1) as journal:
        assert journal.beside().member_ttl == 1


async def test_an_option_in_the_url_comes_before_a_keyword(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db?member_ttl=2&reserve=0"
    async with SqliteJournal(url, member_ttl=9, reserve=100) as journal:
        assert journal.member_ttl == 2
        assert not (tmp_path / "shop.db-reserve").exists()


async def test_memory_meets_memory_only_and_a_file_up_to_fsync(tmp_path: Path) -> None:
    async with (
        open_journal("memory:") as memory,
        open_journal("sqlite:///:memory:") as tables,
        open_journal(f"sqlite:///{tmp_path}/shop.db") as file,
    ):
        for journal in (memory, tables):
            assert [level for level in LEVELS if journal.promises.meets(level)] == ["memory"]
            assert journal.promises.level == "memory"
        assert [level for level in LEVELS if file.promises.meets(level)] == [
            "memory",
            "os",
            "fsync",
        ]
        assert file.promises.level == "fsync"
        with pytest.raises(ConfigurationError, match="'disk' is no level of require_ack"):
            file.promises.meets("disk")


@pytest.mark.parametrize(
    ("power_cut", "met"),
    [(False, ["memory", "os", "quorum"]), (True, list(LEVELS))],
)
def test_a_quorum_is_no_fsync(power_cut: bool, met: list[str]) -> None:
    promises = Promises(
        survives_kill=True,
        survives_power_cut=power_cut,
        survives_node_loss=True,
        dedupe_window=None,
        failover=0.5,
        is_ordered=True,
    )

    assert [level for level in LEVELS if promises.meets(level)] == met
    assert promises.level == met[-1]
