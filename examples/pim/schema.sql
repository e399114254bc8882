-- What the product service creates (PostgreSQL).
CREATE TABLE products (sku text PRIMARY KEY, name text NOT NULL);

CREATE TABLE outbox_events (
    id           bigserial    PRIMARY KEY,
    event_id     uuid         UNIQUE NOT NULL,
    event_type   varchar(100) NOT NULL,
    payload      jsonb        NOT NULL,
    published    boolean      DEFAULT false,
    created_at   timestamp    DEFAULT now(),
    published_at timestamp
);
CREATE INDEX idx_unpublished ON outbox_events (published, created_at) WHERE published = false;
