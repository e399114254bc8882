-- An order and its event, in one transaction.
BEGIN;
INSERT INTO "Orders" VALUES ('0b9f7c1e-0000-4000-8000-000000000001', 120);
INSERT INTO "OutboxMessages" ("Id", "EventType", "Content")
VALUES ('5a0d3f52-0000-4000-8000-000000000001', 'OrderCreated', '{"orderId": "0b9f7c1e-0000-4000-8000-000000000001", "total": 120}');
COMMIT;
-- And one that is paid.
INSERT INTO "OutboxMessages" ("Id", "EventType", "Content")
VALUES ('5a0d3f52-0000-4000-8000-000000000002', 'OrderPaid', '{"orderId": "0b9f7c1e-0000-4000-8000-000000000001"}');
