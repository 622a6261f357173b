"""The cause of a failure: the text of an error without what differs from one case to the next."""

from __future__ import annotations

import re
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as sql

NO_TEXT: Final = "(no error text)"
MAX_LENGTH: Final = 160
_EXAMINED: Final = 1000

# In this order. Only what Java and Python read alike: no \w, \d, \s or \b, which differ in what
# they take for a letter. `$` is never in a replacement, which Java would expand.
RULES: Final = (
    (r"[a-z]+://[^ '\"<>]+", "<url>"),
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<id>"),
    (r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9:.]+(Z|[+-][0-9]{2}:?[0-9]{2})?)?", "<time>"),
    (r"0x[0-9a-fA-F]+", "<address>"),
    (r"'[^']*'", "'...'"),
    (r"\"[^\"]*\"", '"..."'),
    (r"(/[0-9A-Za-z_.-]+){2,}/?", "<path>"),
    (r"[0-9a-fA-F]{16,}", "<id>"),
    (r"[0-9]+([.,][0-9]+)*", "<n>"),
    (r"[ \t\r]+", " "),
)
"""Pattern and replacement; what is left is the same for every case of one cause."""

_COMPILED: Final = [(re.compile(pattern), replacement) for pattern, replacement in RULES]


def cause_of(error: str | None) -> str:
    """The cause that an error's text speaks of: its first line, ids, numbers and quotes masked."""
    if error is None:
        return NO_TEXT
    text = error.split("\n", 1)[0][:_EXAMINED]
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip(" ")[:MAX_LENGTH] or NO_TEXT


def cause_column(error: Column) -> Column:
    """`cause_of` for a column; runs inside Spark, without Python workers."""
    text = sql.substring(sql.substring_index(error, "\n", 1), 1, _EXAMINED)
    for pattern, replacement in RULES:
        text = sql.regexp_replace(text, pattern, replacement)
    text = sql.substring(sql.trim(text), 1, MAX_LENGTH)
    return sql.coalesce(sql.nullif(text, sql.lit("")), sql.lit(NO_TEXT))
