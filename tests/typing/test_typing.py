"""What the type checkers must accept (`pass/`) and must reject (`fail/`).

A line of `fail/` that is wrong says which errors it must give, and gives no others:

    text: str = 1  # expect: mypy[assignment] pyright[reportAssignmentType]

Several errors of one checker on one line are split by commas; a checker that is not named
must be silent there. An error belongs to the line where the checker puts its beginning.

Files of `imports/` are made for each run: in them every public name is imported from each public
module, and one that is misspelt.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.public import MODULES, public_names

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

MARK = re.compile(r"#\s*expect:(?P<rest>.*)$")
ITEM = re.compile(r"\s*(?P<checker>mypy|pyright)\[(?P<codes>[^\]]+)\]")

FILES = sorted(HERE.glob("*/*.py"))

MISSPELT = """\
# pyright: reportUnusedImport=false
from {module} import CircuitBrekaer  # expect: mypy[attr-defined] \
pyright[reportAttributeAccessIssue, reportUnknownVariableType]
"""

# Each as "folder/file.py:line code".
Errors = Counter[str]

pytestmark = pytest.mark.timeout(300)


def label(file: str | Path, line: int, code: str) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.name}:{line} {code}"


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


def expected_errors(checker: str, files: Iterable[Path]) -> Errors:
    return Errors(
        label(path, line, code)
        for path in files
        for line, code in expected(checker, path.read_text(encoding="utf-8"))
    )


@pytest.fixture
def imports(tmp_path: Path) -> list[Path]:
    """A file for each public module."""
    folder = tmp_path / "imports"
    folder.mkdir()
    files: list[Path] = []
    for module in MODULES:
        names = (f"from {module} import {name}\n" for name in public_names(module))
        # Not called like the module: mypy would take the one for the other.
        file = folder / f"from_{module.replace('.', '_')}.py"
        file.write_text(MISSPELT.format(module=module) + "".join(names))
        files.append(file)
    return files


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


def mypy_errors(files: Iterable[Path]) -> Errors:
    # A cache of its own: `make check` may be at work on the usual one.
    cache = ROOT / ".mypy_cache" / "typing"
    output = output_of("mypy", "--output=json", f"--cache-dir={cache}", *files)
    findings: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    return Errors(
        label(finding["file"], finding["line"], finding["code"])
        for finding in findings
        if finding["severity"] == "error"
    )


def pyright_errors(folder: Path, files: Sequence[Path]) -> Errors:
    # The project's own settings, except that `fail/` is not left out.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config = folder / "pyrightconfig.json"
    changes = {"include": [str(file) for file in files], "exclude": []}
    config.write_text(json.dumps(settings["tool"]["basedpyright"] | changes))

    arguments = ("--outputjson", "--project", config, "--pythonpath", sys.executable)
    report: dict[str, Any] = json.loads(output_of("basedpyright", *arguments))

    assert report["summary"]["filesAnalyzed"] == len(files)
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
def test_mypy_rejects_the_marked_lines_and_no_others(imports: list[Path]) -> None:
    files = [*FILES, *imports]

    assert_same(mypy_errors(files), expected_errors("mypy", files))


@pytest.mark.slow
def test_pyright_rejects_the_marked_lines_and_no_others(
    tmp_path: Path, imports: list[Path]
) -> None:
    files = [*FILES, *imports]

    assert_same(pyright_errors(tmp_path, files), expected_errors("pyright", files))


def test_only_files_that_must_fail_announce_errors() -> None:
    announced = expected_errors("mypy", FILES) + expected_errors("pyright", FILES)

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
