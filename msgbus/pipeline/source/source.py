"""`msgbus`: the data source that Spark knows by this name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from pyspark.errors import AnalysisException
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from msgbus.errors import PipelineOptionError
from msgbus.pipeline.source.options import read_options, write_options
from msgbus.pipeline.source.reader import JournalReader
from msgbus.pipeline.source.stream import JournalStreamReader
from msgbus.pipeline.source.writer import JournalStreamWriter, JournalWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "msgbus"


class JournalSource(DataSource):
    """Journals as tables: `spark.read.format("msgbus").option("url", url).load()`."""

    @classmethod
    def name(cls) -> str:
        """What to write in `format`."""
        return NAME

    def schema(self) -> StructType:
        """All columns of the table; name fewer with `.schema("offset long, name string")`."""
        return read_options(self.options).table.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of a batch."""
        return JournalReader(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader of a stream."""
        return JournalStreamReader(read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer of a batch."""
        _refuse(overwrite)
        return JournalWriter(write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A writer of a stream."""
        _refuse(overwrite)
        return JournalStreamWriter(write_options(self.options), schema)


def _refuse(overwrite: bool) -> None:
    if overwrite:
        message = "A journal is only ever added to: write with .mode('append')."
        raise PipelineOptionError(message, option="mode")


def register(spark: SparkSession) -> None:
    """Make `format("msgbus")` known to a session; nothing else of it is changed."""
    try:
        spark.dataSource.register(JournalSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        # Spark has looked into the active session instead of this one. It becomes active by
        # being used.
        cast("Any", spark).createDataFrame([], "one int")
        spark.dataSource.register(JournalSource)
