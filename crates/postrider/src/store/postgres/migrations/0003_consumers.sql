-- What consumers need beyond retries.

-- A dead letter of the relay is an outbox event that the broker refused too often; `consumer` is then relay/<destination>.
ALTER TABLE postrider.dead_letter ADD COLUMN stage text NOT NULL DEFAULT 'consumer'
    CHECK (stage IN ('relay', 'consumer'));
-- When it was sent to the broker's own place for dead letters.
ALTER TABLE postrider.dead_letter ADD COLUMN sent_at timestamptz;
CREATE INDEX dead_letter_unsent ON postrider.dead_letter (consumer, id) WHERE sent_at IS NULL;

-- One row per event and destination, for people. A discarded event is one that the relay has passed and never published.
CREATE OR REPLACE VIEW postrider.outbox_status AS
SELECT o.id, o.event_id, l.destination, o.topic, o.key, o.type, o.created_at,
       CASE WHEN p.state IS NOT NULL THEN p.state
            WHEN d.id IS NOT NULL THEN d.state
            WHEN pg_visible_in_snapshot(o.tx, l.done) THEN 'published'
            WHEN o.id <= l.last_id AND pg_visible_in_snapshot(o.tx, l.target) THEN 'published'
            ELSE 'pending' END AS status,
       coalesce(p.attempts, d.attempts, 0) AS attempts, p.next_at, coalesce(p.failure, d.error) AS last_error
FROM postrider.outbox o
LEFT JOIN postrider.lane l ON l.lane = postrider.lane_of(o.key, o.id, l.lanes)
LEFT JOIN postrider.parked p ON p.destination = l.destination AND p.id = o.id
LEFT JOIN postrider.dead_letter d ON d.consumer = 'relay/' || l.destination AND d.message_id = o.event_id
     AND d.state = 'discarded' AND (d.origin ->> 'outbox_id')::bigint = o.id
UNION ALL
-- Parked events whose partition is gone.
SELECT p.id, p.event_id, p.destination, p.topic, p.key, p.type, p.created_at, p.state, p.attempts, p.next_at, p.failure
FROM postrider.parked p
WHERE NOT EXISTS (SELECT 1 FROM postrider.outbox o WHERE o.id = p.id);

-- The newest change that a consumer has applied of each entity. A deleted one stays as a tombstone until no late message
-- can come any more.
CREATE TABLE postrider.newest (
    consumer    text        NOT NULL,
    entity      text        NOT NULL,
    id          text        NOT NULL,
    version     bigint,
    -- The producer's clock.
    at          timestamptz NOT NULL,
    is_deleted  boolean     NOT NULL,
    -- Ours: what retention counts from.
    admitted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, entity, id)
);
CREATE INDEX newest_tombstone ON postrider.newest (admitted_at) WHERE is_deleted;

-- As before, in one expression: a call through SPI less for every insert.
CREATE OR REPLACE FUNCTION postrider.wake() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (CASE WHEN pg_try_advisory_lock(7062611490211870000) THEN NOT pg_advisory_unlock(7062611490211870000)
             ELSE current_setting('postrider.notify', true) IS DISTINCT FROM 'off' END) THEN
        PERFORM pg_notify('postrider_outbox', '');
    END IF;
    RETURN NULL;
END $$;
