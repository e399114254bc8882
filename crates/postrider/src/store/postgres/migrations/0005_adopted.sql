-- What adopted outbox tables have no columns for: attempts, the time of the next one, failure. A row is here only while
-- its event has failed and is not published.
CREATE TABLE postrider.adopted (
    outbox       text        NOT NULL,
    row_id       text        NOT NULL,
    attempts     int         NOT NULL,
    next_at      timestamptz NOT NULL,
    is_failed    boolean     NOT NULL,
    failure_kind text        NOT NULL,
    failure      text        NOT NULL,
    PRIMARY KEY (outbox, row_id)
);
