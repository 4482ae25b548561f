"""Questions about updates, stages and their cost."""

from osworld_pipeline.tables.questions.all_questions import Question

_UPDATE_CURVE = """
SELECT stage_key, "update", round(loss, 6) AS loss, round(kl, 6) AS kl, round(entropy, 4) AS entropy,
       round(grad_norm, 4) AS grad_norm, round(clipped_share, 4) AS clipped_share,
       round(effective_share, 4) AS effective_share, round(staleness_mean, 2) AS staleness, learning_rate,
       round(success_rate, 4) AS success_rate, round(task_reward, 4) AS task_reward
FROM updates
ORDER BY stage_key, "update"
"""

_LOGPROBS_AND_REWARD = """
SELECT stage_key, "update", count(*) AS episodes, sum(response_tokens)::BIGINT AS sampled_tokens,
       round(sum(mean_logprob * response_tokens) / sum(response_tokens), 4) AS mean_logprob,
       round(avg(task_reward), 4) AS task_reward, round(avg(shaped_reward), 4) AS shaped_reward
FROM episodes
WHERE purpose = 'train' AND is_valid AND "update" >= 1
GROUP BY stage_key, "update"
ORDER BY stage_key, "update"
"""

_RUNNING_STAGES = """
SELECT stage_key, status, num_updates, num_planned, num_attempts, started_utc, last_sign_utc, host, process_id
FROM stages
WHERE status IN ('running', 'silent')
ORDER BY started_utc, stage_key
"""

_STAGES = """
SELECT stage_key, stage, status, num_updates, num_attempts, started_utc, ended_utc,
       round(epoch(ended_utc) - epoch(started_utc)) AS wall_s, error
FROM stages
ORDER BY started_utc NULLS FIRST, stage_key
"""

_HELD_UPDATES = """
SELECT stage_key, "update", is_held, held_reason, num_held_tries, is_skipped, round(fault_share, 4) AS fault_share,
       round(effective_share, 4) AS effective_share, ended_utc
FROM updates
WHERE is_held OR is_skipped OR num_held_tries > 0
ORDER BY stage_key, "update"
"""

_TIME_OF_UPDATES = """
SELECT stage, count(*) AS updates, round(avg(coalesce(rollout_s, 0) + update_s), 3) AS mean_s,
       round(avg(rollout_s), 3) AS rollout_s, round(avg(score_s), 3) AS score_s,
       round(avg(canary_wait_s), 3) AS canary_wait_s, round(avg(forward_s), 3) AS forward_s,
       round(avg(optimizer_s), 3) AS optimizer_s, round(avg(tokens_per_s), 1) AS tokens_per_s
FROM updates
GROUP BY stage
ORDER BY stage
"""

_FAULTS_BY_UPDATE = """
SELECT stage_key, "update", count(*) AS episodes, count(*) FILTER (NOT is_valid) AS faults,
       round(avg((NOT is_valid)::INT), 4) AS fault_share, count(*) FILTER (outcome = 'env_fault') AS env_faults,
       count(*) FILTER (outcome = 'policy_fault') AS policy_faults,
       count(*) FILTER (outcome = 'grader_fault') AS grader_faults, count(*) FILTER (outcome = 'timeout') AS timeouts
FROM episodes
WHERE purpose = 'train' AND "update" >= 1
GROUP BY stage_key, "update"
ORDER BY stage_key, "update"
"""

_ADVANTAGES = """
SELECT stage_key, "update", group_id, episode_id, outcome, task_reward, shaped_reward, round(advantage, 4) AS advantage
FROM episodes
WHERE advantage IS NOT NULL
ORDER BY stage_key, "update", group_id, advantage DESC, episode_id
"""

_TOKENS_PER_EPISODE = """
SELECT purpose, checkpoint_id, count(*) AS episodes, round(avg(num_steps), 2) AS turns,
       round(avg(prompt_tokens), 1) AS prompt_tokens, round(avg(response_tokens), 1) AS response_tokens,
       round(avg(image_tokens), 1) AS image_tokens, round(avg(num_images), 2) AS images,
       max(prompt_tokens + response_tokens) AS most_tokens
FROM episodes
WHERE prompt_tokens IS NOT NULL
GROUP BY purpose, checkpoint_id
ORDER BY purpose, checkpoint_id
"""

_THROUGHPUT = """
SELECT date_trunc('hour', ended_utc) AS hour_utc, purpose, count(*) AS episodes, count(*) FILTER (is_valid) AS valid,
       sum(num_steps)::BIGINT AS turns, sum(response_tokens)::BIGINT AS sampled_tokens,
       count(DISTINCT replica_id) AS replicas
FROM episodes
WHERE ended_utc IS NOT NULL AND purpose <> 'import'
GROUP BY hour_utc, purpose
ORDER BY hour_utc, purpose
"""

_LICENCES = """
SELECT checkpoint_id, licence, source_dataset, sum(num_rows) FILTER (how <> 'weights')::BIGINT AS demonstrations,
       min(generations) AS generations, string_agg(DISTINCT how, ', ' ORDER BY how) AS how, min(path) AS a_file
FROM licences
GROUP BY checkpoint_id, licence, source_dataset
ORDER BY checkpoint_id, licence, source_dataset
"""

_SUPERSEDED = """
SELECT stage_key, "update", count(*) AS episodes, count(*) FILTER (is_success) AS successes,
       sum(response_tokens)::BIGINT AS sampled_tokens, round(sum(times_s['total']), 1) AS seconds
FROM episodes
WHERE purpose = 'superseded'
GROUP BY stage_key, "update"
ORDER BY stage_key, "update"
"""

_CHECKPOINT_UPDATES = """
SELECT c.checkpoint_id, c.num_updates, c.saved_utc, u.ended_utc AS update_ended_utc, round(u.loss, 6) AS loss,
       round(u.success_rate, 4) AS success_rate
FROM checkpoints c
LEFT JOIN updates u
    ON u."update" = c.num_updates AND u.stage_key = regexp_replace(c.checkpoint_id, '-u[0-9]+$', '')
ORDER BY c.saved_utc NULLS FIRST, c.checkpoint_id
"""

_EVALUATION_DATES = """
SELECT checkpoint_id, coalesce(suite_name, suite) AS suite, evaluation_key, count(*) AS episodes,
       count(*) - count(success) AS faults, min(started_utc) AS first_started_utc, max(ended_utc) AS last_ended_utc
FROM evals
GROUP BY checkpoint_id, coalesce(suite_name, suite), evaluation_key
ORDER BY first_started_utc NULLS FIRST, checkpoint_id, suite
"""

QUESTIONS = (
    Question(
        name="update-curve",
        question="How do loss, KL, entropy, gradient norm, clipping and success change by update?",
        sql=_UPDATE_CURVE,
        reading="One row for each update, as the trainer wrote it. Values that a kind of stage lacks are NULL: "
        "supervised stages have no rollouts and no KL. `metrics` has all figures by MLflow's names.",
    ),
    Question(
        name="logprobs-and-reward",
        question="How do the policy's log-probabilities and its reward change by update?",
        sql=_LOGPROBS_AND_REWARD,
        reading="Over the valid episodes rolled out for each update. `mean_logprob` is a mean over sampled tokens, in "
        "nats, as the sampler reported them: values nearer to 0 mean a more certain policy.",
    ),
    Question(
        name="running-stages",
        question="Which stages are running now, and what is their progress?",
        sql=_RUNNING_STAGES,
        reading="`silent`: no end is recorded, and no activity for 15 minutes or three times the duration of the "
        "slowest update, whichever is longer: it was killed, or hangs. Running it again continues from its last "
        "checkpoint.",
    ),
    Question(
        name="stages",
        question="Which stages have been trained, when, in how many attempts, and how did they end?",
        sql=_STAGES,
        reading="`num_attempts` above 1: it was resumed. Times are NULL for stages from before schema version 7. "
        "`wall_s` is from the first start to the end, including pauses between attempts.",
    ),
    Question(
        name="held-updates",
        question="Which updates were held or skipped, and why?",
        sql=_HELD_UPDATES,
        reading="A held update made no optimiser step: too many faults, or too small an effective sample size. A row "
        "with `num_held_tries` above 0 and `is_held` false was trained in a later try.",
    ),
    Question(
        name="time-of-updates",
        question="How is the time of an update spent?",
        sql=_TIME_OF_UPDATES,
        reading="Mean seconds by kind of stage. `rollout_s` is the time that the trainer waited; in asynchronous mode "
        "rollouts continue while it trains.",
    ),
    Question(
        name="faults-by-update",
        question="What share of each update's episodes ended in faults, and in which kinds?",
        sql=_FAULTS_BY_UPDATE,
        reading="Of all episodes that were run for the update, including resampled and held ones.",
    ),
    Question(
        name="advantages",
        question="What was the advantage of each episode and of its siblings?",
        sql=_ADVANTAGES,
        reading="As the update used it. All 0: the group had no signal. Episodes of dropped groups, faults and "
        "episodes from before schema version 7 have none. Add a WHERE for one group or one episode.",
    ),
    Question(
        name="tokens-per-episode",
        question="How many tokens does an episode use?",
        sql=_TOKENS_PER_EPISODE,
        reading="Means. `prompt_tokens` counts a prompt at each turn it is read; `image_tokens` and `images` count "
        "each screenshot once in each training sequence that has it.",
    ),
    Question(
        name="throughput-by-hour",
        question="How many episodes, turns and tokens are completed per hour?",
        sql=_THROUGHPUT,
        reading="By the hour (UTC) in which an episode ended. Superseded episodes count as work.",
    ),
    Question(
        name="licences",
        question="Which licences apply to a checkpoint, through training data and weights, its own and its ancestors'?",
        sql=_LICENCES,
        reading="`generations` is that of the nearest checkpoint with the licence: 0 for the checkpoint itself, 1 "
        "for its parent. `unknown`: a source has none. For one checkpoint: SELECT DISTINCT licence FROM licences WHERE "
        "checkpoint_id = '...'.",
    ),
    Question(
        name="superseded-rollouts",
        question="Which rollouts were repeated after a stage was resumed, and what had they cost?",
        sql=_SUPERSEDED,
        reading="They are kept and marked with the purpose `superseded`, and no other question counts them as "
        "training.",
    ),
    Question(
        name="checkpoint-updates",
        question="When was each checkpoint saved, and what were the results of the update that made it?",
        sql=_CHECKPOINT_UPDATES,
        reading="A milestone's id ends in the number of updates, which is its last update's number.",
    ),
    Question(
        name="evaluation-dates",
        question="When was each checkpoint evaluated, and on which suite?",
        sql=_EVALUATION_DATES,
        reading="Times are UTC. An evaluation that was resumed spans its pause.",
    ),
)
