"""The tables of the index, and the queries that fill them from the store's files, which count updates from 0 (here the
first is 1). `{heads}` and `{details}` are scans of new files, `{hidden}` the parts that were written again, `{keys}`
the pairs of details and head."""

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.task import FAMILY_OF_TASK, SUITE_OF_TASK
from osworld_pipeline.tables.views import NAMED_TASKS

_STAGES = ", ".join(f"'{stage}'" for stage in Stage)

NAMES = (
    "CREATE TABLE union_tasks (task_id VARCHAR, domain VARCHAR, instruction VARCHAR, is_own BOOLEAN DEFAULT false)",
    """
    CREATE TABLE checkpoints (
        checkpoint_id VARCHAR, stage VARCHAR, parent_id VARCHAR, path VARCHAR, num_updates INTEGER,
        run_ids MAP(VARCHAR, VARCHAR)
    )
    """,
)
"""The small tables, read as a whole."""

# Suite and family as in the view `evals`. Numbers and ids are removed from faults, so that similar ones are grouped.
_FACTS = f"""
WITH keys AS (
    SELECT split_part(pair, chr(9), 1) AS path, split_part(pair, chr(9), 2) AS file
    FROM (SELECT unnest({{keys}}) AS pair)
),
read_by AS (
    SELECT keys.file, d.episode_id, count(*) AS num_read, count(*) FILTER (NOT d.action_parsed) AS num_unread
    FROM {{details}} d JOIN keys ON keys.path = d.path GROUP BY ALL
),
h AS (
    SELECT *, replace(path, '{{root}}/episodes/', '') AS file,
           CASE WHEN purpose = 'train' THEN stage_key ELSE checkpoint_id END AS policy_key
    FROM {{heads}}
    WHERE NOT (is_compacted AND part IN (SELECT unnest({{hidden}})))
)
SELECT
    h.file, h.part, h.is_compacted, h.episode_id, h.task_id, h.purpose, h.checkpoint_id, h.stage_key,
    h."update" + (h."update" >= 0)::INTEGER AS "update", h.group_id, h.seed, h.attempt, h.outcome, h.error,
    left(regexp_replace(regexp_replace(h.error, '[0-9a-f]{{{{8,}}}}', '…', 'g'), '[0-9]+([.][0-9]+)?', '#', 'g'), 100)
        AS fault,
    h.is_valid, h.is_success, h.task_reward, h.shaped_reward, h.advantage, h.num_steps, h.max_turns, h.engine,
    h.temperature, h.provider, h.image_digest, h.grader_version, h.source_dataset, h.started_at,
    h.times_s['total'] AS total_s, h.run_ids['mlflow'] AS mlflow_run, h.run_ids['dagster'] AS dagster_run,
    coalesce(nullif(h.suite, ''), nullif(regexp_extract(h.task_id, '{SUITE_OF_TASK}', 1), ''), 'osworld') AS suite,
    nullif(h.suite_name, '') AS suite_name,
    nullif(regexp_extract(h.task_id, '{FAMILY_OF_TASK}', 1), '') AS family,
    CASE WHEN r.num_read IS NULL THEN 'no step' WHEN r.num_unread = 0 THEN 'every action read'
         WHEN r.num_unread = r.num_read THEN 'no action read' ELSE 'some not read' END AS reading,
    coalesce(r.num_unread, 0) AS num_unread, coalesce(t.domain, nullif(h.domain, '')) AS domain, t.instruction,
    coalesce(c.stage, CASE WHEN regexp_extract(h.policy_key, '^([a-z0-9_]+)-', 1) IN ({_STAGES})
        THEN regexp_extract(h.policy_key, '^([a-z0-9_]+)-', 1) END) AS stage
FROM h
LEFT JOIN read_by r ON r.file = h.file AND r.episode_id = h.episode_id
LEFT JOIN ({NAMED_TASKS}) t ON t.task_id = h.task_id AND (t.is_only OR t.domain = h.domain)
LEFT JOIN checkpoints c ON c.checkpoint_id = h.policy_key
"""  # noqa: S608 - our own names

_GROUPED = """
SELECT
    replace(path, '{root}/rollout_groups/', '') AS file, part, is_compacted, group_id, task_id, checkpoint_id,
    stage_key, "update" + ("update" >= 0)::INTEGER AS "update", num_episodes, num_valid, num_successes, episode_ids,
    shaped_rewards, replay_row_id, fate, reason, oldest_policy_version
FROM {heads} WHERE NOT (is_compacted AND part IN (SELECT unnest({hidden})))
"""

_INJECTED = """
SELECT
    k.file, d.part, d.is_compacted, d.group_id, d.row_id, d.source_dataset, d.reward, d.advantage, d.weight, d.kind,
    d.strategy
FROM {details} d
JOIN (
    SELECT split_part(pair, chr(9), 1) AS path, split_part(pair, chr(9), 2) AS file
    FROM (SELECT unnest({keys}) AS pair)
) k ON k.path = d.path
WHERE NOT (d.is_compacted AND d.part IN (SELECT unnest({hidden})))
"""

FROM_FILES = {"facts": _FACTS, "grouped": _GROUPED, "injected": _INJECTED}
"""The query of each table that is read from new files; its columns have the types of the store's."""

NAMES_OF_TASKS = (
    """
    UPDATE facts SET domain = t.domain, instruction = t.instruction
    FROM (SELECT task_id, domain, instruction, count(*) OVER (PARTITION BY task_id) = 1 AS is_only FROM union_tasks) t
    WHERE t.task_id = facts.task_id AND (t.is_only OR t.domain = facts.domain)
      AND (facts.domain IS DISTINCT FROM t.domain OR facts.instruction IS DISTINCT FROM t.instruction)
    """,
)
NAMES_OF_CHECKPOINTS = (
    """
    UPDATE facts SET stage = c.stage
    FROM checkpoints c
    WHERE c.checkpoint_id = CASE WHEN facts.purpose = 'train' THEN facts.stage_key ELSE facts.checkpoint_id END
      AND facts.stage IS DISTINCT FROM c.stage
    """,
)
