-- The spine: outbox, positions, side table, leases, the embedded broker's log, inbox.
-- Readable and writable with the sqlite3 shell from 3.38 on; times are ISO-8601 UTC text that sorts, or, where only the
-- program compares them (leases, next attempts), integer milliseconds since the epoch.

-- The outbox is a log: rows are inserted, never updated, and deleted only by retention. SQLite has one writer, so the
-- order of ids is the order of commits; AUTOINCREMENT keeps an id from being used twice.
--
--     INSERT INTO outbox (topic, key, type, payload) VALUES ('orders.created', 'o-1', 'order.created', '{"total": 120}');
CREATE TABLE outbox (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    -- A UUIDv7: 48 bits of milliseconds, version, variant, the rest random.
    event_id     TEXT NOT NULL DEFAULT (lower(
                     substr(printf('%012x', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)), 1, 8) || '-' ||
                     substr(printf('%012x', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)), 9, 4) || '-7' ||
                     substr(hex(randomblob(2)), 2) || '-' ||
                     substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' ||
                     hex(randomblob(6)))),
    topic        TEXT NOT NULL,
    key          TEXT,
    type         TEXT NOT NULL,
    content_type TEXT NOT NULL DEFAULT 'application/json',
    source       TEXT,
    subject      TEXT,
    tenant       TEXT,
    correlation  TEXT,
    causation    TEXT,
    traceparent  TEXT,
    tracestate   TEXT,
    headers      TEXT,
    created_at   TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    -- Last, so that reading the other columns does not walk a large payload. JSON is TEXT, everything else BLOB.
    payload      ANY  NOT NULL,
    CONSTRAINT outbox_event_id_is_a_uuid          CHECK (event_id LIKE '________-____-____-____-____________'),
    CONSTRAINT outbox_topic_is_not_empty          CHECK (topic <> ''),
    CONSTRAINT outbox_topic_has_at_most_255_bytes CHECK (length(CAST(topic AS BLOB)) <= 255),
    CONSTRAINT outbox_key_is_not_empty            CHECK (key <> ''),
    CONSTRAINT outbox_key_has_at_most_255_bytes   CHECK (length(CAST(key AS BLOB)) <= 255),
    CONSTRAINT outbox_type_is_not_empty           CHECK (type <> ''),
    CONSTRAINT outbox_headers_is_a_json_object    CHECK (headers IS NULL OR (json_valid(headers) AND json_type(headers) = 'object')),
    CONSTRAINT outbox_created_at_is_iso_8601_utc  CHECK (created_at GLOB '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]*Z'),
    CONSTRAINT outbox_payload_is_text_or_blob     CHECK (typeof(payload) IN ('text', 'blob')),
    CONSTRAINT outbox_payload_is_valid_json       CHECK (
        CASE WHEN content_type LIKE 'application/json' OR content_type LIKE 'application/json;%'
               OR content_type LIKE '%+json' OR content_type LIKE '%+json;%'
             THEN typeof(payload) = 'text' AND json_valid(payload)
             ELSE 1 END)
) STRICT;

-- How far each destination has come. A row belongs to whoever opened the lane last: its epoch fences every write.
CREATE TABLE lane (
    destination TEXT    NOT NULL,
    lane        INTEGER NOT NULL,
    lanes       INTEGER NOT NULL,
    epoch       INTEGER NOT NULL DEFAULT 0,
    last_id     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (destination, lane)
) STRICT, WITHOUT ROWID;

-- The side table: events that could not be published, or that wait behind one of their key. A full copy, so that
-- retention of the outbox need not look here.
CREATE TABLE parked (
    destination     TEXT    NOT NULL,
    id              INTEGER NOT NULL,
    hash            INTEGER NOT NULL,
    state           TEXT    NOT NULL CONSTRAINT parked_state_is_known CHECK (state IN ('retrying', 'waiting', 'failed')),
    attempts        INTEGER NOT NULL,
    next_at         INTEGER NOT NULL,
    failure_kind    TEXT,
    failure_message TEXT,
    first_parked_at TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    event_id        TEXT    NOT NULL,
    topic           TEXT    NOT NULL,
    key             TEXT,
    type            TEXT    NOT NULL,
    content_type    TEXT    NOT NULL,
    source          TEXT,
    subject         TEXT,
    tenant          TEXT,
    correlation     TEXT,
    causation       TEXT,
    traceparent     TEXT,
    tracestate      TEXT,
    headers         TEXT,
    created_at      TEXT    NOT NULL,
    payload         ANY     NOT NULL,
    PRIMARY KEY (destination, id)
) STRICT;

-- Answers "which is the oldest of each key, and may it be tried" without touching the table.
CREATE INDEX parked_by_key ON parked (destination, key, id, state, next_at, hash);
CREATE INDEX parked_by_state ON parked (destination, state);

-- What became of an event, for each destination. With several lanes an event counts as published when the slowest lane
-- has passed it.
CREATE VIEW outbox_status AS
SELECT o.id, o.event_id, o.topic, o.key, o.type, o.created_at, d.destination,
       CASE WHEN p.state IS NOT NULL THEN p.state WHEN o.id <= d.last_id THEN 'published' ELSE 'pending' END AS status,
       coalesce(p.attempts, 0) AS attempts,
       p.failure_kind || ': ' || p.failure_message AS last_error
  FROM outbox o
  LEFT JOIN (SELECT destination, min(last_id) AS last_id FROM lane GROUP BY destination) d ON true
  LEFT JOIN parked p ON p.destination = d.destination AND p.id = o.id
UNION ALL
-- Parked events outlive their outbox row.
SELECT p.id, p.event_id, p.topic, p.key, p.type, p.created_at, p.destination, p.state, p.attempts,
       p.failure_kind || ': ' || p.failure_message
  FROM parked p
 WHERE NOT EXISTS (SELECT 1 FROM outbox o WHERE o.id = p.id);

-- Who works on which slot. Rows are never deleted: an epoch must not start over. A lease that was given back has the
-- owner ''.
CREATE TABLE lease (
    group_name TEXT    NOT NULL,
    slot       INTEGER NOT NULL,
    owner      TEXT    NOT NULL,
    epoch      INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (group_name, slot)
) STRICT, WITHOUT ROWID;

-- Who would like to work.
CREATE TABLE member (
    group_name TEXT    NOT NULL,
    owner      TEXT    NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (group_name, owner)
) STRICT, WITHOUT ROWID;

-- The log of the embedded broker.
CREATE TABLE message (
    "offset"     INTEGER PRIMARY KEY AUTOINCREMENT,
    hash         INTEGER NOT NULL,
    appended_at  TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    event_id     TEXT    NOT NULL,
    topic        TEXT    NOT NULL,
    key          TEXT,
    type         TEXT    NOT NULL,
    content_type TEXT    NOT NULL,
    source       TEXT,
    subject      TEXT,
    tenant       TEXT,
    correlation  TEXT,
    causation    TEXT,
    traceparent  TEXT,
    tracestate   TEXT,
    headers      TEXT,
    created_at   TEXT    NOT NULL,
    payload      ANY     NOT NULL
) STRICT;

-- How far each consumer of the embedded broker has come: everything up to the offset is done.
CREATE TABLE cursor (
    consumer TEXT    NOT NULL,
    slot     INTEGER NOT NULL,
    slots    INTEGER NOT NULL,
    epoch    INTEGER NOT NULL DEFAULT 0,
    "offset" INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, slot)
) STRICT, WITHOUT ROWID;

-- What each consumer has done; written in the transaction of the effect.
CREATE TABLE inbox (
    consumer     TEXT NOT NULL,
    message_id   TEXT NOT NULL,
    state        TEXT NOT NULL DEFAULT 'done',
    error        TEXT,
    topic        TEXT NOT NULL,
    key          TEXT,
    processed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z'),
    PRIMARY KEY (consumer, message_id)
) STRICT, WITHOUT ROWID;

-- Retention deletes by age.
CREATE INDEX inbox_by_age ON inbox (processed_at);
