"""`make walk`: the files and functions of msgbus that a message passes."""

from __future__ import annotations

import sys
import threading

import pytest

from benchmarks.walk import WALKS, main, walk


def test_the_numbers_of_some_walks_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["command", "event", "--counts"]) == 0

    passed = {name: walk(name) for name in ("command", "event")}
    counted = {name: sum(map(len, files.values())) for name, files in passed.items()}
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: {len(passed[name])} files, {counted[name]} functions" for name in passed
    ]


def test_files_are_printed_with_their_functions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["command"]) == 0

    assert "  msgbus/bus/commands.py: CommandMethods.execute" in capsys.readouterr().out


def test_the_first_message_passes_what_the_second_passes_and_more() -> None:
    first, second = walk("command", first=True), walk("command")

    assert second.items() <= {name: files[:1] for name, files in first.items()}.items()
    assert len(first) > len(second)


def test_a_durable_event_is_traced_into_the_thread_of_the_journal() -> None:
    assert "CommitWriter._commit" in walk("durable")["msgbus/journal/sqlite/writer.py"]


def test_the_walk_of_a_durable_event_stays_short() -> None:
    passed = walk("durable")

    assert len(passed) <= 25
    assert sum(map(len, passed.values())) <= 100


def test_a_dead_letter_is_traced_to_its_store() -> None:
    functions = [one for several in walk("dead-letter").values() for one in several]

    assert "MemoryDeadLetterStore.add" in functions


def test_the_way_to_a_dead_letter_stays_short() -> None:
    passed = walk("dead-letter")

    assert len(passed) <= 20, sorted(passed)
    assert sum(map(len, passed.values())) <= 80, passed


def test_nothing_is_watched_afterwards() -> None:
    before = sys.getprofile(), threading.getprofile()

    walk("command")

    assert (sys.getprofile(), threading.getprofile()) == before


def test_an_unknown_walk_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["comand"])

    assert f"walks are: {', '.join(WALKS)}" in capsys.readouterr().err
