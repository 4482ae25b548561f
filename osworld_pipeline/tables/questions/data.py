"""Questions about the data: records read and rejected, coverage of replay, storage."""

from osworld_pipeline.tables.questions.all_questions import Question

_REJECTS_BY_SOURCE = """
WITH refused AS (
    SELECT source_dataset, kind, count(*) AS rejects, count(DISTINCT task_id) AS tasks,
           arg_min(source_path || ':' || coalesce(source_line, 0), coalesce(source_line, 0)) AS first_place,
           arg_min(reason, coalesce(source_line, 0)) AS its_reason
    FROM rejects GROUP BY source_dataset, kind
),
counted AS (
    SELECT source_dataset, sum(num_records) AS records FROM raw_counts GROUP BY source_dataset
)
SELECT refused.source_dataset, refused.kind, refused.rejects, refused.tasks, counted.records,
       refused.first_place, refused.its_reason
FROM refused LEFT JOIN counted USING (source_dataset)
ORDER BY refused.rejects DESC, refused.source_dataset, refused.kind
"""

_REPLAY_BY_SOURCE = """
SELECT source_dataset, kind, coalesce(licence, 'unknown') AS licence, count(*) AS "rows",
       count(DISTINCT task_id) AS tasks, count(*) FILTER (is_reward_assumed) AS assumed_rewards,
       count(*) FILTER (num_verifications > 0) AS executed_again, count(*) FILTER (verified_reward >= 0.5) AS verified,
       round(avg(num_steps), 2) AS mean_steps
FROM replay
GROUP BY source_dataset, kind, coalesce(licence, 'unknown')
ORDER BY "rows" DESC, source_dataset, licence
"""

_VERIFIED_COVERAGE = """
WITH proven AS (
    SELECT task_id, count(*) AS demonstrations, sum(num_verifications) AS trials,
           max(verified_reward) AS best_reward
    FROM replay WHERE kind = 'demonstration' GROUP BY task_id
)
SELECT coalesce(nullif(t.domain, ''), 'unknown') AS domain, count(*) AS train_tasks,
       count(*) FILTER (p.demonstrations > 0) AS with_demonstration, count(*) FILTER (p.trials > 0) AS executed_again,
       count(*) FILTER (p.best_reward >= 0.5) AS verified,
       round(count(*) FILTER (p.best_reward >= 0.5) / count(*), 4) AS verified_share
FROM tasks t LEFT JOIN proven p USING (task_id)
WHERE t.is_train
GROUP BY coalesce(nullif(t.domain, ''), 'unknown')
ORDER BY domain
"""

_SHARED_SCREENSHOTS = """
SELECT screenshot_sha256, count(DISTINCT episode_id) AS episodes, count(DISTINCT task_id) AS tasks, count(*) AS steps,
       any_value(screenshot_num_bytes) AS num_bytes, any_value(screenshot_num_bytes) * (count(*) - 1) AS bytes_saved
FROM steps
WHERE screenshot_sha256 <> ''
GROUP BY screenshot_sha256
HAVING count(DISTINCT episode_id) > 1
ORDER BY episodes DESC, steps DESC, screenshot_sha256
LIMIT 20
"""

_TASKS_NEVER_TRIED = """
SELECT t.task_id, t.domain, t.instruction, count(r.row_id) AS demonstrations
FROM tasks t
LEFT JOIN replay r ON r.task_id = t.task_id AND r.kind = 'demonstration'
WHERE t.is_train AND t.task_id NOT IN (SELECT task_id FROM episodes WHERE purpose = 'train' AND is_valid)
GROUP BY t.task_id, t.domain, t.instruction
ORDER BY t.task_id
"""

QUESTIONS = (
    Question(
        name="rejects-by-source",
        question="Which records of each source were rejected, why, and where is the first case?",
        sql=_REJECTS_BY_SOURCE,
        reading="`records` counts the readable records of that source. `first_place` is file:line; line 0 means the "
        "whole file.",
    ),
    Question(
        name="replay-by-source",
        question="What is in the replay buffer, by source and licence?",
        sql=_REPLAY_BY_SOURCE,
        reading="`assumed_rewards` are successes that were not graded; `verified` ones scored at least 0.5 when "
        "executed again. Online successes were graded when they were recorded.",
    ),
    Question(
        name="verified-coverage",
        question="How many training tasks have a demonstration that succeeded when it was executed again?",
        sql=_VERIFIED_COVERAGE,
        reading="By domain. A playback that ended in a fault counts as executed and has no reward.",
    ),
    Question(
        name="shared-screenshots",
        question="Which screenshots did several episodes see, and how much space does storing them once save?",
        sql=_SHARED_SCREENSHOTS,
        reading="Screenshots are blobs by content. `bytes_saved` is NULL if no row has the size, as in older files.",
    ),
    Question(
        name="tasks-never-tried",
        question="Which training tasks have no valid training episode?",
        sql=_TASKS_NEVER_TRIED,
        reading="Faults are not valid episodes.",
    ),
)
