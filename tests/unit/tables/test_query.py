"""Queries: read-only, and every failure is one sentence that names the remedy."""

import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.format import answer, render
from osworld_pipeline.tables.query import QueryResult, explain_slow, open_catalog, run_query
from osworld_pipeline.tables.slow_query import slow_reasons


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    return state


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """Three episodes of two steps each."""
    state = StateDir(tmp_path_factory.mktemp("filled"))
    TrajectoryStore(state).write_episodes("three", [make_episode(f"e{number}") for number in range(3)])
    rebuild_catalog(state)
    return state


def test_a_query_without_a_catalog_is_an_error_that_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"there is no catalog at .* yet: run .*osworld-pipeline demo --state"):
        run_query(StateDir(tmp_path), "SELECT 1")


@pytest.mark.parametrize(
    ("sql", "proposed", "marked"),
    [
        ("SELECT task_rewrd FROM episodes", 'Candidate bindings: "task_reward"', "task_rewrd"),
        ("SELECT * FROM episods", 'Did you mean "episodes', "episods"),
        ("SELECT lenght('a')", 'Did you mean "length"?', "lenght('a')"),
    ],
)
def test_an_error_in_sql_is_reported_with_its_place_and_what_duckdb_proposes(
    state: StateDir, sql: str, proposed: str, marked: str
) -> None:
    with pytest.raises(TableError, match=r"^DuckDB refused the query: (Binder|Catalog) Error:") as caught:
        run_query(state, sql)
    *_, line, carets = str(caught.value).splitlines()
    assert proposed in str(caught.value)
    start = carets.index("^")
    assert line[start : start + carets.count("^")] == marked


def test_the_command_line_keeps_the_place_of_an_error_in_a_narrow_terminal(state: StateDir) -> None:
    sql = f"SELECT {', '.join(f'episode_id AS a{number}' for number in range(4))}, task_rewrd FROM episodes"
    command = [sys.executable, "-m", "osworld_pipeline.cli", "query", sql, "--state", str(state.root)]
    reported = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "40"}, check=False)
    line, carets = reported.stderr.rstrip().splitlines()[-2:]
    assert line[carets.index("^") :].startswith("task_rewrd")
    assert 'Candidate bindings: "task_reward"' in reported.stderr


def test_a_view_that_an_older_catalog_lacks_names_the_command_that_makes_it(state: StateDir) -> None:
    with duckdb.connect(str(state.catalog)) as connection:
        connection.execute("DROP VIEW updates")
    with pytest.raises(TableError, match=r"has no `updates` yet, .* run .*osworld-pipeline rebuild-catalog --state"):
        run_query(state, "SELECT loss FROM updates")
    rebuild_catalog(state)
    assert run_query(state, "SELECT loss FROM updates").rows == []


SLOW = {
    "it reads all steps (about 6): add a condition on steps.episode_id": "SELECT avg(model_s) FROM steps",
    "it reads the token lists of all episodes (token_ids): choose": "SELECT sum(list_sum(token_ids)) FROM sequences",
    "`made_from` has a row for each link of every checkpoint: add a WHERE on checkpoint_id": "FROM made_from",
    "its plan shows no reason: EXPLAIN ANALYZE": "SELECT outcome, count(*) FROM episodes GROUP BY 1",
}


@pytest.mark.parametrize("reason", SLOW)
def test_a_slow_query_is_explained_with_the_remedy(filled: StateDir, reason: str) -> None:
    assert [one[: len(reason)] for one in explain_slow(filled, SLOW[reason])] == [reason]


def test_a_query_that_follows_the_remedy_has_no_reason_to_be_slow(filled: StateDir) -> None:
    for sql in (
        "SELECT avg(model_s) FROM steps WHERE episode_id = 'e0'",
        "SELECT s.* FROM episodes e JOIN steps s USING (episode_id) WHERE e.episode_id IN ('e0', 'e1')",
        "SELECT token_ids FROM sequences WHERE episode_id = 'e0'",
        "SELECT * FROM episodes WHERE purpose = 'evaluate'",
        "FROM made_from WHERE checkpoint_id = 'sft-1'",
        "SELECT prompt_tokens, times_s FROM episodes",
    ):
        assert explain_slow(filled, sql)[0].startswith("its plan shows no reason"), sql


def test_a_slow_query_that_pairs_all_rows_is_explained_with_the_advice_to_join_by_a_column(state: StateDir) -> None:
    sql = "SELECT count(*) FROM range(100000) a, range(100000) b WHERE (a.range + b.range) % 7 = 3"
    (reason,) = explain_slow(state, sql)
    assert reason.startswith(
        "it compares every row of one side with every row of the other (about 10,000,000,000 pairs)"
    )


def test_a_slow_query_of_many_small_parts_is_explained_with_the_compact_command(state: StateDir) -> None:
    with open_catalog(state) as connection:
        connection.execute("SET VARIABLE osworld_steps_small = [concat('x', n) for n in range(700)]")
        names = [row[0] for row in connection.execute("SELECT unnest(getvariable('osworld_steps_small'))").fetchall()]
        assert len(names) == 700
        reasons = slow_reasons(connection, "SELECT 1", compact="osworld-pipeline compact")
    (reason,) = reasons
    assert reason.startswith("the store has 700 small parts, and a query opens each: `osworld-pipeline compact`")


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE x (a INT)",
        "DELETE FROM union_tasks",
        "DROP VIEW episodes",
        "ATTACH 'x.db'",
        "INSTALL httpfs",
        "SET threads = 1",
        "COPY (SELECT 1) TO '{folder}/x.parquet'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/x.parquet'",
        "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{folder}/x.parquet'",
    ],
)
def test_a_query_cannot_write(state: StateDir, sql: str) -> None:
    with pytest.raises(TableError, match="read-only"):
        run_query(state, sql.format(folder=state.trajectories))
    assert list(state.root.rglob("x.parquet")) == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_text('{folder}/../../../../../../../../etc/passwd')",
    ],
)
def test_a_query_reads_no_file_but_the_catalog_and_the_parts(state: StateDir, sql: str) -> None:
    with pytest.raises(TableError):
        run_query(state, sql.format(folder=state.trajectories))


def test_a_query_sees_no_variable_of_the_program(state: StateDir) -> None:
    with pytest.raises(TableError, match="does not exist"):
        run_query(state, "SELECT * FROM sql")


def test_two_statements_are_refused(state: StateDir) -> None:
    with pytest.raises(TableError, match="one statement, not 2"):
        run_query(state, "SELECT 1; SELECT 2")


def test_a_query_can_return_its_plan(state: StateDir) -> None:
    assert run_query(state, "EXPLAIN ANALYZE SELECT count(*) FROM steps").rows


FOREVER = "SELECT count(*) FROM range(100000000) a, range(100000000) b"


def test_a_query_that_takes_too_long_is_stopped(state: StateDir) -> None:
    with pytest.raises(TableError, match=r"stopped after 0\.2 s: .*; or raise the limit with --timeout-s"):
        run_query(state, FOREVER, timeout_s=0.2)


def has_open(pid: int, file: Path) -> bool:
    # A file that the process closes during the loop is no longer a link.
    with contextlib.suppress(FileNotFoundError):
        return any(link.readlink() == file for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_query_is_stopped_by_control_c(state: StateDir) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", "query", FOREVER, "--state", str(state.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 60
        while not has_open(child.pid, state.catalog):
            assert time.monotonic() < deadline, "the query does not begin"
            time.sleep(0.05)
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        try:
            child.communicate(timeout=90)
        finally:
            child.kill()
    assert child.returncode not in (0, None)


def test_parquet_keeps_the_types(state: StateDir, tmp_path: Path) -> None:
    data = answer(state, "SELECT 1::INTEGER AS n, [1.5] AS l, MAP {'a': 1.0::DOUBLE} AS m", "parquet")
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.field("n").type == pa.int32()
    assert table.num_rows == 1


def test_the_command_line_writes_to_a_file(state: StateDir, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", "query", "SELECT 1 AS one", "--state", str(state.root)]
    path = tmp_path / "out.parquet"
    subprocess.run([*command, "--format", "parquet", "--output", str(path)], check=True, timeout=60)
    assert pq.read_table(path).to_pylist() == [{"one": 1}]
    done = subprocess.run([*command, "--format", "parquet"], capture_output=True, check=True, timeout=60)
    assert done.stdout.startswith(b"PAR1")


def test_a_locked_catalog_names_the_process_that_holds_it(state: StateDir) -> None:
    script = "import duckdb, sys, time; c = duckdb.connect(sys.argv[1]); print('open', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(state.catalog)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(TableError, match=rf"open for writing in process {holder.pid} \(.*close it there"):
                run_query(state, "SELECT 1")
        finally:
            holder.kill()


def test_a_file_that_is_not_a_database_is_named(state: StateDir) -> None:
    state.catalog.write_bytes(b"not a database at all, whatever its name says" * 400)
    with pytest.raises(TableError, match=r"cannot open .*osworld.duckdb"):
        run_query(state, "SELECT 1")


RESULT = QueryResult(["name", "score", "tags"], [("a,b", 0.1 + 0.2, ["x", "y"]), (None, float("nan"), None)])


def test_csv_is_exact_and_quoted() -> None:
    assert render(RESULT, "csv").splitlines() == [
        "name,score,tags",
        '"a,b",0.30000000000000004,"[""x"", ""y""]"',
        ",nan,",
    ]


def test_json_has_an_object_for_each_row() -> None:
    assert json.loads(render(RESULT, "json")) == [
        {"name": "a,b", "score": 0.30000000000000004, "tags": ["x", "y"]},
        {"name": None, "score": None, "tags": None},
    ]


def test_json_writes_values_of_other_types_as_text() -> None:
    assert json.loads(render(QueryResult(["d"], [(date(2026, 1, 2),)]), "json")) == [{"d": "2026-01-02"}]


def test_a_table_shows_null_and_the_number_of_rows() -> None:
    text = render(RESULT, "table")
    assert "NULL" in text
    assert "0.3" in text
    assert text.endswith("2 rows")


def test_a_table_disarms_control_characters_and_markup() -> None:
    text = render(QueryResult(["said"], [("\x1b[31m[bold]hi[/bold]",)]), "table")
    assert "\x1b" not in text
    assert "[bold]hi[/bold]" in text


def test_rows_too_wide_for_a_table_are_listed_with_one_column_per_line() -> None:
    columns = [f"column_{number}" for number in range(12)]
    wide = [tuple(f"{row}-{number}-{'x' * 40}" for number in range(12)) for row in range(2)]
    lines = render(QueryResult(columns, wide), "table").splitlines()
    assert lines[0] == "row 1"
    assert lines[1].split() == ["column_0", f"0-0-{'x' * 40}"]
    assert [line.split()[1] for line in lines if line.startswith("column_")] == [*wide[0], *wide[1]]
    assert lines[-1] == "2 rows"


def test_one_long_text_folds_in_its_table() -> None:
    lines = render(QueryResult(["id", "said"], [("a", "word " * 30), ("b", "short")]), "table").splitlines()
    assert lines[1].split() == ["id", "said"]
    assert lines[-1] == "2 rows"


def test_more_columns_than_the_terminal_has_room_for_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = [f"c{number}" for number in range(40)]
    lines = render(QueryResult(columns, [tuple(range(40))]), "table").splitlines()
    assert lines[0] == "row 1"
    assert [line.split() for line in lines[1:41]] == [[f"c{number}", str(number)] for number in range(40)]


def test_a_table_is_as_wide_as_the_terminal(state: StateDir) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", "query", "SELECT repeat('x', 200) AS said"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm"}
    try:
        subprocess.run([*command, "--state", str(state.root)], stdout=theirs, env=environment, check=True, timeout=60)
        text = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    lines = [line.rstrip("\r") for line in text.split("\n")]
    assert max(map(len, lines)) in range(76, 81)
    assert text.count("x") == 200


def test_a_listed_result_shows_forty_rows_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [tuple(f"{row}-{column}-{'x' * 20}" for column in range(12)) for row in range(1_234)]
    result = QueryResult([f"column_{number}" for number in range(12)], rows)
    lines = render(result, "table").splitlines()
    assert [line for line in lines if line.startswith("row ")][-1] == "row 40"
    assert lines[-1] == "… 1,194 more rows: --format csv shows all"
    assert len(render(result, "csv").splitlines()) == 1_235
    assert len(json.loads(render(result, "json"))) == 1_234


@pytest.mark.parametrize(
    ("num_rows", "last"),
    [(1, "1 row"), (1_000, "1,000 rows"), (1_001, "… 1 more row: --format csv shows all")],
)
def test_a_table_shows_a_thousand_rows(num_rows: int, last: str) -> None:
    lines = render(QueryResult(["n"], [(number,) for number in range(num_rows)]), "table").splitlines()
    assert (lines[3].strip(), lines[-3].strip()) == ("0", str(min(num_rows, 1_000) - 1))
    assert lines[-1] == last


def test_a_long_value_is_shortened_only_in_tables() -> None:
    ids = list(range(1_000))
    result = QueryResult(["ids", "said"], [(ids, "z" * 500)])
    shown = " ".join(render(result, "table").split())
    assert "… (4,890 characters)" in shown
    assert shown.count("z") == 500
    assert json.loads(render(result, "json")) == [{"ids": ids, "said": "z" * 500}]
    assert str(ids) in render(result, "csv")


def test_without_rows_the_columns_are_named() -> None:
    assert render(QueryResult(["a", "b"], []), "table").split() == ["a", "b", "─" * 7, "0", "rows"]
    columns = [f"column_{number}" for number in range(40)]
    assert render(QueryResult(columns, []), "table").split() == [*columns, "0", "rows"]


VALUES = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=60), st.lists(st.integers(), max_size=40))


@given(
    st.integers(1, 14).flatmap(lambda num: st.lists(st.tuples(*[VALUES] * num), min_size=1, max_size=5)),
    st.integers(40, 200),
)
@settings(max_examples=60, deadline=None)
def test_no_line_is_wider_than_the_terminal(rows: list[tuple[Any, ...]], width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        text = render(QueryResult([f"column_{number}" for number in range(len(rows[0]))], rows), "table")
    assert max(cell_len(line) for line in text.split("\n")) <= width


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(TableError, match="no format named 'xml'; there are: table, json, csv, parquet"):
        render(RESULT, "xml")
    with pytest.raises(TableError, match="the format 'parquet' is not text: choose one of table, json, csv"):
        render(RESULT, "parquet")


def test_the_command_line_answers_a_query(state: StateDir) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", "query", "SELECT 1 AS one", "--format", "csv"]
    done = subprocess.run([*command, "--state", str(state.root)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "one\n1\n"
