"""Arrow in a program that does not use pandas, and in one that does."""

import subprocess
import sys

PROGRAM = """
import sys
import osworld_pipeline.columns
import pyarrow as pa
table = pa.Table.from_pylist([{"a": 1}])
print("pandas" in sys.modules)
import pandas as pd
print(table.to_pandas().a.tolist(), pa.array(pd.Series([2])).to_pylist())
"""


def test_arrow_imports_no_pandas_and_works_with_it_once_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "[1] [2]"]


def test_a_program_that_imported_pandas_first_can_use_it_with_arrow() -> None:
    program = (
        "import sys, pandas, osworld_pipeline.columns, pyarrow as pa; print(pa.array(pandas.Series([2])).to_pylist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[2]\n"
