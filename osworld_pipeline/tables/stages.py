"""The training stages as a view: status and progress of each."""

# A killed program does not record its end. So a stage is not reported as running if it had no activity for 15 minutes
# or for three times the duration of its slowest update, whichever is longer.
STAGES = """
CREATE VIEW stages AS
WITH attempts AS (
    SELECT stage_key, max_by(stage, latest) AS stage, max_by(parent_id, latest) AS parent_id,
           max_by(status, latest) AS status, max_by(error, latest) AS error,
           max_by(num_planned, latest) AS num_planned, max_by(host, latest) AS host,
           max_by(process_id, latest) AS process_id, max_by(run_ids, latest) AS run_ids,
           count(*) AS num_attempts, min(started_utc) AS started_utc, max(started_utc) AS last_started_utc,
           max(ended_utc) AS ended_utc
    FROM (SELECT *, (first_update, started_utc) AS latest FROM stage_attempts) GROUP BY stage_key
),
done AS (
    SELECT stage_key, max("update") AS num_updates, max(ended_utc) AS last_update_utc,
           max(epoch(ended_utc) - epoch(started_utc)) AS slowest_s
    FROM updates GROUP BY stage_key
),
made AS (
    SELECT regexp_replace(checkpoint_id, '-u[0-9]+$', '') AS stage_key,
           max_by(checkpoint_id, num_updates) AS checkpoint_id, any_value(stage) AS stage,
           any_value(parent_id) AS parent_id, max(num_updates) AS num_updates,
           max(saved_utc) AS saved_utc, bool_or(NOT regexp_matches(checkpoint_id, '-u[0-9]+$')) AS is_whole
    FROM checkpoints WHERE stage NOT IN ('base', 'external') GROUP BY ALL
),
joined AS (
    SELECT stage_key, coalesce(a.stage, m.stage) AS stage, coalesce(a.parent_id, m.parent_id) AS parent_id,
           m.checkpoint_id, coalesce(m.is_whole, false) AS is_whole, a.status, a.error,
           greatest(coalesce(d.num_updates, 0), coalesce(m.num_updates, 0)) AS num_updates, a.num_planned,
           a.num_attempts, a.started_utc, coalesce(a.ended_utc, m.saved_utc) AS ended_utc,
           greatest(a.last_started_utc, d.last_update_utc, a.ended_utc, m.saved_utc) AS last_sign_utc,
           greatest(900, 3 * coalesce(d.slowest_s, 0)) AS patience_s, a.host, a.process_id, a.run_ids
    FROM attempts a FULL JOIN made m USING (stage_key) LEFT JOIN done d USING (stage_key)
)
SELECT stage_key, stage,
       CASE WHEN is_whole OR status IS NULL THEN 'finished'
            WHEN status = 'running' AND epoch(now()) - epoch(last_sign_utc) > patience_s THEN 'silent'
            ELSE status END AS status,
       num_updates, num_planned, checkpoint_id, parent_id, num_attempts, started_utc, last_sign_utc,
       CASE WHEN is_whole OR status <> 'running' THEN ended_utc END AS ended_utc, error, host, process_id, run_ids
FROM joined
"""
