"""The leaderboard as Markdown: it names every denominator and says why tables are separate."""

from eval_samples import KEY, eval_rows

from osworld_pipeline.evaluation.leaderboard import Leaderboard, build_leaderboard
from osworld_pipeline.web.reports.leaderboard_markdown import leaderboard_markdown

OLD, NEW = "aaaa/grader 7", "aaaa/grader 8"


def board_of(*rows, **parents: str) -> Leaderboard:
    found = [row for some in rows for row in some]
    planned = {row.stage_key: 8 for row in found}
    return build_leaderboard(found, parents, planned=planned, num_resamples=500)


def test_a_row_names_every_denominator() -> None:
    board = board_of(
        eval_rows("ffffffff", checkpoint="base"), eval_rows("ssssssse", checkpoint="sft", stage="sft"), sft="base"
    )
    lines = leaderboard_markdown(board).splitlines()
    assert lines[0].startswith(f"**Evaluation `{KEY}`**: suite s; seeds 0; step budget 5; intervals at 95%")
    first = [cell.strip() for cell in lines[4].split("|")[1:-1]]
    assert first[:4] == ["1", "`sft`", "SFT", "100.0%"]
    assert first[5:10] == ["87.5%", "7/7", "1 env_fault", "0", "+100.0 (+100.0 to +100.0), better"]
    assert len({line.count("|") for line in lines[2:6]}) == 1


def test_a_board_without_rows_says_so() -> None:
    assert leaderboard_markdown(board_of()) == "No checkpoint has been evaluated yet.\n"


def test_the_leaderboard_says_why_tables_are_separate_and_why_there_is_no_rank() -> None:
    apart = leaderboard_markdown(
        board_of(eval_rows("ffff", checkpoint="a", desktops=NEW), eval_rows("sfff", checkpoint="b", desktops=OLD))
    )
    assert apart.count("Not ranked together with the other tables of this evaluation") == 2
    assert f"desktops {NEW}" in apart
    mixed = leaderboard_markdown(board_of(eval_rows("ssss", checkpoint="a", desktops=f"{OLD}, {NEW}")))
    assert "Not ranked: its episodes were graded on several desktop images" in mixed
