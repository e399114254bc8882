-- What the people on call read: who lives, what was counted, what is wrong, who was told, what a check found.

-- Instances, as they tell of themselves every few seconds. `breaker`: why it lets nothing through, and since when.
CREATE TABLE IF NOT EXISTS postrider_instance (
    group_name    VARCHAR(255) NOT NULL,
    owner         VARCHAR(255) NOT NULL,
    version       VARCHAR(255) NOT NULL,
    started_at    DATETIME(6)  NOT NULL,
    seen_at       DATETIME(6)  NOT NULL,
    breaker       LONGTEXT,
    breaker_since DATETIME(6),
    PRIMARY KEY (group_name, owner)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Counts by minute (width 60), quarter of an hour (900) and hour (3600).
CREATE TABLE IF NOT EXISTS postrider_bucket (
    width      INT          NOT NULL,
    at         DATETIME     NOT NULL,
    group_name VARCHAR(255) NOT NULL,
    metric     VARCHAR(32)  NOT NULL,
    label      VARCHAR(200) NOT NULL,
    count      BIGINT       NOT NULL,
    PRIMARY KEY (width, at, group_name, metric, label)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- `is_open` is null of one that is over, so that a rule and subject have one open alert. `is_told`: whether a delivery was
-- written for it.
CREATE TABLE IF NOT EXISTS postrider_alert (
    id          BIGINT       NOT NULL AUTO_INCREMENT,
    rule        VARCHAR(255) NOT NULL,
    subject     VARCHAR(255) NOT NULL,
    urgency     VARCHAR(16)  NOT NULL,
    summary     LONGTEXT     NOT NULL,
    remedy      LONGTEXT     NOT NULL,
    fired_at    DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    resolved_at DATETIME(6),
    is_open     TINYINT      DEFAULT 1,
    is_told     TINYINT      NOT NULL,
    PRIMARY KEY (id),
    UNIQUE KEY postrider_alert_open (is_open, rule, subject),
    KEY postrider_alert_resolved_at (resolved_at),
    CONSTRAINT postrider_alert_urgency_is_known CHECK (urgency IN ('warning', 'critical'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Whom to tell; a row goes when it was told.
CREATE TABLE IF NOT EXISTS postrider_delivery (
    id            BIGINT       NOT NULL AUTO_INCREMENT,
    alert_id      BIGINT       NOT NULL,
    sink          VARCHAR(255) NOT NULL,
    is_resolution TINYINT      NOT NULL,
    failures      INT          NOT NULL DEFAULT 0,
    next_at       DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    error         LONGTEXT,
    PRIMARY KEY (id),
    KEY postrider_delivery_order (alert_id, sink, id),
    CONSTRAINT postrider_delivery_alert FOREIGN KEY (alert_id) REFERENCES postrider_alert (id) ON DELETE CASCADE
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Nobody is told of these alerts until then; an empty rule or subject means all.
CREATE TABLE IF NOT EXISTS postrider_silence (
    id       BIGINT       NOT NULL AUTO_INCREMENT,
    rule     VARCHAR(255) NOT NULL,
    subject  VARCHAR(255) NOT NULL,
    until_at DATETIME(6)  NOT NULL,
    reason   LONGTEXT     NOT NULL,
    actor    LONGTEXT     NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- Integrity reports. One that was scheduled is begun once across all instances.
CREATE TABLE IF NOT EXISTS postrider_report (
    id            BIGINT      NOT NULL AUTO_INCREMENT,
    began_at      DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    ended_at      DATETIME(6),
    actor         LONGTEXT    NOT NULL,
    scheduled_for DATETIME(6),
    checks        INT         NOT NULL DEFAULT 0,
    warnings      INT         NOT NULL DEFAULT 0,
    errors        INT         NOT NULL DEFAULT 0,
    findings      LONGTEXT    NOT NULL,
    PRIMARY KEY (id),
    UNIQUE KEY postrider_report_scheduled_for (scheduled_for),
    KEY postrider_report_began_at (began_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;

-- How often the database was restored, as far as a person has said so. The lineage is drawn once; dumps and copies bring it
-- along, so it says what was published from this database wherever it stands now.
CREATE TABLE IF NOT EXISTS postrider_origin (
    is_one  TINYINT     NOT NULL PRIMARY KEY CHECK (is_one = 1),
    lineage VARCHAR(36) NOT NULL,
    life    BIGINT      NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;
INSERT IGNORE INTO postrider_origin VALUES (1, UUID(), 0);

-- What is shown is found through an index, however much there is. An index cannot be created twice, hence the question
-- whether it is there. `error_label` is the error's type as far as it fits into one.
SET @postrider_sql = IF(EXISTS (SELECT 1 FROM information_schema.statistics WHERE table_schema = DATABASE()
        AND table_name = 'postrider_dead_letter' AND index_name = 'postrider_dead_letter_stats'), 'DO 0',
    'ALTER TABLE postrider_dead_letter
        ADD COLUMN error_label VARCHAR(200) GENERATED ALWAYS AS (LEFT(error_type, 200)) VIRTUAL,
        ADD KEY postrider_dead_letter_stats (stage, consumer, error_label, state, died_at),
        ADD KEY postrider_dead_letter_open (consumer, state, died_at),
        ADD KEY postrider_dead_letter_state (state, stage),
        ADD KEY postrider_dead_letter_consumer (consumer, id),
        ADD KEY postrider_dead_letter_error (error_type(191)),
        ADD KEY postrider_dead_letter_type (type(191)),
        ADD KEY postrider_dead_letter_of_key (`key`, id),
        ADD KEY postrider_dead_letter_tenant (tenant(191))');
PREPARE postrider_alter FROM @postrider_sql;
EXECUTE postrider_alter;
SET @postrider_sql = IF(EXISTS (SELECT 1 FROM information_schema.statistics WHERE table_schema = DATABASE()
        AND table_name = 'postrider_held' AND index_name = 'postrider_held_order'), 'DO 0',
    'ALTER TABLE postrider_held ADD KEY postrider_held_order (consumer, id)');
PREPARE postrider_alter FROM @postrider_sql;
EXECUTE postrider_alter;
SET @postrider_sql = IF(EXISTS (SELECT 1 FROM information_schema.statistics WHERE table_schema = DATABASE()
        AND table_name = 'postrider_parked' AND index_name = 'postrider_parked_holder'), 'DO 0',
    'ALTER TABLE postrider_parked ADD KEY postrider_parked_holder (destination, state, id)');
PREPARE postrider_alter FROM @postrider_sql;
EXECUTE postrider_alter;
SET @postrider_sql = IF(EXISTS (SELECT 1 FROM information_schema.statistics WHERE table_schema = DATABASE()
        AND table_name = 'postrider_audit' AND index_name = 'postrider_audit_at'), 'DO 0',
    'ALTER TABLE postrider_audit ADD KEY postrider_audit_at (at)');
PREPARE postrider_alter FROM @postrider_sql;
EXECUTE postrider_alter;
DEALLOCATE PREPARE postrider_alter;
