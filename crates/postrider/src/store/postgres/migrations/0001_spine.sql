-- The outbox is a log: rows are inserted by producers, read between two snapshots by the relay, and never updated or
-- deleted. Retention drops whole partitions.
CREATE SCHEMA IF NOT EXISTS postrider;

CREATE TABLE postrider.outbox (
    -- Drawn without a cache, so that of two transactions on one key the later one has the higher id.
    id           bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),
    -- The inserting transaction; the relay compares it with its snapshots.
    tx           xid8        NOT NULL DEFAULT pg_current_xact_id(),
    -- A UUIDv7: milliseconds of the epoch, then random bits of a version-4 UUID with the version nibble changed.
    event_id     uuid        NOT NULL DEFAULT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                    FROM 1 FOR 6),
            52, 1), 53, 1), 'hex')::uuid,
    topic        text        NOT NULL,
    key          text,
    type         text        NOT NULL,
    -- json, not jsonb: the text is validated and kept as it is, and costs nothing to read.
    payload      json,
    -- For payloads that are not JSON; then payload is null.
    payload_bytes bytea,
    content_type text        NOT NULL DEFAULT 'application/json',
    source       text,
    subject      text,
    tenant       text,
    correlation  text,
    causation    text,
    traceparent  text,
    tracestate   text,
    headers      jsonb,
    -- Shown to people and used to choose a partition; never an order.
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT outbox_topic_is_1_to_255_bytes CHECK (octet_length(topic) BETWEEN 1 AND 255),
    CONSTRAINT outbox_key_is_1_to_255_bytes CHECK (octet_length(key) BETWEEN 1 AND 255),
    CONSTRAINT outbox_type_is_1_to_1024_bytes CHECK (octet_length(type) BETWEEN 1 AND 1024),
    CONSTRAINT outbox_has_one_payload CHECK (payload IS NULL OR payload_bytes IS NULL),
    CONSTRAINT outbox_headers_is_an_object CHECK (jsonb_typeof(headers) = 'object'),
    CONSTRAINT outbox_created_at_is_a_date_of_our_time CHECK (created_at BETWEEN '2000-01-01' AND '9999-12-31')
) PARTITION BY RANGE (created_at);

-- An insert must never fail because upkeep did not run.
CREATE TABLE postrider.outbox_default PARTITION OF postrider.outbox DEFAULT;

-- The relay finds new transactions by tx, and pages through a large window by id.
CREATE INDEX outbox_tx ON postrider.outbox (tx);
CREATE INDEX outbox_id ON postrider.outbox (id);

-- Who does what. A slot of -1 is a member of the group; other slots have one holder, fenced by the epoch.
CREATE TABLE postrider.lease (
    group_name text        NOT NULL,
    slot       int         NOT NULL,
    owner      text        NOT NULL,
    epoch      bigint      NOT NULL DEFAULT 1,
    expires_at timestamptz NOT NULL,
    CONSTRAINT lease_slot CHECK (slot >= -1)
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX lease_holder ON postrider.lease (group_name, slot) WHERE slot >= 0;
CREATE UNIQUE INDEX lease_member ON postrider.lease (group_name, owner) WHERE slot = -1;

-- How far the relay has come, per destination and lane: everything visible in done, and of what is visible in target
-- (while a large window is read in pages) everything up to last_id.
CREATE TABLE postrider.lane (
    destination text        NOT NULL,
    lane        int         NOT NULL,
    lanes       int         NOT NULL,
    epoch       bigint      NOT NULL,
    done        pg_snapshot NOT NULL,
    target      pg_snapshot,
    last_id     bigint      NOT NULL DEFAULT 0,
    settled_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (destination, lane)
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);

-- What could not be published, copied from the log with its reason, and what waits behind it.
CREATE TABLE postrider.parked (
    destination  text        NOT NULL,
    id           bigint      NOT NULL,
    state        text        NOT NULL CHECK (state IN ('retrying', 'waiting', 'failed')),
    attempts     int         NOT NULL,
    next_at      timestamptz NOT NULL,
    failure_kind text,
    failure      text,
    parked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    event_id     uuid        NOT NULL,
    topic        text        NOT NULL,
    key          text,
    type         text        NOT NULL,
    payload      json,
    payload_bytes bytea,
    content_type text        NOT NULL,
    source       text,
    subject      text,
    tenant       text,
    correlation  text,
    causation    text,
    traceparent  text,
    tracestate   text,
    headers      jsonb,
    created_at   timestamptz NOT NULL,
    PRIMARY KEY (destination, id)
);
CREATE INDEX parked_key ON postrider.parked (destination, key, id);
CREATE INDEX parked_state ON postrider.parked (destination, state, next_at);

-- Which lane an event belongs to. Events without a key have no order and are spread by their id.
CREATE FUNCTION postrider.lane_of(key text, id bigint, lanes int) RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT ((hashtextextended(coalesce(key, id::text), 0) & 2147483647) % lanes)::int
$$;

-- One row per event and destination, for people.
CREATE VIEW postrider.outbox_status AS
SELECT o.id, o.event_id, l.destination, o.topic, o.key, o.type, o.created_at,
       CASE WHEN p.state IS NOT NULL THEN p.state
            WHEN pg_visible_in_snapshot(o.tx, l.done) THEN 'published'
            WHEN o.id <= l.last_id AND pg_visible_in_snapshot(o.tx, l.target) THEN 'published'
            ELSE 'pending' END AS status,
       coalesce(p.attempts, 0) AS attempts, p.next_at, p.failure AS last_error
FROM postrider.outbox o
LEFT JOIN postrider.lane l ON l.lane = postrider.lane_of(o.key, o.id, l.lanes)
LEFT JOIN postrider.parked p ON p.destination = l.destination AND p.id = o.id
UNION ALL
-- Parked events whose partition is gone.
SELECT p.id, p.event_id, p.destination, p.topic, p.key, p.type, p.created_at, p.state, p.attempts, p.next_at, p.failure
FROM postrider.parked p
WHERE NOT EXISTS (SELECT 1 FROM postrider.outbox o WHERE o.id = p.id);

-- Wakes a relay that sleeps. NOTIFY in every transaction would serialise all commits, so it happens only while a
-- relay holds the shared advisory lock that says so; trying the exclusive one costs a microsecond. A transaction that is
-- to be prepared for two-phase commit must not notify: SET LOCAL postrider.notify = 'off' there, polling finds its events.
CREATE FUNCTION postrider.wake() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_lock(7062611490211870000) THEN
        PERFORM pg_advisory_unlock(7062611490211870000);
    ELSIF current_setting('postrider.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_notify('postrider_outbox', '');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_wake AFTER INSERT ON postrider.outbox
    FOR EACH STATEMENT EXECUTE FUNCTION postrider.wake();

-- The validated way in, for any language.
CREATE FUNCTION postrider.enqueue(
    topic text, type text, payload json, key text DEFAULT NULL, headers jsonb DEFAULT NULL, tenant text DEFAULT NULL,
    subject text DEFAULT NULL, source text DEFAULT NULL, correlation text DEFAULT NULL, causation text DEFAULT NULL,
    traceparent text DEFAULT NULL, tracestate text DEFAULT NULL, event_id uuid DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    header record;
    new_id uuid;
BEGIN
    IF topic IS NULL OR topic = '' THEN
        RAISE EXCEPTION 'postrider: the topic is empty' USING ERRCODE = 'check_violation', HINT = 'name the topic, for example orders.created';
    END IF;
    IF octet_length(topic) > 255 THEN
        RAISE EXCEPTION 'postrider: the topic has % bytes, the limit is 255', octet_length(topic) USING ERRCODE = 'check_violation';
    END IF;
    IF type IS NULL OR type = '' THEN
        RAISE EXCEPTION 'postrider: the type is empty' USING ERRCODE = 'check_violation', HINT = 'name the type, for example order.created';
    END IF;
    IF key = '' OR octet_length(key) > 255 THEN
        RAISE EXCEPTION 'postrider: the key has % bytes, it must have 1 to 255', octet_length(key) USING ERRCODE = 'check_violation';
    END IF;
    IF payload IS NULL THEN
        RAISE EXCEPTION 'postrider: the payload is null' USING ERRCODE = 'not_null_violation', HINT = 'send at least {}';
    END IF;
    IF headers IS NOT NULL THEN
        IF jsonb_typeof(headers) <> 'object' THEN
            RAISE EXCEPTION 'postrider: headers must be a JSON object' USING ERRCODE = 'check_violation';
        END IF;
        FOR header IN SELECT e.key AS name, jsonb_typeof(e.value) AS kind FROM jsonb_each(headers) e LOOP
            IF header.kind <> 'string' OR header.name !~ '^[A-Za-z0-9._-]{1,128}$' OR header.name ~* '^cloudevents' THEN
                RAISE EXCEPTION 'postrider: the header "%" cannot be sent', header.name USING ERRCODE = 'check_violation',
                    HINT = 'use letters, digits, ''-'', ''_'' and ''.'' in the name and a string as value';
            END IF;
        END LOOP;
    END IF;
    INSERT INTO postrider.outbox AS o (event_id, topic, key, type, payload, headers, tenant, subject, source, correlation,
        causation, traceparent, tracestate)
    VALUES (coalesce(enqueue.event_id, encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
            PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
            52, 1), 53, 1), 'hex')::uuid),
        enqueue.topic, enqueue.key, enqueue.type, enqueue.payload, enqueue.headers, enqueue.tenant, enqueue.subject,
        enqueue.source, enqueue.correlation, enqueue.causation, enqueue.traceparent, enqueue.tracestate)
    RETURNING o.event_id INTO new_id;
    RETURN new_id;
END $$;

-- Each event once per consumer, inserted in the transaction of its effect.
CREATE TABLE postrider.inbox (
    consumer     text        NOT NULL,
    message_id   uuid        NOT NULL,
    state        text        NOT NULL DEFAULT 'done',
    error        text,
    topic        text        NOT NULL,
    key          text,
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, message_id)
);
CREATE INDEX inbox_processed_at ON postrider.inbox USING brin (processed_at);

-- The embedded broker's log. Appended under a lock, so that offsets are in commit order.
CREATE TABLE postrider.message (
    "offset"     bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hash         bigint      NOT NULL,
    event_id     uuid        NOT NULL,
    topic        text        NOT NULL,
    key          text,
    type         text        NOT NULL,
    payload      bytea       NOT NULL,
    content_type text        NOT NULL,
    source       text,
    subject      text,
    tenant       text,
    correlation  text,
    causation    text,
    traceparent  text,
    tracestate   text,
    headers      jsonb,
    created_at   timestamptz NOT NULL,
    appended_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- How far a consumer of the embedded broker has come.
CREATE TABLE postrider.cursor (
    consumer text   NOT NULL,
    slot     int    NOT NULL,
    slots    int    NOT NULL,
    epoch    bigint NOT NULL,
    "offset" bigint NOT NULL,
    PRIMARY KEY (consumer, slot)
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0);
