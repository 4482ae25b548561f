"""Queries that are used more than once: the two of docs/tour.md, and the success of each checkpoint."""

BEST_EPISODE_SCREENSHOTS = """
WITH best AS (
    SELECT e.episode_id
    FROM episodes e JOIN checkpoints c USING (checkpoint_id)
    WHERE c.stage = 'gspo_phase2' AND e.is_valid AND e.purpose IN ('train', 'evaluate')
    ORDER BY e.task_reward DESC, e.shaped_reward DESC, e.episode_id
    LIMIT 1
)
SELECT s.episode_id, s.step_index, s.screenshot_sha256, s.action, s.command
FROM steps s JOIN best USING (episode_id)
ORDER BY s.step_index
""".strip()
"""Which screenshots did the best episode of phase 2 see?"""

INJECTED_REPLAY_ROWS = """
SELECT i.group_id, i.row_id, i.task_id, i.source_dataset, coalesce(i.source_path, r.source_path) AS source_path,
       coalesce(i.source_line, r.source_line) AS source_line, i.reward, i.advantage, i.weight
FROM injections i LEFT JOIN replay r USING (row_id)
ORDER BY i.stage_key, i."update", i.group_id
""".strip()
"""Which replay rows were injected?"""

SUCCESS_BY_CHECKPOINT = """
SELECT checkpoint_id, any_value(stage) AS stage, count(success) AS episodes, count(*) - count(success) AS faults,
       avg(success::INT) AS success_rate, evaluation_key, desktops
FROM evals GROUP BY checkpoint_id, evaluation_key, desktops ORDER BY evaluation_key, desktops, stage, checkpoint_id
""".strip()
