-- What the shop's service creates (PostgreSQL).
CREATE TABLE "Orders" ("Id" uuid PRIMARY KEY, "Total" numeric NOT NULL);

CREATE TABLE "OutboxMessages" (
    "Id"               uuid      PRIMARY KEY DEFAULT gen_random_uuid(),
    "EventType"        text      NOT NULL,
    "Content"          text      NOT NULL,
    "OccurredOnUtc"    timestamp NOT NULL DEFAULT (clock_timestamp() AT TIME ZONE 'UTC'),
    "ProcessedOnUtc"   timestamp,
    "AttemptCount"     int       NOT NULL DEFAULT 0,
    "MaxAttempts"      int       NOT NULL DEFAULT 3,
    "NextAttemptOnUtc" timestamp,
    "LastErrorMessage" text
);
CREATE INDEX "IX_OutboxMessages_ProcessedOnUtc_OccurredOnUtc" ON "OutboxMessages" ("ProcessedOnUtc", "OccurredOnUtc");
