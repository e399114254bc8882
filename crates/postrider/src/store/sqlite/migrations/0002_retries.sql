-- What a consumer could not apply yet, what waits behind it, and what was given up.

-- Tells a message that comes twice from another one with the same id.
ALTER TABLE inbox ADD COLUMN fingerprint INTEGER;

CREATE TABLE held (
    -- The order of arrival, which is the order within a key.
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer    TEXT NOT NULL,
    -- The hash that slots share messages by.
    shard       INTEGER NOT NULL,
    message_id  TEXT NOT NULL,
    key         TEXT,
    state       TEXT NOT NULL CHECK (state IN ('retrying', 'waiting', 'suspect', 'running')),
    attempts    INTEGER NOT NULL DEFAULT 0,
    -- Milliseconds since the epoch. A message that waits behind another has none until it is the first of its key.
    next_at     INTEGER,
    -- The attempts: [{"at", "error_type", "error", "causes"}].
    history     TEXT NOT NULL DEFAULT '[]',
    origin      TEXT NOT NULL,
    -- The event without its payload.
    envelope    TEXT NOT NULL,
    payload     BLOB NOT NULL,
    held_at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    UNIQUE (consumer, message_id)
) STRICT;
CREATE INDEX held_due ON held (consumer, next_at);
CREATE INDEX held_key ON held (consumer, key, id);

CREATE TABLE dead_letter (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer    TEXT NOT NULL,
    message_id  TEXT NOT NULL,
    state       TEXT NOT NULL DEFAULT 'dead' CHECK (state IN ('dead', 'replaying', 'discarded')),
    shard       INTEGER NOT NULL,
    topic       TEXT,
    type        TEXT,
    key         TEXT,
    tenant      TEXT,
    error_type  TEXT NOT NULL,
    error       TEXT NOT NULL,
    causes      TEXT NOT NULL DEFAULT '[]',
    attempts    INTEGER NOT NULL,
    history     TEXT NOT NULL,
    origin      TEXT NOT NULL,
    -- Null for a message that is no event; then headers holds what came with it.
    envelope    TEXT,
    headers     TEXT,
    payload     BLOB NOT NULL,
    died_at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    UNIQUE (consumer, message_id)
) STRICT;
CREATE INDEX dead_letter_died_at ON dead_letter (died_at);
CREATE INDEX dead_letter_key ON dead_letter (consumer, key, id);

-- Whether a slot's holder has not said that it ended: what it may have had in hand is suspicious.
ALTER TABLE cursor ADD COLUMN is_open INTEGER NOT NULL DEFAULT 0;

-- Who did what at the desk.
CREATE TABLE audit (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    actor  TEXT NOT NULL,
    action TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
