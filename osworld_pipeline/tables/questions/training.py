"""Questions about training: groups, rewards, replay and its effect."""

from osworld_pipeline.tables.questions.all_questions import Question
from osworld_pipeline.tables.questions.examples import INJECTED_REPLAY_ROWS

_SOLVED_ONLY_WITH_REPLAY = """
WITH ended AS (
    SELECT group_id, max(started_at) AS ended_at FROM episodes WHERE group_id IS NOT NULL GROUP BY group_id
),
injected AS (
    SELECT i.task_id, min(ended.ended_at) AS first_at, count(*) AS injections
    FROM injections i JOIN ended USING (group_id)
    GROUP BY i.task_id
)
SELECT e.task_id, injected.injections, count(*) FILTER (e.started_at <= first_at) AS attempts_before,
       count(*) FILTER (e.started_at > first_at) AS attempts_after,
       count(*) FILTER (e.is_success AND e.started_at > first_at) AS successes_after,
       min(e.episode_id) FILTER (e.is_success AND e.started_at > first_at) AS a_success
FROM injected JOIN episodes e USING (task_id)
WHERE e.purpose = 'train' AND e.is_valid
GROUP BY e.task_id, injected.injections
HAVING count(*) FILTER (e.is_success AND e.started_at <= first_at) = 0 AND successes_after > 0
ORDER BY e.task_id
"""

_AFTER_THE_INJECTION = """
SELECT i.stage_key, i."update", i.task_id, i.row_id, i.kind, i.source_dataset, i.strategy, i.reward, i.verified_reward,
       count(e.episode_id) FILTER (e."update" <= i."update") AS attempts_until,
       round(avg(e.is_success::INT) FILTER (e."update" <= i."update"), 4) AS success_rate_until,
       count(e.episode_id) FILTER (e."update" > i."update") AS attempts_after,
       round(avg(e.is_success::INT) FILTER (e."update" > i."update"), 4) AS success_rate_after
FROM injections i
LEFT JOIN episodes e ON e.task_id = i.task_id AND e.stage_key = i.stage_key AND e.purpose = 'train' AND e.is_valid
GROUP BY i.injection_id, i.stage_key, i."update", i.task_id, i.row_id, i.kind, i.source_dataset, i.strategy, i.reward,
         i.verified_reward
ORDER BY i.stage_key, i."update", i.task_id, i.row_id
"""

_REWARD_COMPONENTS = """
WITH parts AS (
    SELECT stage_key, "update", unnest(map_entries(reward_parts)) AS part
    FROM episodes WHERE purpose = 'train' AND is_valid
)
SELECT stage_key, "update", part.key AS component, count(*) AS episodes, round(avg(part.value), 4) AS mean
FROM parts
GROUP BY stage_key, "update", part.key
ORDER BY stage_key, "update", component
"""

_GROUPS_WITHOUT_VARIANCE = """
WITH counted AS (
    SELECT *, num_valid < 2 OR list_min(task_rewards) = list_max(task_rewards) AS is_flat FROM rollout_groups
    WHERE coalesce(fate, '') NOT IN ('held', 'superseded')
)
SELECT stage_key, "update", count(*) AS "groups", count(*) FILTER (is_flat) AS without_variance,
       count(*) FILTER (is_flat AND replay_row_id IS NOT NULL) AS joined_by_replay,
       count(*) FILTER (num_valid = 0) AS all_faults,
       count(*) FILTER (num_valid > 0 AND num_successes = 0) AS all_failed,
       count(*) FILTER (num_valid > 0 AND num_successes = num_valid) AS all_succeeded
FROM counted
GROUP BY stage_key, "update"
ORDER BY stage_key, "update"
"""

_TRAINING_CURVE = """
SELECT e.checkpoint_id, coalesce(c.stage, nullif(e.stage, '')) AS stage, e."update",
       any_value(e.weights_id) AS weights_id, count(*) AS episodes, count(*) FILTER (e.is_success) AS successes,
       round(avg(e.is_success::INT), 4) AS success_rate
FROM episodes e LEFT JOIN checkpoints c USING (checkpoint_id)
WHERE e.purpose = 'train' AND e.is_valid AND e."update" >= 1
GROUP BY ALL
ORDER BY e.checkpoint_id, e."update"
"""

_STALENESS = """
SELECT e.stage_key, e."update", count(*) AS steps, min(s.policy_version) AS oldest_policy,
       max(s.policy_version) AS newest_policy, max(e."update" - 1 - s.policy_version) AS most_updates_behind,
       count(*) FILTER (s.policy_version < e."update" - 1) AS stale_steps,
       count(DISTINCT e.episode_id) FILTER (s.policy_version < e."update" - 1) AS stale_episodes
FROM steps s JOIN episodes e USING (episode_id)
WHERE e.purpose = 'train' AND e."update" >= 1
GROUP BY e.stage_key, e."update"
ORDER BY e.stage_key, e."update"
"""

_ANCESTORS = """
WITH RECURSIVE line AS (
    SELECT checkpoint_id AS descendant, checkpoint_id, parent_id, 0 AS generations FROM checkpoints
    UNION ALL
    SELECT line.descendant, c.checkpoint_id, c.parent_id, line.generations + 1
    FROM line JOIN checkpoints c ON c.checkpoint_id = line.parent_id
    WHERE line.generations < 100
)
SELECT line.descendant, line.generations, c.checkpoint_id, c.stage, c.num_updates, left(c.recipe_digest, 12) AS recipe,
       left(c.data_digest, 12) AS data, left(c.weights_digest, 12) AS weights
FROM line JOIN checkpoints c USING (checkpoint_id)
ORDER BY line.descendant, line.generations
"""

QUESTIONS = (
    Question(
        name="solved-only-with-replay",
        question="Which tasks were solved only after replay had joined their group?",
        sql=_SOLVED_ONLY_WITH_REPLAY,
        reading="No training episode of the task succeeded until the first group with an injection had ended, and one "
        "did afterwards. This is not proof of cause; an ablation can give it.",
    ),
    Question(
        name="after-the-injection",
        question="Which replay rows were injected, and how did the success rate of their task change?",
        sql=_AFTER_THE_INJECTION,
        reading="Rates of the valid training episodes of the same stage, up to the injection's update and after it.",
    ),
    Question(
        name="injected-rows",
        question="What is the source file and line of an injected replay row?",
        sql=INJECTED_REPLAY_ROWS,
        reading="An online success has no source line: its `row_id` is its `episode_id`.",
    ),
    Question(
        name="training-curve",
        question="How does the success rate change over the updates of a training stage?",
        sql=_TRAINING_CURVE,
        reading="`checkpoint_id` is the checkpoint being trained, which is not in `checkpoints` while its stage "
        "runs. `weights_id` names the weights that sampled the episodes: for update 1 the parent's.",
    ),
    Question(
        name="reward-components",
        question="How do the components of the shaped reward change over training?",
        sql=_REWARD_COMPONENTS,
        reading="Means over valid episodes, each component before its weight. Unknown components are left out, "
        "not counted as zero.",
    ),
    Question(
        name="groups-without-variance",
        question="How many groups had no training signal by themselves, and how many of these did replay join?",
        sql=_GROUPS_WITHOUT_VARIANCE,
        reading="With `rollout.signal` `task`, equal raw task rewards or a single valid episode give no signal. "
        "Faults have no reward. Groups that ran again count once.",
    ),
    Question(
        name="staleness",
        question="How far behind the trainer was the policy that sampled each update's steps?",
        sql=_STALENESS,
        reading="`policy_version` is the number of updates that produced the weights that sampled a turn. On-policy, "
        "update 8 trains on samples of weights with 7 updates: 0 updates behind.",
    ),
    Question(
        name="ancestors",
        question="Which ancestors does a checkpoint have, and how was each made?",
        sql=_ANCESTORS,
        reading="Generation 0 is the checkpoint itself.",
    ),
)
