-- What consumers need beyond retries.

-- A dead letter of the relay is an outbox event that the broker refused too often; `consumer` is then relay/<destination>.
ALTER TABLE dead_letter ADD COLUMN stage TEXT NOT NULL DEFAULT 'consumer' CHECK (stage IN ('relay', 'consumer'));
-- When it was sent to the broker's own place for dead letters.
ALTER TABLE dead_letter ADD COLUMN sent_at TEXT;
CREATE INDEX dead_letter_unsent ON dead_letter (consumer, id) WHERE sent_at IS NULL;

-- What became of an event, for each destination. With several lanes an event counts as published when the slowest lane
-- has passed it. A discarded event is one that the relay has passed and never published.
DROP VIEW outbox_status;
CREATE VIEW outbox_status AS
SELECT o.id, o.event_id, o.topic, o.key, o.type, o.created_at, w.destination,
       CASE WHEN p.state IS NOT NULL THEN p.state WHEN d.id IS NOT NULL THEN d.state
            WHEN o.id <= w.last_id THEN 'published' ELSE 'pending' END AS status,
       coalesce(p.attempts, d.attempts, 0) AS attempts,
       coalesce(p.failure_kind || ': ' || p.failure_message, d.error_type || ': ' || d.error) AS last_error
  FROM outbox o
  LEFT JOIN (SELECT destination, min(last_id) AS last_id FROM lane GROUP BY destination) w ON true
  LEFT JOIN parked p ON p.destination = w.destination AND p.id = o.id
  LEFT JOIN dead_letter d ON d.consumer = 'relay/' || w.destination AND d.message_id = o.event_id
       AND d.state = 'discarded' AND d.origin ->> 'outbox_id' = o.id
UNION ALL
-- Parked events outlive their outbox row.
SELECT p.id, p.event_id, p.topic, p.key, p.type, p.created_at, p.destination, p.state, p.attempts,
       p.failure_kind || ': ' || p.failure_message
  FROM parked p
 WHERE NOT EXISTS (SELECT 1 FROM outbox o WHERE o.id = p.id);

-- The newest change that a consumer has applied of each entity. A deleted one stays as a tombstone until no late message
-- can come any more.
CREATE TABLE newest (
    consumer    TEXT NOT NULL,
    entity      TEXT NOT NULL,
    id          TEXT NOT NULL,
    version     INTEGER,
    -- The producer's clock.
    at          TEXT NOT NULL,
    is_deleted  INTEGER NOT NULL,
    -- Ours: what retention counts from.
    admitted_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    PRIMARY KEY (consumer, entity, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX newest_tombstone ON newest (admitted_at) WHERE is_deleted;
