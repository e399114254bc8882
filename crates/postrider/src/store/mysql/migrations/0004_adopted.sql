-- What adopted outbox tables have no columns for: attempts, the time of the next one, failure. A row is here only while
-- its event has failed and is not published.
CREATE TABLE IF NOT EXISTS postrider_adopted (
    outbox       VARCHAR(100) NOT NULL,
    row_id       VARCHAR(255) NOT NULL,
    attempts     INT          NOT NULL,
    next_at      DATETIME(6)  NOT NULL,
    is_failed    TINYINT      NOT NULL,
    failure_kind VARCHAR(64)  NOT NULL,
    failure      LONGTEXT     NOT NULL,
    PRIMARY KEY (outbox, row_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */;
