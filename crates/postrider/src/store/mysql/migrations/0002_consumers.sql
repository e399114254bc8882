-- What consumers have done, what they could not do yet, what was given up, and the newest change of each entity.

-- Each event once per consumer, inserted in the transaction of its effect. The fingerprint tells a message that comes twice
-- from another one with the same id.
CREATE TABLE IF NOT EXISTS postrider_inbox (
    consumer     VARCHAR(255) NOT NULL,
    message_id   VARCHAR(36)  NOT NULL,
    state        VARCHAR(16)  NOT NULL DEFAULT 'done',
    error        LONGTEXT,
    topic        VARCHAR(255) NOT NULL,
    `key`        VARCHAR(255),
    fingerprint  BIGINT,
    processed_at DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer, message_id),
    KEY postrider_inbox_age (processed_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

CREATE TABLE IF NOT EXISTS postrider_held (
    -- The order of arrival, which is the order within a key.
    id         BIGINT       NOT NULL AUTO_INCREMENT,
    consumer   VARCHAR(255) NOT NULL,
    -- The hash that slots share messages by.
    shard      BIGINT       NOT NULL,
    message_id VARCHAR(36)  NOT NULL,
    `key`      VARCHAR(255),
    state      VARCHAR(16)  NOT NULL,
    attempts   INT          NOT NULL DEFAULT 0,
    -- A message that waits behind another has none until it is the first of its key.
    next_at    DATETIME(6),
    -- The attempts: [{"at", "error_type", "error", "causes"}].
    history    LONGTEXT     NOT NULL,
    origin     LONGTEXT     NOT NULL,
    -- The event without its payload.
    envelope   LONGTEXT     NOT NULL,
    payload    LONGBLOB     NOT NULL,
    held_at    DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (id),
    UNIQUE KEY postrider_held_message (consumer, message_id),
    KEY postrider_held_due (consumer, next_at),
    KEY postrider_held_key (consumer, `key`, id),
    CONSTRAINT postrider_held_state_is_known CHECK (state IN ('retrying', 'waiting', 'suspect', 'running'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- `stage` says who gave it up. One of the relay is an outbox event that the broker refused too often; `consumer` is then
-- relay/<destination>. `sent_at`: when it was sent to the broker's own place for dead letters.
CREATE TABLE IF NOT EXISTS postrider_dead_letter (
    id         BIGINT        NOT NULL AUTO_INCREMENT,
    consumer   VARCHAR(255)  NOT NULL,
    message_id VARCHAR(36)   NOT NULL,
    stage      VARCHAR(16)   NOT NULL DEFAULT 'consumer',
    state      VARCHAR(16)   NOT NULL DEFAULT 'dead',
    shard      BIGINT        NOT NULL,
    topic      VARCHAR(255),
    type       VARCHAR(1024),
    `key`      VARCHAR(255),
    tenant     VARCHAR(1024),
    error_type VARCHAR(1024) NOT NULL,
    error      LONGTEXT      NOT NULL,
    causes     LONGTEXT      NOT NULL,
    attempts   BIGINT        NOT NULL,
    history    LONGTEXT      NOT NULL,
    origin     LONGTEXT      NOT NULL,
    -- The number of its outbox row, for one of the relay.
    outbox_id  BIGINT,
    -- Null for a message that is no event; then headers holds what came with it.
    envelope   LONGTEXT,
    headers    LONGTEXT,
    payload    LONGBLOB      NOT NULL,
    died_at    DATETIME(6)   NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    sent_at    DATETIME(6),
    PRIMARY KEY (id),
    UNIQUE KEY postrider_dead_letter_message (consumer, message_id),
    KEY postrider_dead_letter_age (died_at),
    KEY postrider_dead_letter_key (consumer, `key`, id),
    KEY postrider_dead_letter_unsent (consumer, sent_at, id),
    CONSTRAINT postrider_dead_letter_state_is_known CHECK (state IN ('dead', 'replaying', 'discarded')),
    CONSTRAINT postrider_dead_letter_stage_is_known CHECK (stage IN ('relay', 'consumer'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Who did what at the desk.
CREATE TABLE IF NOT EXISTS postrider_audit (
    id     BIGINT       NOT NULL AUTO_INCREMENT,
    at     DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    actor  LONGTEXT     NOT NULL,
    action VARCHAR(64)  NOT NULL,
    detail LONGTEXT     NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- The newest change that a consumer has applied of each entity. A deleted one stays as a tombstone until no late message can
-- come any more. `at` is the producer's clock, null while nothing is known; `admitted_at` is ours.
CREATE TABLE IF NOT EXISTS postrider_newest (
    consumer    VARCHAR(255) NOT NULL,
    entity      VARCHAR(255) NOT NULL,
    id          VARCHAR(255) NOT NULL,
    version     BIGINT,
    at          DATETIME(6),
    is_deleted  TINYINT      NOT NULL DEFAULT 0,
    admitted_at DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer, entity, id),
    KEY postrider_newest_tombstone (is_deleted, admitted_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;
