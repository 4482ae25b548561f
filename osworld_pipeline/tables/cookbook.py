"""The cookbook: questions people really ask of the tables, each a query that runs as it stands; docs/cookbook.md is
made of it."""

from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables import questions_data, questions_scores, questions_training, questions_updates
from osworld_pipeline.tables.questions import Question

SECTIONS: dict[str, tuple[Question, ...]] = {
    "Scores and episodes": questions_scores.QUESTIONS,
    "Training and replay": questions_training.QUESTIONS,
    "Updates, stages and cost": questions_updates.QUESTIONS,
    "Data": questions_data.QUESTIONS,
}
COOKBOOK: tuple[Question, ...] = tuple(question for section in SECTIONS.values() for question in section)

_HEAD = """# Cookbook

Questions people ask of a state folder, and the SQL that answers them. Run one by its name:

    osworld-pipeline cookbook                        # the list
    osworld-pipeline cookbook success-by-domain      # its answer; --format json or csv, --state DIR
    osworld-pipeline cookbook success-by-domain --sql > mine.sql

or change it to your question and run `osworld-pipeline query "$(cat mine.sql)"`. All of them are read-only and work
while a training run writes. This page is made by `osworld-pipeline cookbook --markdown`.
"""


def find_question(name: str) -> Question:
    """The question of that name.

    Raises:
        TableError: there is none; names those that are there.
    """
    for question in COOKBOOK:
        if question.name == name:
            return question
    names = [question.name for question in COOKBOOK]
    raise TableError(f"the cookbook has no question '{name}'; it has: {', '.join(names)}{did_you_mean(name, names)}")


def render_cookbook() -> str:
    """The whole cookbook as Markdown."""
    parts = [_HEAD]
    for title, questions in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [
            f"### {question.question}\n\n`{question.name}`. {question.reading}\n\n```sql\n{question.sql.strip()}\n```\n"
            for question in questions
        ]
    return "\n".join(parts)
