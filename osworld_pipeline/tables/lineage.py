"""Views that can be queried in both directions: the ancestors of a checkpoint, the training data of each, and the full
origin of an evaluation's episode.

Each has one row per link, not a list per row: an id at either end is found by its own column, and a long list of groups
is not repeated for every episode.
"""

from collections.abc import Mapping

# At most a thousand generations are followed; this also ends a cycle of parents, which would be an error.
ANCESTRY = """
CREATE VIEW ancestry AS
WITH RECURSIVE line AS (
    SELECT checkpoint_id, checkpoint_id AS ancestor_id, parent_id, 0 AS generations FROM checkpoints
    UNION ALL
    SELECT line.checkpoint_id, c.checkpoint_id, c.parent_id, line.generations + 1
    FROM line JOIN checkpoints c ON c.checkpoint_id = line.parent_id
    WHERE line.generations < 1000 AND c.checkpoint_id <> line.checkpoint_id
)
SELECT checkpoint_id, generations, ancestor_id FROM line
"""

# The rows of the current replay buffer, by their ids and by their ids before schema version 6.
NAMED_ROWS = """
SELECT name, r.* FROM (
    SELECT row_id AS name, row_id FROM replay_buffer
    UNION
    SELECT former_row_id, row_id FROM replay_buffer WHERE former_row_id IS NOT NULL
) JOIN replay_buffer r USING (row_id)
"""

# A milestone (<stage key>-u0100) was made by the stage's groups up to its own number of updates. Dropped groups are
# excluded. Training data is recorded with its origin; only rows from before schema version 6 are looked up in the
# replay buffer, which may no longer have them.
MADE_FROM = f"""
CREATE VIEW made_from AS
WITH stages AS (
    SELECT checkpoint_id, regexp_replace(checkpoint_id, '-u[0-9]+$', '') AS stage_key, num_updates FROM checkpoints
),
groups AS (
    SELECT s.checkpoint_id, g.group_id, g.task_id, g."update", g.episode_ids, g.outcomes
    FROM stages s JOIN rollout_groups g ON g.stage_key = s.stage_key AND g."update" <= s.num_updates
    WHERE coalesce(g.fate, 'trained') = 'trained'
),
known AS (
    SELECT * FROM ({NAMED_ROWS})
    QUALIFY row_number() OVER (PARTITION BY name ORDER BY quality_rank DESC NULLS LAST, source_path, source_line) = 1
),
tuned AS (
    SELECT checkpoint_id, row_id, regexp_full_match(row_id, '[0-9a-f]+') AS is_demonstration
    FROM (SELECT checkpoint_id, unnest(row_ids) AS row_id FROM checkpoints WHERE coalesce(len(sources), 0) = 0)
)
SELECT checkpoint_id, 'group' AS kind, group_id AS source_id, 'rolled_out' AS how, group_id, task_id, "update",
       NULL::VARCHAR AS source_dataset, NULL::VARCHAR AS path, NULL::BIGINT AS line, NULL::VARCHAR AS sha256,
       NULL::VARCHAR AS licence
FROM groups
UNION ALL
SELECT checkpoint_id, 'episode', episode_id, 'rolled_out', group_id, task_id, "update", 'online', NULL, NULL, NULL, NULL
FROM (
    SELECT checkpoint_id, group_id, task_id, "update", unnest(episode_ids) AS episode_id, unnest(outcomes) AS outcome
    FROM groups
)
WHERE outcome IN ('success', 'failure', 'truncated', 'tampering')
UNION ALL
SELECT s.checkpoint_id, coalesce(i.kind, CASE WHEN i.source_dataset = 'online' THEN 'episode' ELSE 'demonstration' END),
       i.row_id, 'injected', i.group_id, i.task_id, i."update", i.source_dataset,
       coalesce(i.source_path, r.source_path), coalesce(i.source_line, r.source_line),
       coalesce(i.source_sha256, r.source_sha256), coalesce(i.licence, r.licence)
FROM stages s
JOIN injections i ON i.stage_key = s.stage_key AND i."update" <= s.num_updates
LEFT JOIN known r ON r.name = i.row_id AND i.source_path IS NULL
UNION ALL
SELECT checkpoint_id, t.kind, t.row_id, 'fine_tuned', NULL, t.task_id, NULL, t.source_dataset, t.source_path,
       t.source_line, t.source_sha256, t.licence
FROM (SELECT checkpoint_id, unnest(sources) AS t FROM checkpoints)
UNION ALL
SELECT t.checkpoint_id, CASE WHEN t.is_demonstration THEN 'demonstration' ELSE 'episode' END, t.row_id, 'fine_tuned',
       NULL, coalesce(r.task_id, e.task_id), NULL, CASE WHEN t.is_demonstration THEN r.source_dataset ELSE 'online' END,
       r.source_path, r.source_line, r.source_sha256, r.licence
FROM tuned t
LEFT JOIN known r ON r.name = t.row_id
LEFT JOIN (SELECT episode_id, task_id FROM episodes WHERE purpose = 'train') e ON e.episode_id = t.row_id
"""  # noqa: S608 - our own words

# A group represents its episodes, which made_from names; listing them for every evaluation would multiply the rows by
# ten.
LINEAGE = """
CREATE VIEW lineage AS
WITH scored AS (
    SELECT episode_id, checkpoint_id, stage_key, task_id, seed, outcome,
           CASE WHEN is_valid THEN task_reward END AS reward, run_ids
    FROM episodes WHERE purpose = 'evaluate'
)
SELECT v.episode_id, v.checkpoint_id, v.stage_key, v.task_id, v.seed, v.outcome, v.reward, 'evaluation' AS kind,
       v.stage_key AS source_id, NULL::VARCHAR AS how, NULL::INTEGER AS generations, NULL::VARCHAR AS ancestor_id,
       NULL::VARCHAR AS group_id, NULL::INTEGER AS "index", NULL::VARCHAR AS path, NULL::BIGINT AS line,
       NULL::VARCHAR AS sha256, NULL::VARCHAR AS licence,
       NULL::VARCHAR AS recipe_digest, NULL::VARCHAR AS recipe, NULL::VARCHAR AS code_version,
       NULL::BOOLEAN AS is_code_dirty, v.run_ids['dagster'] AS dagster_run_id, v.run_ids['mlflow'] AS mlflow_run_id
FROM scored v
UNION ALL BY NAME
SELECT v.* EXCLUDE run_ids, 'task' AS kind, v.task_id AS source_id FROM scored v
UNION ALL BY NAME
SELECT v.* EXCLUDE run_ids, 'screenshot' AS kind, s.screenshot_sha256 AS source_id, s.step_index AS "index",
       'blobs/' || left(s.screenshot_sha256, 2) || '/' || s.screenshot_sha256 || '.' || s.screenshot_format AS path
FROM scored v JOIN steps s ON s.episode_id = v.episode_id
WHERE s.screenshot_sha256 <> ''
UNION ALL BY NAME
SELECT v.* EXCLUDE run_ids, 'checkpoint' AS kind, a.ancestor_id AS source_id, a.generations, a.ancestor_id, c.path,
       c.recipe_digest, c.recipe, c.code_version, c.is_code_dirty, c.run_ids['dagster'] AS dagster_run_id,
       c.run_ids['mlflow'] AS mlflow_run_id
FROM scored v
JOIN ancestry a ON a.checkpoint_id = v.checkpoint_id
JOIN checkpoints c ON c.checkpoint_id = a.ancestor_id
UNION ALL BY NAME
SELECT v.* EXCLUDE run_ids, m.kind, m.source_id, m.how, a.generations, a.ancestor_id, m.group_id,
       m."update" AS "index", m.path, m.line, m.sha256, m.licence
FROM scored v
JOIN ancestry a ON a.checkpoint_id = v.checkpoint_id
JOIN made_from m ON m.checkpoint_id = a.ancestor_id
WHERE m.kind <> 'episode' OR m.how <> 'rolled_out'
"""

# Our own rollouts have no licence; demonstrations and weights from elsewhere have. A base that was made here has a
# path relative to the state folder, a published one an absolute path.
LICENCES = """
CREATE VIEW licences AS
SELECT a.checkpoint_id, coalesce(m.licence, 'unknown') AS licence, m.source_dataset, a.ancestor_id, a.generations,
       m.how, count(DISTINCT m.source_id) AS num_rows, count(DISTINCT m.task_id) AS num_tasks, min(m.path) AS path
FROM ancestry a JOIN made_from m ON m.checkpoint_id = a.ancestor_id
WHERE m.kind = 'demonstration'
GROUP BY a.checkpoint_id, coalesce(m.licence, 'unknown'), m.source_dataset, a.ancestor_id, a.generations, m.how
UNION ALL
SELECT a.checkpoint_id, coalesce(c.licence, 'unknown'), NULL, a.ancestor_id, a.generations, 'weights', 1, 0, c.path
FROM ancestry a JOIN checkpoints c ON c.checkpoint_id = a.ancestor_id
WHERE c.stage = 'external' OR (c.stage = 'base' AND starts_with(c.path, '/'))
"""

LINEAGE_VIEWS: Mapping[str, str] = {
    "ancestry": ANCESTRY,
    "made_from": MADE_FROM,
    "licences": LICENCES,
    "lineage": LINEAGE,
}
