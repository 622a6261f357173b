"""Every Python snippet of README and docs runs, and prints what the page says it prints.

The blocks of a page share one namespace, in order. A block may use `await` at top level,
as in `python -m asyncio`. A `text` block directly after a block is its output, a `pytb` block
the error that it raises. A page with tests in it is also handed to pytest, as a file, without
the blocks that are no plain Python.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import subprocess
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest
from starlette.testclient import TestClient

from tests.docs.pages import ROOT, Block, Program, fits, page_id, pages, programs, spark_pages

README = ROOT / "README.md"
# Those with Spark in them are run by tests/spark/test_guides.py, on the one session of the tests.
# Its snippets are programs with a mistake: tests/docs/test_when_it_does_not_work.py runs them.
MISTAKES = ROOT / "docs" / "how-to" / "when-it-does-not-work.md"
PAGES = [
    page for page in pages() if programs(page) and page not in spark_pages() and page != MISTAKES
]
TESTED = [page for page in PAGES if any("def test_" in one.block.text for one in programs(page))]


@contextlib.contextmanager
def page_module(page: Path) -> Generator[ModuleType]:
    """A module for a page's blocks: found by name, as pydantic and pickle expect."""
    module = ModuleType(re.sub(r"\W", "_", page_id(page)))
    module.__file__ = str(page)
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        del sys.modules[module.__name__]


def is_plain(block: Block) -> bool:
    """Whether it would run in a file, which knows no `await` at top level."""
    try:
        compile(block.text, "block", "exec")
    except SyntaxError:
        return False
    return True


def run_block(block: Block, page: Path, module: ModuleType, runner: asyncio.Runner) -> str:
    """Run one block and give what it printed; errors show the page's own line numbers."""
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if code.co_flags & inspect.CO_COROUTINE:
            runner.run(eval(code, module.__dict__))
        else:
            exec(code, module.__dict__)
    return printed.getvalue()


def check(program: Program, page: Path, module: ModuleType, runner: asyncio.Runner) -> None:
    """Run one block; it must print, or raise, what the page says."""
    where = f"{page_id(page)}:{program.block.line}"
    if program.raised is not None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the page says which)
            run_block(program.block, page, module, runner)
        raised = "".join(traceback.format_exception_only(caught.value))
        raised = raised.removeprefix(f"{module.__name__}.")  # as in a program
        assert fits(program.raised, raised), f"{where} raises\n{raised}"
        return
    printed = run_block(program.block, page, module, runner)
    assert program.printed is None or printed == program.printed, where


def run_file(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as a newcomer would: pasted into a file."""
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True, text=True, timeout=50, check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_snippets_of_a_page_run_and_print_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some make files
    with page_module(page) as module, asyncio.Runner() as runner:
        for program in programs(page):
            check(program, page, module, runner)


@pytest.mark.parametrize("page", TESTED, ids=page_id)
def test_the_tests_on_a_page_pass(page: Path, tmp_path: Path) -> None:
    path = tmp_path / "test_page.py"
    plain = [one.block.text for one in programs(page) if is_plain(one.block)]
    path.write_text("\n\n".join(plain), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "--rootdir", str(tmp_path),
         "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function",
         "-p", "no:randomly", "-p", "no:cacheprovider", str(path)],
        capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_no_snippet_of_a_page_escapes_by_its_spelling(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    written = len(re.findall(r"(?im)^\s*(?:```+|~~~+)\s*(?:python|py|pycon)\b", text))
    marked = len(re.findall(r"^<!-- not run: \S.* -->$", text, re.MULTILINE))

    assert written == len(programs(page)) + marked


def test_the_program_of_the_readme_runs_as_pasted_and_prints_what_it_says(tmp_path: Path) -> None:
    program = programs(README)[0]

    done = run_file(program.block.text, tmp_path)

    assert (done.stdout, done.stderr) == (program.printed, "")


def test_the_program_of_the_readme_is_short() -> None:
    program = programs(README)[0]

    assert sum(1 for line in program.block.text.splitlines() if line.strip()) <= 18


def test_the_fastapi_lines_of_the_readme_answer_a_request() -> None:
    program, *others = [one.block.text for one in programs(README)]
    (lines,) = [text for text in others if "FastAPI(" in text]
    with page_module(README) as module:
        exec(program.replace("asyncio.run(main())", ""), module.__dict__)
        exec(lines, module.__dict__)

        with TestClient(module.app) as client:
            answer = client.post("/orders", json={"sku": "tea"})

    assert (answer.status_code, answer.json()) == (200, "order-1")


# -- what docs/index.md says of `python -m asyncio` --------------------------------------------


def typed(code: str, folder: Path) -> str:
    """What `python -m asyncio` says to code that it is given line by line."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input=code, capture_output=True, text=True, timeout=50, check=False, cwd=folder,
    )  # fmt: skip
    return re.sub(r"(>>> |\.\.\. )+", "", done.stdout + done.stderr)


def test_line_by_line_a_blank_line_ends_a_function(tmp_path: Path) -> None:
    assert "IndentationError" in typed("def f():\n    x = 1\n\n    return x\n\n", tmp_path)


def test_line_by_line_a_page_without_such_lines_runs_as_it_is(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "ask-and-wait-for-an-answer.md"
    code = "\n".join(f"{one.block.text}\n" for one in programs(page))
    expected = [line for one in programs(page) for line in (one.printed or "").splitlines()]

    said = typed(code, tmp_path).splitlines()

    if sys.version_info < (3, 13):  # from then on it takes what is pasted as a whole
        assert [line for line in said if line in expected] == expected
