-- What the people on call read: who lives, what was counted, what is wrong, who was told, what a check found.
-- Times are integer milliseconds since the epoch.

-- Instances, as they tell of themselves every few seconds.
CREATE TABLE instance (
    group_name    TEXT    NOT NULL,
    owner         TEXT    NOT NULL,
    version       TEXT    NOT NULL,
    started_at    INTEGER NOT NULL,
    seen_at       INTEGER NOT NULL,
    -- Why its breaker lets nothing through, and since when.
    breaker       TEXT,
    breaker_since INTEGER,
    PRIMARY KEY (group_name, owner)
) STRICT, WITHOUT ROWID;

-- Counts by minute (width 60), quarter of an hour (900) and hour (3600).
CREATE TABLE bucket (
    width      INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    group_name TEXT    NOT NULL,
    metric     TEXT    NOT NULL,
    label      TEXT    NOT NULL,
    count      INTEGER NOT NULL,
    PRIMARY KEY (width, at, group_name, metric, label)
) STRICT, WITHOUT ROWID;

CREATE TABLE alert (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    rule        TEXT    NOT NULL,
    subject     TEXT    NOT NULL,
    urgency     TEXT    NOT NULL CHECK (urgency IN ('warning', 'critical')),
    summary     TEXT    NOT NULL,
    remedy      TEXT    NOT NULL,
    fired_at    INTEGER NOT NULL,
    resolved_at INTEGER,
    -- Whether a delivery was written for it.
    is_told     INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX alert_open ON alert (rule, subject) WHERE resolved_at IS NULL;
CREATE INDEX alert_resolved_at ON alert (resolved_at) WHERE resolved_at IS NOT NULL;

-- Whom to tell; a row goes when it was told.
CREATE TABLE delivery (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    alert_id      INTEGER NOT NULL REFERENCES alert (id) ON DELETE CASCADE,
    sink          TEXT    NOT NULL,
    is_resolution INTEGER NOT NULL,
    failures      INTEGER NOT NULL DEFAULT 0,
    next_at       INTEGER NOT NULL,
    error         TEXT
) STRICT;
CREATE INDEX delivery_order ON delivery (alert_id, sink, id);

-- Nobody is told of these alerts until then; an empty rule or subject means all.
CREATE TABLE silence (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    rule     TEXT    NOT NULL,
    subject  TEXT    NOT NULL,
    until_at INTEGER NOT NULL,
    reason   TEXT    NOT NULL,
    actor    TEXT    NOT NULL
) STRICT;

-- Integrity reports. One that was scheduled is begun once across all instances.
CREATE TABLE report (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    began_at      INTEGER NOT NULL,
    ended_at      INTEGER,
    actor         TEXT    NOT NULL,
    scheduled_for INTEGER UNIQUE,
    checks        INTEGER NOT NULL DEFAULT 0,
    warnings      INTEGER NOT NULL DEFAULT 0,
    errors        INTEGER NOT NULL DEFAULT 0,
    findings      TEXT    NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX report_began_at ON report (began_at);
CREATE INDEX audit_at ON audit (at);

-- What is shown is found through an index, however much there is.
CREATE INDEX held_order ON held (consumer, id);
CREATE INDEX parked_holder ON parked (destination, id) WHERE state <> 'waiting';
CREATE INDEX parked_event ON parked (destination, event_id);
CREATE INDEX dead_letter_stats ON dead_letter (stage, consumer, error_type, state, died_at);
CREATE INDEX dead_letter_open ON dead_letter (consumer, died_at) WHERE state = 'dead';
CREATE INDEX dead_letter_replaying ON dead_letter (id) WHERE state = 'replaying';
CREATE INDEX dead_letter_consumer ON dead_letter (consumer, id);
CREATE INDEX dead_letter_error ON dead_letter (error_type, id);
CREATE INDEX dead_letter_type ON dead_letter (type, id);
CREATE INDEX dead_letter_of_key ON dead_letter (key, id) WHERE key IS NOT NULL;
CREATE INDEX dead_letter_tenant ON dead_letter (tenant, id) WHERE tenant IS NOT NULL;

-- How often the file was restored, as far as a person has said so. The lineage is drawn once; copies bring it along, so it
-- says what was published from this file wherever it lies now.
CREATE TABLE origin (
    is_one  INTEGER PRIMARY KEY CHECK (is_one = 1),
    lineage TEXT    NOT NULL,
    life    INTEGER NOT NULL
) STRICT;
INSERT INTO origin VALUES (1, lower(hex(randomblob(16))), 0);
