"""What the type checkers must accept (`pass/`) and must reject (`fail/`).

A line of `fail/` that is wrong says which errors it must give, and gives no others:

    text: str = 1  # expect: mypy[assignment] pyright[reportAssignmentType]

Several errors of one checker on one line are split by commas; a checker that is not named
must be silent there. An error belongs to the line where the checker puts its beginning.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

MARK = re.compile(r"#\s*expect:(?P<rest>.*)$")
ITEM = re.compile(r"\s*(?P<checker>mypy|pyright)\[(?P<codes>[^\]]+)\]")

# Each as "folder/file.py:line code".
Errors = Counter[str]

pytestmark = pytest.mark.timeout(300)


def label(file: str | Path, line: int, code: str) -> str:
    return f"{(ROOT / file).resolve().relative_to(HERE).as_posix()}:{line} {code}"


def expected(checker: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield line and code of every error that `source` announces for `checker`.

    Raises:
        ValueError: A comment begins like an announcement but cannot be read as one.
    """
    for number, line in enumerate(source.splitlines(), start=1):
        mark = MARK.search(line)
        if mark is None:
            continue
        if not mark["rest"].strip() or ITEM.sub("", mark["rest"]).strip():
            raise ValueError(f"line {number}: cannot read {mark[0]!r}")
        for item in ITEM.finditer(mark["rest"]):
            if item["checker"] == checker:
                yield from ((number, code.strip()) for code in item["codes"].split(","))


def expected_errors(checker: str) -> Errors:
    return Errors(
        label(path, line, code)
        for path in sorted(HERE.glob("*/*.py"))
        for line, code in expected(checker, path.read_text(encoding="utf-8"))
    )


def output_of(module: str, *arguments: str | Path) -> str:
    """Run a checker and return its output, which has to be that of a run that took place."""
    run = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    return run.stdout


def mypy_errors() -> Errors:
    # A cache of its own: `make check` may be at work on the usual one.
    cache = ROOT / ".mypy_cache" / "typing"
    files = sorted(path.relative_to(ROOT) for path in HERE.glob("*/*.py"))
    output = output_of("mypy", "--output=json", f"--cache-dir={cache}", *files)
    findings: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    return Errors(
        label(finding["file"], finding["line"], finding["code"])
        for finding in findings
        if finding["severity"] == "error"
    )


def pyright_errors(folder: Path) -> Errors:
    # The project's own settings, except that `fail/` is not left out.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config = folder / "pyrightconfig.json"
    changes = {"include": [str(HERE / "pass"), str(HERE / "fail")], "exclude": []}
    config.write_text(json.dumps(settings["tool"]["basedpyright"] | changes))

    arguments = ("--outputjson", "--project", config, "--pythonpath", sys.executable)
    report: dict[str, Any] = json.loads(output_of("basedpyright", *arguments))

    assert report["summary"]["filesAnalyzed"] == len(list(HERE.glob("*/*.py")))
    return Errors(
        label(finding["file"], finding["range"]["start"]["line"] + 1, finding.get("rule", "syntax"))
        for finding in report["generalDiagnostics"]
        if finding["severity"] == "error"
    )


def assert_same(actual: Errors, wanted: Errors) -> None:
    unexpected = [f"not announced: {error}" for error in sorted((actual - wanted).elements())]
    missing = [f"not reported:  {error}" for error in sorted((wanted - actual).elements())]
    if unexpected or missing:
        pytest.fail("\n".join(unexpected + missing), pytrace=False)


@pytest.mark.slow
def test_mypy_rejects_the_marked_lines_and_no_others() -> None:
    assert_same(mypy_errors(), expected_errors("mypy"))


@pytest.mark.slow
def test_pyright_rejects_the_marked_lines_and_no_others(tmp_path: Path) -> None:
    assert_same(pyright_errors(tmp_path), expected_errors("pyright"))


def test_only_files_that_must_fail_announce_errors() -> None:
    announced = expected_errors("mypy") + expected_errors("pyright")

    assert announced
    assert {error.split("/")[0] for error in announced} == {"fail"}


def test_announcement_may_name_several_errors_of_one_checker() -> None:
    source = "x\ny  # expect: mypy[a, b] pyright[c]\n"

    assert list(expected("mypy", source)) == [(2, "a"), (2, "b")]
    assert list(expected("pyright", source)) == [(2, "c")]


@pytest.mark.parametrize("comment", ["# expect:", "# expect: mypi[a]", "# expect: mypy[a] oops"])
def test_announcement_that_cannot_be_read_is_refused(comment: str) -> None:
    with pytest.raises(ValueError, match="line 1: cannot read"):
        list(expected("mypy", comment))
