"""`msgbus`: the data source that Spark knows by this name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from msgbus.pipeline.source.options import read_options
from msgbus.pipeline.source.reader import JournalReader
from msgbus.pipeline.source.stream import JournalStreamReader

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


def register(spark: SparkSession) -> None:
    """Make `format("msgbus")` known to a session; nothing else of it is changed."""
    spark.dataSource.register(JournalSource)
