"""SIGTERM with messages left: the process says how many stay in the journal, and none is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MESSAGES = 40


def begin(path: Path, publish: int, seconds: float) -> subprocess.Popen[str]:
    module = "tests.integration.durability.stopping"
    words = [sys.executable, "-m", module, str(path), str(publish), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def handled(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("handled ")]


def test_sigterm_says_how_many_messages_stay_and_the_next_process_handles_them(
    tmp_path: Path,
) -> None:
    path, seen = tmp_path / "journal.db", list[str]()
    process = begin(path, MESSAGES, 0.02)
    assert process.stdout is not None
    while len(handled(seen)) < 3 or "started" not in seen:
        seen.append(process.stdout.readline().strip())
    process.send_signal(signal.SIGTERM)
    seen += process.communicate(timeout=60)[0].splitlines()
    left = MESSAGES - len(handled(seen))

    assert process.returncode == 0
    assert 0 < left < MESSAGES - 2
    assert seen[-1] == f"persisted {left} {{'mail': {left}}}"
    (line,) = [line for line in seen if "messages_stay_in_journal" in line]
    assert f"persisted={left}" in line
    assert "mail" in line

    after = begin(path, 0, 0.0).communicate(timeout=60)[0].splitlines()
    assert sorted(handled(seen) + handled(after)) == list(range(MESSAGES))
    assert after[-1] == "persisted 0 {}"
    assert not [line for line in after if "messages_stay_in_journal" in line]
