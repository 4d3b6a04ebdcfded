"""What differs between the versions of PySpark that the sink runs on: each difference once, behind one name.

Which way counts is decided by the installed version, when this module is imported.
"""

from __future__ import annotations

import pyarrow as pa
import pyspark
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType

SPARK = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
"""Version of the installed PySpark: (4, 2)."""


def arrow_type(dtype: DataType) -> pa.DataType:
    """The type as Arrow takes it to Spark and from there; instants are in UTC."""
    if SPARK >= (4, 2):  # until then the zone was not asked for: UTC, unless told that there is none
        return to_arrow_type(dtype, timezone="UTC")
    return to_arrow_type(dtype)
