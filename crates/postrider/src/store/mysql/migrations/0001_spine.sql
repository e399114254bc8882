-- The spine: outbox, lanes, side table, leases, the embedded broker's log.
--
-- DDL cannot be rolled back here, so every statement may be run again. Texts are compared byte by byte: case, accents and
-- trailing blanks count. The collation that does so has another name on either server, hence the two comments that each
-- server reads as its own. Times are UTC.

-- Producers insert, the relay changes `state` alone (0 pending, 1 handled: published, or copied to the side table), retention
-- deletes. Ids are drawn before the commit, so a row may appear below others that were read already: the relay looks for
-- pending rows, it keeps no cursor.
--
--     INSERT INTO postrider_outbox (topic, `key`, type, payload) VALUES ('orders.made', 'o-1', 'order.made', '{"total": 120}');
CREATE TABLE IF NOT EXISTS postrider_outbox (
    id            BIGINT        NOT NULL AUTO_INCREMENT,
    state         TINYINT       NOT NULL DEFAULT 0,
    -- A UUIDv7: milliseconds of the epoch, then bits of hashes that never repeat.
    event_id      VARCHAR(36)   NOT NULL DEFAULT (LOWER(CONCAT(
        LPAD(HEX(CAST(FLOOR(UNIX_TIMESTAMP(NOW(3)) * 1000) AS UNSIGNED) DIV 65536), 8, '0'), '-',
        LPAD(HEX(CAST(FLOOR(UNIX_TIMESTAMP(NOW(3)) * 1000) AS UNSIGNED) MOD 65536), 4, '0'), '-7',
        SUBSTR(MD5(UUID()), 1, 3), '-', SUBSTR('89ab', 1 + FLOOR(RAND() * 4), 1),
        SUBSTR(MD5(UUID()), 1, 3), '-', SUBSTR(MD5(UUID()), 1, 12)))),
    topic         VARCHAR(255)  NOT NULL,
    `key`         VARCHAR(255),
    type          VARCHAR(1024) NOT NULL,
    -- JSON as it was written: the type JSON would order its keys anew on MySQL.
    payload       LONGTEXT,
    -- For payloads that are not JSON; then payload is null.
    payload_bytes LONGBLOB,
    content_type  VARCHAR(255)  NOT NULL DEFAULT 'application/json',
    source        VARCHAR(1024),
    subject       VARCHAR(1024),
    tenant        VARCHAR(1024),
    correlation   VARCHAR(1024),
    causation     VARCHAR(1024),
    traceparent   VARCHAR(1024),
    tracestate    VARCHAR(1024),
    headers       LONGTEXT,
    -- Shown to people, and what retention counts from; never an order.
    created_at    DATETIME(6)   NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    -- What lanes share events by. Events without a key have no order and are spread by their id.
    hash          BIGINT        GENERATED ALWAYS AS (CRC32(COALESCE(`key`, event_id))) STORED,
    PRIMARY KEY (id),
    KEY postrider_outbox_state (state, id, hash),
    CONSTRAINT postrider_outbox_state_is_0_or_1 CHECK (state IN (0, 1)),
    CONSTRAINT postrider_outbox_event_id_is_a_uuid CHECK (event_id REGEXP '^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$'),
    CONSTRAINT postrider_outbox_topic_has_1_to_255_bytes CHECK (OCTET_LENGTH(topic) BETWEEN 1 AND 255),
    CONSTRAINT postrider_outbox_topic_has_no_control_character CHECK (topic NOT REGEXP '[[:cntrl:]]'),
    CONSTRAINT postrider_outbox_key_has_1_to_255_bytes CHECK (OCTET_LENGTH(`key`) BETWEEN 1 AND 255),
    CONSTRAINT postrider_outbox_type_has_1_to_1024_bytes CHECK (OCTET_LENGTH(type) BETWEEN 1 AND 1024),
    CONSTRAINT postrider_outbox_payload_is_valid_json CHECK (payload IS NULL OR JSON_VALID(payload)),
    CONSTRAINT postrider_outbox_has_one_payload CHECK ((payload IS NULL) <> (payload_bytes IS NULL)),
    CONSTRAINT postrider_outbox_headers_is_a_json_object CHECK (headers IS NULL OR (JSON_VALID(headers) AND JSON_TYPE(headers) = 'OBJECT')),
    CONSTRAINT postrider_outbox_created_at_is_of_our_time CHECK (created_at BETWEEN '2000-01-01' AND '9999-12-31')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Who works on which lane of a destination: the epoch fences every write. `topics` says which topics go there, as a regular
-- expression; null for all.
CREATE TABLE IF NOT EXISTS postrider_lane (
    destination VARCHAR(255) NOT NULL,
    lane        INT          NOT NULL,
    lanes       INT          NOT NULL,
    epoch       BIGINT       NOT NULL DEFAULT 0,
    topics      LONGTEXT,
    PRIMARY KEY (destination, lane)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- The side table: events that could not be published, or that wait behind one of their key. A full copy, so that retention of
-- the outbox need not look here.
CREATE TABLE IF NOT EXISTS postrider_parked (
    destination   VARCHAR(255)  NOT NULL,
    id            BIGINT        NOT NULL,
    hash          BIGINT        NOT NULL,
    state         VARCHAR(16)   NOT NULL,
    attempts      INT           NOT NULL,
    next_at       DATETIME(6)   NOT NULL,
    failure_kind  VARCHAR(64),
    failure       LONGTEXT,
    parked_at     DATETIME(6)   NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    event_id      VARCHAR(36)   NOT NULL,
    topic         VARCHAR(255)  NOT NULL,
    `key`         VARCHAR(255),
    type          VARCHAR(1024) NOT NULL,
    payload       LONGTEXT,
    payload_bytes LONGBLOB,
    content_type  VARCHAR(255)  NOT NULL,
    source        VARCHAR(1024),
    subject       VARCHAR(1024),
    tenant        VARCHAR(1024),
    correlation   VARCHAR(1024),
    causation     VARCHAR(1024),
    traceparent   VARCHAR(1024),
    tracestate    VARCHAR(1024),
    headers       LONGTEXT,
    created_at    DATETIME(6)   NOT NULL,
    PRIMARY KEY (destination, id),
    KEY postrider_parked_key (destination, `key`, id, hash),
    KEY postrider_parked_state (destination, state, next_at),
    KEY postrider_parked_event (destination, event_id),
    CONSTRAINT postrider_parked_state_is_known CHECK (state IN ('retrying', 'waiting', 'failed'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Who works on which slot. Rows are never deleted: an epoch must not start over. A lease that was given back has the owner ''.
CREATE TABLE IF NOT EXISTS postrider_lease (
    group_name VARCHAR(255) NOT NULL,
    slot       INT          NOT NULL,
    owner      VARCHAR(255) NOT NULL,
    epoch      BIGINT       NOT NULL,
    expires_at DATETIME(6)  NOT NULL,
    PRIMARY KEY (group_name, slot)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Who would like to work.
CREATE TABLE IF NOT EXISTS postrider_member (
    group_name VARCHAR(255) NOT NULL,
    owner      VARCHAR(255) NOT NULL,
    expires_at DATETIME(6)  NOT NULL,
    PRIMARY KEY (group_name, owner)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Locks by name that end with their transaction: whoever has written the row is alone.
CREATE TABLE IF NOT EXISTS postrider_mutex (
    name VARCHAR(255) NOT NULL,
    PRIMARY KEY (name)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- The embedded broker's log. Appended under a lock, so that offsets are in commit order.
CREATE TABLE IF NOT EXISTS postrider_message (
    `offset`      BIGINT        NOT NULL AUTO_INCREMENT,
    hash          BIGINT        NOT NULL,
    event_id      VARCHAR(36)   NOT NULL,
    topic         VARCHAR(255)  NOT NULL,
    `key`         VARCHAR(255),
    type          VARCHAR(1024) NOT NULL,
    payload       LONGTEXT,
    payload_bytes LONGBLOB,
    content_type  VARCHAR(255)  NOT NULL,
    source        VARCHAR(1024),
    subject       VARCHAR(1024),
    tenant        VARCHAR(1024),
    correlation   VARCHAR(1024),
    causation     VARCHAR(1024),
    traceparent   VARCHAR(1024),
    tracestate    VARCHAR(1024),
    headers       LONGTEXT,
    created_at    DATETIME(6)   NOT NULL,
    appended_at   DATETIME(6)   NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (`offset`)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- How far each consumer of the embedded broker has come: everything up to the offset is done. `is_open`: its holder has not
-- said that it ended.
CREATE TABLE IF NOT EXISTS postrider_cursor (
    consumer VARCHAR(255) NOT NULL,
    slot     INT          NOT NULL,
    slots    INT          NOT NULL,
    epoch    BIGINT       NOT NULL DEFAULT 0,
    `offset` BIGINT       NOT NULL DEFAULT 0,
    is_open  TINYINT      NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, slot)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;
