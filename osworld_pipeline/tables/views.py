"""The views over other tables: tasks, replay, evaluations, lineage."""

from collections.abc import Mapping

from osworld_pipeline.domain.task import FAMILY_OF_TASK, SUITE_OF_TASK
from osworld_pipeline.tables.lineage import LINEAGE_VIEWS, NAMED_ROWS
from osworld_pipeline.tables.stages import STAGES

TASKS = """
CREATE VIEW tasks AS
SELECT *, EXISTS (FROM train_tasks t WHERE t.task_id = u.task_id AND t.domain = u.domain) AS is_train FROM union_tasks u
"""
REPLAY = f"""
CREATE VIEW replay AS
WITH proven AS (
    SELECT r.row_id, max(v.reward) AS verified_reward, max(v.started_at) FILTER (v.reward IS NOT NULL) AS verified_at,
           count(*) AS num_verifications
    FROM ({NAMED_ROWS}) r JOIN replay_verifications v ON v.row_id = r.name GROUP BY r.row_id
)
SELECT
    r.row_id, 'demonstration' AS kind, r.task_id, r.original_task_id, r.source_dataset, r.quality_rank, r.reward,
    r.is_reward_assumed, r.num_steps, r.messages, r.images, r.dialect, r.action_types, r.licence, r.source_path,
    r.source_line, r.source_sha256, NULL::VARCHAR AS episode_id, NULL::VARCHAR AS checkpoint_id,
    NULL::DOUBLE AS recorded_at,
    v.verified_reward, v.verified_at, coalesce(v.num_verifications, 0) AS num_verifications
FROM replay_buffer r LEFT JOIN proven v USING (row_id)
UNION ALL BY NAME
SELECT
    e.episode_id AS row_id, 'episode' AS kind, e.task_id, e.task_id AS original_task_id, 'online' AS source_dataset,
    e.task_reward AS reward, false AS is_reward_assumed, e.num_steps, e.episode_id, e.checkpoint_id,
    e.started_at AS recorded_at, e.task_reward AS verified_reward, e.started_at AS verified_at,
    0 AS num_verifications
FROM episodes e WHERE e.purpose = 'train' AND e.is_valid AND e.is_success
"""  # noqa: S608 - our own words
# A fault has no success and no reward (NULL), so that an average over `success` has the right denominator. A task
# outside the built-in suites has its domain as its family. Tokens that an engine did not count are 0 in its steps, and
# none at all in an import: both are NULL here. A grader's score is valid for its desktop image and its own version:
# `desktops` names those of all graded episodes of an evaluation, so that rows with the same key and the same `desktops`
# can be compared, faults included.
_DESKTOPS = """replace(concat_ws('/', coalesce(nullif(image_digest[:12], ''), 'unknown image'),
        'grader ' || coalesce(nullif(grader_version, ''), 'unknown')), ',', ';')"""
DESKTOPS_OF_EVALUATION = f"""coalesce(array_to_string(list_sort(list(DISTINCT {_DESKTOPS}) FILTER (WHERE is_valid)
    OVER (PARTITION BY checkpoint_id, stage_key)), ', '), '')"""
"""Aggregate over the rows of evaluations, one for each task and seed."""
NAMED_TASKS = """
SELECT task_id, domain, instruction, count(*) OVER (PARTITION BY task_id) = 1 AS is_only FROM union_tasks
"""
"""An episode from before schema version 6 has no domain: it belongs to the only task of its id, or to an unknown
one."""
TASK_KEY = """CASE WHEN min(domain) OVER same_id <> max(domain) OVER same_id
    THEN concat(domain, '/', task_id) ELSE task_id END AS task_key"""
SAME_ID = "WINDOW same_id AS (PARTITION BY checkpoint_id, stage_key, task_id)"
LAST_ATTEMPT = """QUALIFY row_number() OVER (
    PARTITION BY checkpoint_id, stage_key, task_key, seed ORDER BY started_at DESC, attempt DESC, episode_id DESC
) = 1"""
"""SQL for the episodes of evaluations: the key of their tasks, and the last attempt at each task and seed."""
EVALS = f"""
CREATE VIEW evals AS
WITH named AS (SELECT *, {TASK_KEY} FROM episodes WHERE purpose = 'evaluate' {SAME_ID}),
latest AS (SELECT * FROM named {LAST_ATTEMPT}),
played AS (SELECT *, {DESKTOPS_OF_EVALUATION} AS desktops FROM latest)
SELECT
    e.checkpoint_id, c.stage, e.task_id,
    e.task_key, e.seed,
    coalesce(nullif(regexp_extract(e.task_id, '{FAMILY_OF_TASK}', 1), ''), nullif(t.domain, ''), nullif(e.domain, ''),
        'unknown') AS family,
    coalesce(nullif(e.suite, ''), nullif(regexp_extract(e.task_id, '{SUITE_OF_TASK}', 1), ''), 'osworld') AS suite,
    nullif(e.suite_name, '') AS suite_name,
    coalesce(t.domain, nullif(e.domain, '')) AS domain, t.instruction, e.outcome,
    CASE WHEN e.is_valid THEN e.task_reward END AS reward,
    CASE WHEN e.is_valid THEN e.is_success END AS success,
    e.is_valid, CASE WHEN e.is_valid THEN e.shaped_reward END AS shaped_reward,
    e.num_steps AS turns, e.max_turns, e.attempt, e.episode_id, e.stage_key,
    CASE WHEN starts_with(e.stage_key, concat('eval-', e.checkpoint_id, '-'))
        THEN substr(e.stage_key, length(e.checkpoint_id) + 7) ELSE '' END AS evaluation_key,
    e.engine, e.temperature,
    e.provider, e.image_digest, e.grader_version, e.error, e.started_at, e.started_utc, e.ended_utc, e.source_dataset,
    CASE WHEN coalesce(e.source_dataset, '') <> '' THEN NULL WHEN e.num_steps = 0 THEN 0 ELSE s.prompt_tokens END
        AS prompt_tokens,
    CASE WHEN coalesce(e.source_dataset, '') <> '' THEN NULL WHEN e.num_steps = 0 THEN 0 ELSE s.response_tokens END
        AS response_tokens,
    e.times_s['total'] AS wall_s, e.times_s['reset'] AS reset_s, e.times_s['model'] AS model_s,
    e.times_s['step'] AS step_s, e.times_s['evaluate'] AS evaluate_s,
    e.parity_num_tokens, e.parity_mean_diff, e.parity_max_diff,
    e.desktops
FROM played e
LEFT JOIN ({NAMED_TASKS}) t ON t.task_id = e.task_id AND (t.is_only OR t.domain = e.domain)
LEFT JOIN checkpoints c ON c.checkpoint_id = e.checkpoint_id
LEFT JOIN (
    SELECT episode_id,
           CASE WHEN bool_and(prompt_num_tokens > 0) THEN sum(prompt_num_tokens)::BIGINT END AS prompt_tokens,
           CASE WHEN bool_and(prompt_num_tokens > 0) THEN sum(response_num_tokens)::BIGINT END AS response_tokens
    FROM steps WHERE purpose = 'evaluate' GROUP BY episode_id
) s ON s.episode_id = e.episode_id
"""  # noqa: S608 - our own words
# The joins come last: DuckDB skips a join that a query does not use, and a success rate needs no steps.
DERIVED: Mapping[str, str] = {"tasks": TASKS, "replay": REPLAY, "evals": EVALS, **LINEAGE_VIEWS, "stages": STAGES}
