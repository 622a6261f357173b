"""One Spark for the tests of the pipeline: starting it takes longer than most of them.

It has as few cores as will show that work is shared; tests/groups.py says which tests share it.
A JVM of its own is only for tests about the start itself, about clusters, and about its death.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from msgbus.pipeline.session import session
from tests.evidence import Evidence

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.stress("spark"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    conf = {
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.driver.memory": "1g",
        # For a handful of rows, compiling a query takes longer than running it.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        # Nor is it worth while to compile the JVM's own code twice.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    with warnings.catch_warnings():
        # Spark leaves sockets to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        made = session(master="local[2]", conf=conf)
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def _counted(evidence: Evidence) -> None:
    evidence("every Spark scenario", tests=1)


@pytest.fixture(autouse=True)
def _tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "spark" in request.fixturenames:
        made: SparkSession = request.getfixturevalue("spark")
        for query in made.streams.active:
            query.stop()
        made.catalog.clearCache()
