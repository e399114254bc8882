-- Several destinations: which topics each gets, as a regular expression; null for all.
ALTER TABLE postrider.lane ADD COLUMN topics text;

-- One row per event and destination that gets it, for people.
CREATE OR REPLACE VIEW postrider.outbox_status AS
SELECT o.id, o.event_id, l.destination, o.topic, o.key, o.type, o.created_at,
       CASE WHEN p.state IS NOT NULL THEN p.state
            WHEN d.id IS NOT NULL THEN d.state
            WHEN pg_visible_in_snapshot(o.tx, l.done) THEN 'published'
            WHEN o.id <= l.last_id AND pg_visible_in_snapshot(o.tx, l.target) THEN 'published'
            ELSE 'pending' END AS status,
       coalesce(p.attempts, d.attempts, 0) AS attempts, p.next_at, coalesce(p.failure, d.error) AS last_error
FROM postrider.outbox o
LEFT JOIN postrider.lane l ON l.lane = postrider.lane_of(o.key, o.id, l.lanes) AND (l.topics IS NULL OR o.topic ~ l.topics)
LEFT JOIN postrider.parked p ON p.destination = l.destination AND p.id = o.id
LEFT JOIN postrider.dead_letter d ON d.consumer = 'relay/' || l.destination AND d.message_id = o.event_id
     AND d.state = 'discarded' AND (d.origin ->> 'outbox_id')::bigint = o.id
UNION ALL
-- Parked events whose partition is gone.
SELECT p.id, p.event_id, p.destination, p.topic, p.key, p.type, p.created_at, p.state, p.attempts, p.next_at, p.failure
FROM postrider.parked p
WHERE NOT EXISTS (SELECT 1 FROM postrider.outbox o WHERE o.id = p.id);
