-- What the campus service creates (MySQL, MariaDB).
CREATE TABLE enrolments (id bigint PRIMARY KEY AUTO_INCREMENT, course varchar(100) NOT NULL, student varchar(100) NOT NULL);

CREATE TABLE outbox_events (
    id             bigint       PRIMARY KEY AUTO_INCREMENT,
    routing_key    varchar(255) NOT NULL,
    aggregate_type varchar(100) NOT NULL,
    aggregate_id   varchar(100) NOT NULL,
    payload        json         NOT NULL,
    status         varchar(20)  NOT NULL DEFAULT 'pending',
    attempts       int          NOT NULL DEFAULT 0,
    available_at   datetime(6)  NOT NULL DEFAULT current_timestamp(6),
    published_at   datetime(6),
    last_error     text,
    created_at     datetime(6)  NOT NULL DEFAULT current_timestamp(6),
    updated_at     datetime(6)  NOT NULL DEFAULT current_timestamp(6),
    KEY outbox_events_status_available_at (status, available_at),
    KEY outbox_events_aggregate_id (aggregate_id)
);
