-- What the campus service creates (PostgreSQL).
CREATE TABLE enrolments (id bigserial PRIMARY KEY, course text NOT NULL, student text NOT NULL);

CREATE TABLE outbox_events (
    id             bigserial   PRIMARY KEY,
    routing_key    text        NOT NULL,
    aggregate_type text        NOT NULL,
    aggregate_id   text        NOT NULL,
    payload        jsonb       NOT NULL,
    status         text        NOT NULL DEFAULT 'pending',
    attempts       int         NOT NULL DEFAULT 0,
    available_at   timestamptz NOT NULL DEFAULT now(),
    published_at   timestamptz,
    last_error     text,
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX outbox_events_status_available_at ON outbox_events (status, available_at);
CREATE INDEX outbox_events_aggregate_id ON outbox_events (aggregate_id);
