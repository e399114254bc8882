-- What people and other languages use: the status of every event, and a procedure that enqueues.

-- One row per event and destination that gets it. A discarded event is one that the relay has passed and never published.
CREATE OR REPLACE VIEW postrider_outbox_status AS
SELECT o.id, o.event_id, l.destination, o.topic, o.`key`, o.type, o.created_at,
       CASE WHEN p.state IS NOT NULL THEN p.state
            WHEN d.id IS NOT NULL THEN d.state
            WHEN o.state = 1 THEN 'published'
            ELSE 'pending' END AS status,
       COALESCE(p.attempts, d.attempts, 0) AS attempts, p.next_at, COALESCE(p.failure, d.error) AS last_error
  FROM postrider_outbox o
  LEFT JOIN postrider_lane l ON l.lane = 0 AND (l.topics IS NULL OR o.topic REGEXP l.topics)
  LEFT JOIN postrider_parked p ON p.destination = l.destination AND p.id = o.id
  LEFT JOIN postrider_dead_letter d ON d.consumer = CONCAT('relay/', l.destination) AND d.message_id = o.event_id
       AND d.state = 'discarded' AND d.outbox_id = o.id
UNION ALL
-- Parked events outlive their outbox row.
SELECT p.id, p.event_id, p.destination, p.topic, p.`key`, p.type, p.created_at, p.state, p.attempts, p.next_at, p.failure
  FROM postrider_parked p
 WHERE NOT EXISTS (SELECT 1 FROM postrider_outbox o WHERE o.id = p.id);

-- The way in for any language, with the caller's rights; the table's constraints validate. One statement, so that no client
-- needs another delimiter. The last four may be null.
DROP PROCEDURE IF EXISTS postrider_enqueue;
CREATE PROCEDURE postrider_enqueue(
    IN topic_ VARCHAR(255) CHARACTER SET utf8mb4, IN type_ VARCHAR(1024) CHARACTER SET utf8mb4,
    IN payload_ LONGTEXT CHARACTER SET utf8mb4, IN key_ VARCHAR(255) CHARACTER SET utf8mb4,
    IN headers_ LONGTEXT CHARACTER SET utf8mb4, IN tenant_ VARCHAR(1024) CHARACTER SET utf8mb4,
    IN event_id_ VARCHAR(36) CHARACTER SET utf8mb4)
    MODIFIES SQL DATA SQL SECURITY INVOKER
INSERT INTO postrider_outbox (event_id, topic, type, payload, `key`, headers, tenant)
VALUES (COALESCE(event_id_, LOWER(CONCAT(
        LPAD(HEX(CAST(FLOOR(UNIX_TIMESTAMP(NOW(3)) * 1000) AS UNSIGNED) DIV 65536), 8, '0'), '-',
        LPAD(HEX(CAST(FLOOR(UNIX_TIMESTAMP(NOW(3)) * 1000) AS UNSIGNED) MOD 65536), 4, '0'), '-7',
        SUBSTR(MD5(UUID()), 1, 3), '-', SUBSTR('89ab', 1 + FLOOR(RAND() * 4), 1),
        SUBSTR(MD5(UUID()), 1, 3), '-', SUBSTR(MD5(UUID()), 1, 12)))),
    topic_, type_, payload_, key_, headers_, tenant_);
