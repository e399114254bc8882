-- What the people on call read: who lives, what was counted, what is wrong, who was told, what a check found.

-- Instances, as they tell of themselves every few seconds.
CREATE TABLE postrider.instance (
    group_name    text        NOT NULL,
    owner         text        NOT NULL,
    version       text        NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Why its breaker lets nothing through, and since when.
    breaker       text,
    breaker_since timestamptz,
    PRIMARY KEY (group_name, owner)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);

-- Counts by minute (width 60), quarter of an hour (900) and hour (3600).
CREATE TABLE postrider.bucket (
    width      int         NOT NULL,
    at         timestamptz NOT NULL,
    group_name text        NOT NULL,
    metric     text        NOT NULL,
    label      text        NOT NULL,
    count      bigint      NOT NULL,
    PRIMARY KEY (width, at, group_name, metric, label)
) WITH (fillfactor = 70);

CREATE TABLE postrider.alert (
    id          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    rule        text        NOT NULL,
    subject     text        NOT NULL,
    urgency     text        NOT NULL CHECK (urgency IN ('warning', 'critical')),
    summary     text        NOT NULL,
    remedy      text        NOT NULL,
    fired_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    resolved_at timestamptz,
    -- Whether a delivery was written for it.
    is_told     boolean     NOT NULL
);
CREATE UNIQUE INDEX alert_open ON postrider.alert (rule, subject) WHERE resolved_at IS NULL;
CREATE INDEX alert_resolved_at ON postrider.alert (resolved_at) WHERE resolved_at IS NOT NULL;

-- Whom to tell; a row goes when it was told.
CREATE TABLE postrider.delivery (
    id            bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    alert_id      bigint      NOT NULL REFERENCES postrider.alert (id) ON DELETE CASCADE,
    sink          text        NOT NULL,
    is_resolution boolean     NOT NULL,
    failures      int         NOT NULL DEFAULT 0,
    next_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    error         text
);
CREATE INDEX delivery_order ON postrider.delivery (alert_id, sink, id);

-- Nobody is told of these alerts until then; an empty rule or subject means all.
CREATE TABLE postrider.silence (
    id       bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule     text        NOT NULL,
    subject  text        NOT NULL,
    until_at timestamptz NOT NULL,
    reason   text        NOT NULL,
    actor    text        NOT NULL
);

-- Integrity reports. One that was scheduled is begun once across all instances.
CREATE TABLE postrider.report (
    id            bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    began_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at      timestamptz,
    actor         text        NOT NULL,
    scheduled_for timestamptz UNIQUE,
    checks        int         NOT NULL DEFAULT 0,
    warnings      int         NOT NULL DEFAULT 0,
    errors        int         NOT NULL DEFAULT 0,
    findings      jsonb       NOT NULL DEFAULT '[]'
);
CREATE INDEX report_began_at ON postrider.report (began_at);
CREATE INDEX audit_at ON postrider.audit (at);

-- What is shown is found through an index, however much there is.
CREATE INDEX held_order ON postrider.held (consumer, id);
CREATE INDEX parked_holder ON postrider.parked (destination, id) WHERE state <> 'waiting';
CREATE INDEX parked_event ON postrider.parked (destination, event_id);
CREATE INDEX dead_letter_stats ON postrider.dead_letter (stage, consumer, error_type, state, died_at);
CREATE INDEX dead_letter_open ON postrider.dead_letter (consumer, died_at) WHERE state = 'dead';
CREATE INDEX dead_letter_replaying ON postrider.dead_letter (id) WHERE state = 'replaying';
CREATE INDEX dead_letter_consumer ON postrider.dead_letter (consumer, id);
CREATE INDEX dead_letter_error ON postrider.dead_letter (error_type, id);
CREATE INDEX dead_letter_type ON postrider.dead_letter (type, id);
CREATE INDEX dead_letter_of_key ON postrider.dead_letter (key, id) WHERE key IS NOT NULL;
CREATE INDEX dead_letter_tenant ON postrider.dead_letter (tenant, id) WHERE tenant IS NOT NULL;

-- Counts read the index alone, as long as vacuum keeps up with what was written.
ALTER TABLE postrider.dead_letter SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.02);
ALTER TABLE postrider.held SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.02);

-- Which database this is, and how often it was restored: a dump that was restored elsewhere brings another's identity along.
CREATE TABLE postrider.origin (
    is_one   boolean     NOT NULL DEFAULT true PRIMARY KEY CHECK (is_one),
    -- The cluster and the database; null until a relay has looked.
    identity text,
    -- Drawn once; dumps and copies bring it along, so it says what was published from this database wherever it stands now.
    lineage  uuid        NOT NULL DEFAULT gen_random_uuid(),
    life     bigint      NOT NULL DEFAULT 0,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO postrider.origin DEFAULT VALUES;
