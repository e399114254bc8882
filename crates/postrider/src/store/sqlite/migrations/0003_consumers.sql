-- What consumers need beyond retries.

-- A dead letter of the relay is an outbox event that the broker refused too often; `consumer` is then relay/<destination>.
ALTER TABLE dead_letter ADD COLUMN stage TEXT NOT NULL DEFAULT 'consumer' CHECK (stage IN ('relay', 'consumer'));
-- When it was sent to the broker's own place for dead letters.
ALTER TABLE dead_letter ADD COLUMN sent_at TEXT;
CREATE INDEX dead_letter_unsent ON dead_letter (consumer, id) WHERE sent_at IS NULL;
