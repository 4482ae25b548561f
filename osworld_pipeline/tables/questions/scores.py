"""Questions about scores and their episodes."""

from osworld_pipeline.tables.questions.all_questions import Question
from osworld_pipeline.tables.questions.examples import BEST_EPISODE_SCREENSHOTS, SUCCESS_BY_CHECKPOINT

_SUCCESS_BY_DOMAIN = """
SELECT checkpoint_id, any_value(stage) AS stage, coalesce(nullif(domain, ''), family) AS domain,
       count(DISTINCT task_id) AS tasks, count(success) AS episodes, count(*) FILTER (success) AS successes,
       round(avg(success::INT), 4) AS success_rate, count(*) - count(success) AS faults, evaluation_key,
       desktops
FROM evals
GROUP BY checkpoint_id, evaluation_key, desktops, coalesce(nullif(domain, ''), family)
ORDER BY evaluation_key, desktops, stage, checkpoint_id, domain
"""

_FELL_BETWEEN_CHECKPOINTS = """
WITH pairs AS (
    SELECT c.parent_id, c.checkpoint_id, child.task_key AS task_id, child.seed,
           parent.success AS before, child.success AS after
    FROM checkpoints c
    JOIN evals child ON child.checkpoint_id = c.checkpoint_id
    JOIN evals parent ON parent.checkpoint_id = c.parent_id
        AND parent.task_key = child.task_key AND parent.seed = child.seed
        AND parent.evaluation_key = child.evaluation_key AND parent.desktops = child.desktops
    WHERE parent.success IS NOT NULL AND child.success IS NOT NULL
)
SELECT parent_id, checkpoint_id, task_id, count(*) AS pairs,
       round(avg(before::INT), 4) AS rate_before, round(avg(after::INT), 4) AS rate_after,
       count(*) FILTER (before AND NOT after) AS lost, count(*) FILTER (after AND NOT before) AS won
FROM pairs
GROUP BY parent_id, checkpoint_id, task_id
HAVING lost > won
ORDER BY lost - won DESC, parent_id, checkpoint_id, task_id
"""

_COST_PER_SUCCESS = """
WITH spent AS (
    SELECT episode_id, sum(prompt_num_tokens) AS read_tokens, sum(response_num_tokens) AS sampled_tokens
    FROM steps GROUP BY episode_id
)
SELECT e.purpose, e.checkpoint_id, count(*) AS episodes, count(*) FILTER (e.is_success) AS successes,
       coalesce(sum(s.sampled_tokens), 0) AS sampled_tokens, round(sum(e.times_s['total']), 1) AS seconds,
       round(sum(s.sampled_tokens) / nullif(count(*) FILTER (e.is_success), 0), 1) AS sampled_tokens_per_success,
       round(sum(s.read_tokens) / nullif(count(*) FILTER (e.is_success), 0), 1) AS read_tokens_per_success,
       round(sum(e.times_s['total']) / nullif(count(*) FILTER (e.is_success), 0), 1) AS seconds_per_success
FROM episodes e LEFT JOIN spent s USING (episode_id)
WHERE e.purpose IN ('train', 'evaluate')
GROUP BY e.purpose, e.checkpoint_id
ORDER BY e.purpose, e.checkpoint_id
"""

_SLOWEST_EPISODES = """
SELECT episode_id, task_id, purpose, outcome, num_steps, replica_id, round(times_s['total'], 2) AS total_s,
       round(times_s['reset'], 2) AS reset_s, round(times_s['model'], 2) AS model_s,
       round(times_s['step'], 2) AS step_s, round(times_s['evaluate'], 2) AS evaluate_s
FROM episodes
WHERE times_s['total'] IS NOT NULL
ORDER BY times_s['total'] DESC, episode_id
LIMIT 20
"""

_TIME_BY_PART = """
WITH parts AS (
    SELECT purpose, provider, unnest(map_entries(times_s)) AS part FROM episodes
)
SELECT purpose, provider, part.key AS part, count(*) AS episodes, round(avg(part.value), 3) AS mean_s,
       round(quantile_cont(part.value, 0.5), 3) AS p50_s, round(quantile_cont(part.value, 0.95), 3) AS p95_s
FROM parts
GROUP BY purpose, provider, part.key
ORDER BY purpose, provider, mean_s DESC, part
"""

_FAULTS_BY_REPLICA = """
SELECT provider, coalesce(nullif(replica_id, ''), '(none)') AS replica_id, count(*) AS episodes,
       count(*) FILTER (NOT is_valid) AS faults, round(avg((NOT is_valid)::INT), 4) AS fault_rate,
       count(*) FILTER (outcome = 'env_fault') AS env_faults,
       count(*) FILTER (outcome = 'policy_fault') AS policy_faults,
       count(*) FILTER (outcome = 'grader_fault') AS grader_faults,
       count(*) FILTER (outcome = 'timeout') AS timeouts,
       max(attempt) AS most_retries, any_value(error) FILTER (NOT is_valid) AS example
FROM episodes
WHERE purpose <> 'import'
GROUP BY provider, coalesce(nullif(replica_id, ''), '(none)')
ORDER BY fault_rate DESC, episodes DESC, provider, replica_id
"""

_REPEATED_FAILING_ACTIONS = """
WITH failing AS (
    SELECT s.episode_id, s.action_type, coalesce(s.command, '(no action could be read)') AS command,
           s.action_executed, s.screen_changed,
           lag(coalesce(s.command, '(no action could be read)'))
               OVER (PARTITION BY s.episode_id ORDER BY s.step_index) AS command_before
    FROM steps s JOIN episodes e USING (episode_id)
    WHERE e.is_valid AND NOT e.is_success
)
SELECT action_type, command, count(*) AS times, count(*) FILTER (command = command_before) AS repeats,
       count(DISTINCT episode_id) AS episodes, count(*) FILTER (NOT action_executed) AS not_executed,
       count(*) FILTER (NOT screen_changed) AS without_effect
FROM failing
GROUP BY action_type, command
ORDER BY repeats DESC, times DESC, command
LIMIT 20
"""

_PARSE_FAILURES = """
SELECT e.purpose, e.checkpoint_id, count(*) AS steps, count(*) FILTER (NOT s.action_parsed) AS unread,
       count(*) FILTER (s.fallback_used) AS fallbacks,
       count(*) FILTER (s.action_parsed AND NOT s.action_executed) AS refused,
       round(avg((NOT s.action_parsed)::INT), 4) AS unread_rate, round(avg(s.fallback_used::INT), 4) AS fallback_rate
FROM steps s JOIN episodes e USING (episode_id)
GROUP BY e.purpose, e.checkpoint_id
ORDER BY unread_rate DESC, e.purpose, e.checkpoint_id
"""

_SCORE_TO_PIXELS = """
SELECT v.checkpoint_id, v.task_id, v.seed, v.outcome, v.reward, v.episode_id, s.step_index, s.command,
       s.screenshot_sha256, s.screenshot_width, s.screenshot_height, s.screenshot_format
FROM evals v JOIN steps s USING (episode_id)
ORDER BY v.checkpoint_id, v.task_id, v.seed, s.step_index
"""

_BEHIND_A_SCORE = """
SELECT stage_key, checkpoint_id, kind, how, generations, ancestor_id, count(DISTINCT source_id) AS things,
       count(DISTINCT episode_id) AS episodes, min(path) AS path, any_value(code_version) AS code_version
FROM lineage
GROUP BY stage_key, checkpoint_id, kind, how, generations, ancestor_id
ORDER BY stage_key, checkpoint_id, generations NULLS FIRST, kind, how
"""

QUESTIONS = (
    Question(
        name="success-by-checkpoint",
        question="How often does each checkpoint succeed?",
        sql=SUCCESS_BY_CHECKPOINT,
        reading="`episodes` is the denominator; faults are listed separately and do not count as failures. Only rows "
        "with the same `evaluation_key` and `desktops` can be compared, and none with several `desktops`.",
    ),
    Question(
        name="success-by-domain",
        question="How often does each checkpoint succeed in each domain, and out of how many?",
        sql=_SUCCESS_BY_DOMAIN,
        reading="Tasks without a domain are grouped by the family of their suite. A rate is NULL, not 0, if every "
        "episode ended in a fault.",
    ),
    Question(
        name="fell-between-checkpoints",
        question="Which tasks got worse from a checkpoint to the one trained from it?",
        sql=_FELL_BETWEEN_CHECKPOINTS,
        reading="Paired by `evaluation_key`, `desktops`, task and seed: a fault on either side leaves the pair out. "
        "`lost` pairs succeeded before and fail now.",
    ),
    Question(
        name="cost-per-success",
        question="How many tokens and how much time does a success cost?",
        sql=_COST_PER_SUCCESS,
        reading="The cost of all episodes counts, including failures and faults. Rows of purpose train belong to the "
        "checkpoint that was being trained. `read_tokens_per_success` counts a prompt at each turn it is read. Values "
        "per success are NULL if no episode succeeded. Seconds are those of episodes, not of a machine: several run at "
        "once.",
    ),
    Question(
        name="best-episode",
        question="Which screenshots did the best episode of phase 2 see?",
        sql=BEST_EPISODE_SCREENSHOTS,
        reading="Best by raw task reward, then by shaped reward.",
    ),
    Question(
        name="score-to-pixels",
        question="Which screenshots belong to a score?",
        sql=_SCORE_TO_PIXELS,
        reading="From `evals` to the blobs: `screenshot_sha256` names the exact bytes that the model saw at that step. "
        "Add a WHERE for one checkpoint or one task.",
    ),
    Question(
        name="behind-a-score",
        question="What is the origin of a score of the leaderboard, down to pixels, parents and training data?",
        sql=_BEHIND_A_SCORE,
        reading="`stage_key` is the leaderboard's. One row for each kind of item: the inputs of the scored episodes "
        "and, by generation, the checkpoint, the groups that it was trained on and the replay rows that joined them or "
        "that it was fine-tuned on. Remove GROUP BY to see every link, with its path, line, recipe and commit.",
    ),
    Question(
        name="slowest-episodes",
        question="Which episodes took longest, and how was their time spent?",
        sql=_SLOWEST_EPISODES,
        reading="In seconds, for the last attempt of an episode.",
    ),
    Question(
        name="time-by-part",
        question="How is the time of an episode spent?",
        sql=_TIME_BY_PART,
        reading="In seconds; `total` exceeds the sum of the others by the time between them.",
    ),
    Question(
        name="faults-by-replica",
        question="Which replicas fail, how often and how?",
        sql=_FAULTS_BY_REPLICA,
        reading="`most_retries` is the highest attempt number, from 0: above 0 an episode was retried on a new "
        "desktop. `(none)`: the episode did not get a replica.",
    ),
    Question(
        name="repeated-failing-actions",
        question="Which actions does the policy repeat in episodes that fail?",
        sql=_REPEATED_FAILING_ACTIONS,
        reading="`repeats` counts steps whose command is that of the step before.",
    ),
    Question(
        name="parse-failures",
        question="How often can a checkpoint's answers not be parsed, or only by a fallback?",
        sql=_PARSE_FAILURES,
        reading="`refused` actions were parsed and not executed. Rows of purpose train belong to the checkpoint that "
        "was being trained, whose weights changed meanwhile.",
    ),
)
