-- What the shop's service creates (MySQL, MariaDB).
CREATE TABLE Orders (Id char(36) PRIMARY KEY, Total decimal(12, 2) NOT NULL);

CREATE TABLE OutboxMessages (
    Id               char(36)     NOT NULL PRIMARY KEY,
    EventType        varchar(255) NOT NULL,
    Content          longtext     NOT NULL,
    OccurredOnUtc    datetime(6)  NOT NULL,
    ProcessedOnUtc   datetime(6),
    AttemptCount     int          NOT NULL DEFAULT 0,
    MaxAttempts      int          NOT NULL DEFAULT 3,
    NextAttemptOnUtc datetime(6),
    LastErrorMessage text,
    KEY IX_OutboxMessages_ProcessedOnUtc_OccurredOnUtc (ProcessedOnUtc, OccurredOnUtc)
);
