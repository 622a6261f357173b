"""What is built and committed: the sdist, the wheel made from it, and two guards on the tree."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Literal

import pytest
from build import ProjectBuilder
from pyproject_hooks import quiet_subprocess_runner

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(300)

# Written so that no pattern matches its own text.
MACHINE_PATTERNS = {
    "home directory": re.compile(r"/(?:home|Users)/[\w.-]+/|/[r]oot/|\b[A-Z]:\\+Users\\"),
    "package index URL": re.compile(r"\b(?:https?|file)://\S+/[s]imple\b"),
    "package index option": re.compile(r"(?i)\bindex[-_][u]rl\b|\bfind[-_][l]inks\b"),
}


def repository_files() -> list[Path]:
    """Return the files of the repository: committed, or new and not ignored; links left out."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listing = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in sorted(set(listing.split("\0"))) if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def built(source: Path, distribution: Literal["sdist", "wheel"], output: Path) -> Path:
    """Build in the running environment, so that nothing has to be downloaded."""
    builder = ProjectBuilder(source, sys.executable, runner=quiet_subprocess_runner)
    return Path(builder.build(distribution, output))


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names inside a wheel that was built from the unpacked sdist."""
    work = tmp_path_factory.mktemp("packaging")
    sdist = built(ROOT, "sdist", work)
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    unpacked = work / sdist.name.removesuffix(".tar.gz")
    with zipfile.ZipFile(built(unpacked, "wheel", work)) as archive:
        return set(archive.namelist())


def test_wheel_built_from_the_sdist_holds_every_python_file_of_the_tree(
    wheel_names: set[str],
) -> None:
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "msgbus").rglob("*.py")}
    in_wheel = {name for name in wheel_names if name.endswith(".py")}

    assert in_wheel == in_tree


def test_wheel_holds_the_data_files_of_the_package_and_the_typing_marker(
    wheel_names: set[str],
) -> None:
    package = ROOT / "msgbus"
    data = {
        path.relative_to(ROOT).as_posix()
        for path in repository_files()
        if path.is_relative_to(package) and path.suffix != ".py"
    }

    assert data - wheel_names == set()
    assert "msgbus/pipeline/log4j2.properties" in wheel_names
    assert "msgbus/py.typed" in wheel_names


def test_wheel_installs_no_top_level_name_but_msgbus(wheel_names: set[str]) -> None:
    top_level = {name.split("/", 1)[0] for name in wheel_names}

    assert {name for name in top_level if not name.endswith(".dist-info")} == {"msgbus"}


@pytest.mark.parametrize("name", ["middleware", "resilience"])
def test_top_level_link_leads_into_the_package(name: str) -> None:
    link = ROOT / name

    if not link.is_symlink():
        pytest.skip("the checkout has no symbolic links")
    assert link.readlink() == Path("msgbus") / name


@pytest.mark.parametrize(
    "statement",
    ["import middleware", "from resilience.x import y", "from middleware import chain"],
)
def test_lint_rejects_imports_through_the_top_level_links(statement: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f'"""A module."""\n\n{statement}\n')

    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=json"]
    ruff = subprocess.run(
        [*command, "--config", str(ROOT / "pyproject.toml"), str(module)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )

    assert ruff.returncode == 1, ruff.stderr
    assert "TID251" in {finding["code"] for finding in json.loads(ruff.stdout)}


def test_no_file_names_a_path_of_one_machine_or_a_package_index() -> None:
    patterns = dict(MACHINE_PATTERNS)
    if len(ROOT.parts) > 2:
        patterns["this checkout"] = re.compile(re.escape(str(ROOT)) + r"\b")
    found: list[str] = []

    for path in repository_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {kind}"
            for number, line in enumerate(lines, start=1)
            for kind, pattern in patterns.items()
            if pattern.search(line)
        ]

    assert found == []
