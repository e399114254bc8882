-- What a consumer could not apply yet, what waits behind it, and what was given up.

-- Tells a message that comes twice from another one with the same id.
ALTER TABLE postrider.inbox ADD COLUMN fingerprint bigint;

CREATE TABLE postrider.held (
    -- The order of arrival, which is the order within a key.
    id          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    consumer    text        NOT NULL,
    -- The hash that slots share messages by.
    shard       int         NOT NULL,
    message_id  uuid        NOT NULL,
    key         text,
    state       text        NOT NULL CHECK (state IN ('retrying', 'waiting', 'suspect', 'running')),
    attempts    int         NOT NULL DEFAULT 0,
    -- A message that waits behind another has infinity until it is the first of its key.
    next_at     timestamptz NOT NULL,
    -- The attempts: [{"at", "error_type", "error", "causes"}].
    history     jsonb       NOT NULL DEFAULT '[]',
    origin      jsonb       NOT NULL,
    -- The event without its payload.
    envelope    jsonb       NOT NULL,
    payload     bytea       NOT NULL,
    held_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (consumer, message_id)
);
CREATE INDEX held_due ON postrider.held (consumer, next_at);
CREATE INDEX held_key ON postrider.held (consumer, key, id);

CREATE TABLE postrider.dead_letter (
    id          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    consumer    text        NOT NULL,
    message_id  uuid        NOT NULL,
    state       text        NOT NULL DEFAULT 'dead' CHECK (state IN ('dead', 'replaying', 'discarded')),
    shard       int         NOT NULL,
    topic       text,
    type        text,
    key         text,
    tenant      text,
    error_type  text        NOT NULL,
    error       text        NOT NULL,
    causes      jsonb       NOT NULL DEFAULT '[]',
    attempts    int         NOT NULL,
    history     jsonb       NOT NULL,
    origin      jsonb       NOT NULL,
    -- Null for a message that is no event; then headers holds what came with it.
    envelope    jsonb,
    headers     jsonb,
    payload     bytea       NOT NULL,
    died_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (consumer, message_id)
);
CREATE INDEX dead_letter_died_at ON postrider.dead_letter (died_at);
CREATE INDEX dead_letter_key ON postrider.dead_letter (consumer, key, id);

-- Whether a slot's holder has not said that it ended: what it may have had in hand is suspicious.
ALTER TABLE postrider.cursor ADD COLUMN is_open boolean NOT NULL DEFAULT false;

-- Who did what at the desk.
CREATE TABLE postrider.audit (
    id     bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor  text        NOT NULL,
    action text        NOT NULL,
    detail jsonb       NOT NULL
);
